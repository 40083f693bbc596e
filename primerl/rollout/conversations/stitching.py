"""From the engine calls of a rollout to the fewest samples that train each sampled token once."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import xxhash

from primerl.rollout.conversations.calls import Call, int32
from primerl.types import NOT_SAMPLED, Completion, Sample


def stitch(calls: Sequence[Call], *, temperature: float) -> list[Sample]:
    """The fewest samples in which every completion of ``calls`` follows what the engine saw.

    One sample for each call that no other one extends, with the calls that it extends. What several
    samples share is trained in the first of them only, so each sampled token is trained once, with
    its own logprob and version. What came between a call and the one that it extends is observed,
    in the same sample. Expert routes are those of all of a sample's calls. A parent that is not in
    ``calls`` is context, and not trained.

    Raises:
        ValueError: a completion is empty, so that there is nothing to train; or two calls are one.
    """
    if len({id(call) for call in calls}) < len(calls):
        raise ValueError("a call is listed twice; its tokens would be trained twice")
    untrained = {id(call) for call in calls}
    return [_sample(leaf, untrained, temperature) for leaf in _leaves(calls)]


def link_calls(requests: Iterable[tuple[Any, Completion]]) -> list[Call]:
    """Calls in their order, each after the longest earlier one that its prompt begins with.

    For environments that record each prompt as a whole. Of several calls with the same tokens, one
    that no other call follows yet is taken. Every prompt is read once.
    """
    calls: list[Call] = []
    ended: dict[tuple[int, int], list[_Ended]] = {}  # by length and digest
    for prompt_ids, completion in requests:
        prompt = int32(prompt_ids)
        before = _longest_prefix(prompt, ended)
        shared = 0
        if before is not None:
            shared = len(before.token_ids)
            before.followed = True
        parent = None if before is None else before.call
        call = Call(new_ids=prompt[shared:], completion=completion, parent=parent)
        whole = np.concatenate([prompt, completion.token_ids])
        key = len(whole), xxhash.xxh64_intdigest(whole.tobytes())
        ended.setdefault(key, []).append(_Ended(call, whole))
        calls.append(call)
    return calls


@attrs.define(eq=False)
class _Ended:
    """A call, the tokens up to its end, and whether another call follows it."""

    call: Call
    token_ids: np.ndarray
    followed: bool = False


def _longest_prefix(
    prompt: np.ndarray, ended: dict[tuple[int, int], list[_Ended]]
) -> _Ended | None:
    """The longest of ``ended`` that ``prompt`` begins with."""
    longest: _Ended | None = None
    digest, read = xxhash.xxh64(), 0
    for length in sorted({length for length, _ in ended if length <= len(prompt)}):
        digest.update(prompt[read:length].tobytes())
        read = length
        same = [
            one
            for one in ended.get((length, digest.intdigest()), [])
            if np.array_equal(one.token_ids, prompt[:length])
        ]
        if same:
            longest = next((one for one in same if not one.followed), same[0])
    return longest


def _leaves(calls: Sequence[Call]) -> Iterator[Call]:
    """The calls that no other of ``calls`` extends."""
    extended: set[int] = set()
    for call in calls:
        parent = call.parent
        while parent is not None and id(parent) not in extended:
            extended.add(id(parent))
            parent = parent.parent
    return (call for call in calls if id(call) not in extended)


def _sample(leaf: Call, untrained: set[int], temperature: float) -> Sample:
    """The tokens of ``leaf``'s path; those of ``untrained`` are trained, and leave the set."""
    path = leaf.path
    token_ids = leaf.token_ids
    mask = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), NOT_SAMPLED, np.int32)
    observed = np.zeros(len(token_ids), np.bool_)
    end = 0
    for call in path:
        begin, start = end, end + len(call.new_ids)
        end = start + len(call.completion.token_ids)
        if id(call) in untrained:
            untrained.remove(id(call))
            observed[begin:start] = call.parent is not None
            mask[start:end] = True
            logprobs[start:end] = call.completion.logprobs
            versions[start:end] = call.completion.versions
    return Sample(
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        versions=versions,
        temperature=temperature,
        routes=[reference for call in path for reference in call.completion.routes],
        observation_mask=observed if observed.any() else None,
    )
