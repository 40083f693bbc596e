"""From verifiers' trace to engine calls, of which samples are made."""

from typing import Any

from primerl.rollout.conversations.calls import Call
from primerl.types import Completion


class SampledLogprobs(list[float]):
    """A completion's logprobs as verifiers stores them, with the completion itself.

    verifiers' trace has no field for per-token versions, but keeps this list in the node of the
    reply, so the versions stay with their tokens.

    Args:
        completion: what the engine returned.
        filled_context: the reply ended because the context did.
    """

    def __init__(self, completion: Completion, *, filled_context: bool = False) -> None:
        super().__init__(completion.logprobs.tolist())
        self.completion = completion
        self.filled_context = filled_context


def trace_calls(trace: Any) -> list[Call]:
    """The engine calls of a trace, whose nodes come after their parents.

    A call extends the one before it on its path, also where an environment said something in the
    policy's place: the tokens tell, whatever was asked for.

    Raises:
        ValueError: a reply's tokens are not those that the engine sampled.
    """
    calls: list[Call] = []
    ends: list[tuple[Call | None, list[int]]] = []  # of each node: the last call, the tokens since
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
            call = Call(
                new_ids=tokens[:start],
                completion=reply.completion,
                parent=call,
                filled_context=reply.filled_context,
            )
            calls.append(call)
            tokens = []
        ends.append((call, tokens))
    return calls
