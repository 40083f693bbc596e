"""Engine calls: what each prompt adds to the call before it, and the samples of a tree of calls."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from jaxtyping import Int32

from primerl.rollout.engines.protocol import Engine
from primerl.types import NOT_SAMPLED, Completion, Sample, SamplingParams

LARGEST_SHARED = 1 << 20
"""Above the size of any vocabulary: a larger id must not fill the memory."""
_INTEGERS: list[int] = []


class ContextFull(ValueError):
    """The prompt leaves no room for a reply."""


def int32(values: Any) -> np.ndarray:
    """Token ids as an array that can't be written."""
    array: np.ndarray = np.array(values, np.int32)
    array.setflags(write=False)
    return array


@attrs.frozen(kw_only=True, eq=False)
class Call:
    """One engine call: the prompt's tokens that are new, and the completion.

    The engine saw the tokens of ``parent``, its completion, and then ``new_ids``; without a parent,
    ``new_ids`` are the whole prompt. Calls that share a parent are branches. ``agent`` names who
    asked, in rollouts of several agents. ``filled_context`` says that the completion was cut
    because the context left less room than was asked for.
    """

    new_ids: Int32[np.ndarray, " t"] = attrs.field(converter=int32)
    completion: Completion
    parent: "Call | None" = None
    agent: str = "policy"
    filled_context: bool = False

    @property
    def stop(self) -> str:
        """How the completion ended: ``"stop"``, ``"length"``, or ``"context"``."""
        return "context" if self.filled_context else self.completion.finish_reason

    @property
    def path(self) -> list["Call"]:
        """The calls whose tokens the prompt holds, in order; this call is the last."""
        path, call = [self], self.parent
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    @property
    def token_ids(self) -> Int32[np.ndarray, " t"]:
        """The prompt and the completion."""
        parts = [part for call in self.path for part in (call.new_ids, call.completion.token_ids)]
        tokens: np.ndarray = np.concatenate(parts)
        return tokens

    @property
    def prompt_ids(self) -> Int32[np.ndarray, " t"]:
        """The tokens that the engine saw."""
        return self.token_ids[: -len(self.completion.token_ids)]


async def sample_call(
    engine: Engine,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    parent: Call | None,
    new: int,
    session: str | None = None,
    agent: str = "policy",
) -> Call:
    """Sample a completion of ``prompt_ids``, whose last ``new`` tokens follow the call ``parent``.

    The completion is as long as the context allows. Expert routes are asked for from the first
    token on that has none: the last token of ``parent`` went through no forward pass.

    Raises:
        ContextFull: the prompt leaves no room.
        Exception: what the engine raises.
    """
    room = engine.context_length - len(prompt_ids)
    if room < 1:
        raise ContextFull(
            f"the prompt's {len(prompt_ids)} tokens fill the engine's context of "
            f"{engine.context_length}; end the conversation earlier, or shorten the prompt"
        )
    routed = parent is not None and parent.completion.routes
    completion = await engine.generate(
        prompt_ids,
        attrs.evolve(
            params,
            max_tokens=min(params.max_tokens, room),
            routes_start=len(prompt_ids) - new - 1 if routed else 0,
        ),
        session=session,
    )
    return Call(
        new_ids=prompt_ids[len(prompt_ids) - new :],
        completion=completion,
        parent=parent,
        agent=agent,
        filled_context=completion.finish_reason == "length" and room < params.max_tokens,
    )


# ---- the fewest samples that train each sampled token once ----


def shared_tokens(token_ids: np.ndarray) -> list[int]:
    """Token ids as a list whose ``int`` objects, of 32 bytes each, all such lists share."""
    above = int(token_ids.max(initial=-1)) + 1
    if above > LARGEST_SHARED:
        return [int(token) for token in token_ids]
    if above > len(_INTEGERS):
        _INTEGERS.extend(range(len(_INTEGERS), above))
    return [_INTEGERS[token] for token in token_ids.tolist()]


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
