"""From verifiers' trace to samples: each branch one sequence, each sampled token trained once."""

from collections.abc import Sequence
from typing import Any

from primerl.rollout.conversations.calls import Call, stitch
from primerl.types import Completion, Sample


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


def trace_samples(trace: Any, *, temperature: float) -> list[Sample]:
    """The fewest samples that train each reply of ``trace`` once; see ``stitch``.

    Raises:
        ValueError: a reply's tokens are not those that the engine sampled.
    """
    return stitch(trace_calls(trace.nodes), temperature=temperature)


def trace_calls(nodes: Sequence[Any]) -> list[Call]:
    """The engine calls of a trace, whose nodes come after their parents.

    Raises:
        ValueError: a reply's tokens are not those that the engine sampled.
    """
    calls: list[Call] = []
    ends: list[tuple[Call | None, list[int]]] = []  # of each node: the last call, the tokens since
    for index, node in enumerate(nodes):
        call, before = (None, []) if node.parent is None else ends[node.parent]
        completion = reply_completion(node)
        tokens = [*before, *node.token_ids]
        if completion is not None:
            start = len(tokens) - len(completion.token_ids)
            if tokens[start:] != completion.token_ids.tolist():
                raise ValueError(
                    f"reply {index} of the trace does not end with the tokens that were sampled; "
                    "a hook of the environment changed them"
                )
            call = Call(new_ids=tokens[:start], completion=completion, parent=call)
            calls.append(call)
            tokens = []
        ends.append((call, tokens))
    return calls


def last_reply(trace: Any) -> SampledLogprobs | None:
    """The most recent reply that an engine sampled."""
    for node in reversed(trace.nodes):
        if reply_completion(node) is not None:
            reply: SampledLogprobs = node.logprobs
            return reply
    return None


def branch(nodes: Sequence[Any], leaf: int) -> list[int]:
    """The nodes from the first one to ``leaf``, by their index."""
    path = [leaf]
    while (parent := nodes[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def reply_completion(node: Any) -> Completion | None:
    """The completion of a reply that an engine sampled; None for any other message."""
    sampled = node.sampled and isinstance(node.logprobs, SampledLogprobs)
    return node.logprobs.completion if sampled and len(node.logprobs) else None
