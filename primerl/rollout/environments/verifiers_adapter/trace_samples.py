"""From verifiers' trace to samples: each branch one sequence, each sampled token trained once."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from primerl.types import NOT_SAMPLED, Completion, Sample


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
    """One sample for each branch of ``trace`` that has something to train.

    A reply that several branches share is trained only in the first of them; its expert routes are
    those of its tokens in all of them.

    Raises:
        ValueError: a reply's tokens are not those that the engine sampled.
    """
    nodes = trace.nodes
    parents = {node.parent for node in nodes}
    trained: set[int] = set()
    samples = []
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path = branch(nodes, leaf)
        new = {index for index in path if reply_completion(nodes[index]) is not None} - trained
        if new:
            trained |= new
            samples.append(_sample(nodes, path, new, temperature))
    return samples


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


def _sample(nodes: Sequence[Any], path: list[int], new: set[int], temperature: float) -> Sample:
    token_ids = np.concatenate([np.asarray(nodes[index].token_ids, np.int32) for index in path])
    mask = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), NOT_SAMPLED, np.int32)
    routes: list[str] = []
    end = 0
    for index in path:
        end += len(nodes[index].token_ids)
        completion = reply_completion(nodes[index])
        if completion is not None:
            routes += completion.routes
        if index not in new or completion is None:
            continue
        reply = slice(end - len(completion.token_ids), end)  # after the prompt's last tokens
        if not np.array_equal(token_ids[reply], completion.token_ids):
            raise ValueError(
                f"reply {index} of the trace does not end with the tokens that were sampled; "
                "a hook of the environment changed them"
            )
        mask[reply] = True
        logprobs[reply] = completion.logprobs
        versions[reply] = completion.versions
    return Sample(
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        versions=versions,
        temperature=temperature,
        routes=routes,
    )
