"""Conversion of verifiers' traces to engine calls, from which samples are stitched."""

from typing import Any

from primerl.rollout.conversations.calls import EngineCall
from primerl.types import Completion


class SampledLogprobs(list[float]):
    """A completion's logprobs as the list that verifiers stores, with the completion itself.

    verifiers' trace has no field for per-token versions, but it stores this list in the node of the
    reply, so the versions stay with their tokens.

    Args:
        completion: the engine's completion.
        filled_context: whether the reply ended because the context was full.
    """

    def __init__(self, completion: Completion, *, filled_context: bool = False) -> None:
        super().__init__(completion.logprobs.tolist())
        self.completion = completion
        self.filled_context = filled_context


def trace_calls(trace: Any) -> list[EngineCall]:
    """Return the engine calls of a trace, whose nodes come after their parents.

    A call extends the last call before it on its path, even if an environment inserted a message in
    the policy's place in between: the nodes hold the exact tokens of every prompt.

    Raises:
        ValueError: a reply's tokens are not those that the engine sampled.
    """
    calls: list[EngineCall] = []
    ends: list[
        tuple[EngineCall | None, list[int]]
    ] = []  # per node: its last call, and the tokens since
    for index, node in enumerate(trace.nodes):
        call, before = (None, []) if node.parent is None else ends[node.parent]
        tokens = [*before, *node.token_ids]
        reply = node.logprobs
        if node.sampled and isinstance(reply, SampledLogprobs) and reply:
            start = len(tokens) - len(reply.completion.token_ids)
            if tokens[start:] != reply.completion.token_ids.tolist():
                raise ValueError(
                    f"reply {index} of the trace does not end with the tokens that were sampled; "
                    "a hook of the environment changed them"
                )
            call = EngineCall(
                new_ids=tokens[:start],
                completion=reply.completion,
                parent=call,
                filled_context=reply.filled_context,
            )
            calls.append(call)
            tokens = []
        ends.append((call, tokens))
    return calls
