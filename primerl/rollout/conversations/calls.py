"""Engine calls, which form trees, and the training samples that are stitched from them.

A call holds only the prompt tokens that follow its parent's tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from jaxtyping import Int32

from primerl.rollout.engines.protocol import Engine
from primerl.rollout.engines.token_sequence import TokenSequence
from primerl.types import NOT_SAMPLED, Completion, Sample, SamplingParams

LARGEST_SHARED = 1 << 20
"""Ids below this bound are cached; it exceeds any vocabulary, and limits the cache's memory."""
_INTEGERS: list[int] = []


class ContextFull(ValueError):
    """Raised when a prompt leaves no room for a reply in the engine's context."""


def int32(values: Any) -> np.ndarray:
    """Return token ids as a read-only int32 array."""
    array: np.ndarray = np.array(values, np.int32)
    array.setflags(write=False)
    return array


@attrs.frozen(kw_only=True, eq=False)
class EngineCall:
    """One engine call: the new tokens of its prompt, and the completion.

    The prompt consists of the prompt of ``parent``, the completion of ``parent``, and ``new_ids``.
    Without a parent, ``new_ids`` is the whole prompt. Calls that share a parent are branches.
    ``agent`` names the agent that made the call, in rollouts of several agents. If
    ``filled_context`` is true, the completion was cut off because the context left less room than
    was requested.
    """

    new_ids: Int32[np.ndarray, " t"] = attrs.field(converter=int32)
    completion: Completion
    parent: "EngineCall | None" = None
    agent: str = "policy"
    filled_context: bool = False

    @property
    def stop(self) -> str:
        """How the completion ended: ``"stop"``, ``"length"``, or ``"context"`` if that was full."""
        return "context" if self.filled_context else self.completion.finish_reason

    @property
    def path(self) -> list["EngineCall"]:
        """The chain of calls from the first one, which has no parent, to this call."""
        path, call = [self], self.parent
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    @property
    def token_ids(self) -> Int32[np.ndarray, " t"]:
        """The tokens of the whole prompt and of the completion."""
        parts = [part for call in self.path for part in (call.new_ids, call.completion.token_ids)]
        tokens: np.ndarray = np.concatenate(parts)
        return tokens

    @property
    def prompt_ids(self) -> Int32[np.ndarray, " t"]:
        """The tokens of the whole prompt."""
        return self.token_ids[: -len(self.completion.token_ids)]


async def sample_call(
    engine: Engine,
    prompt_ids: TokenSequence,
    params: SamplingParams,
    *,
    parent: EngineCall | None,
    new: int,
    session: str | None = None,
    agent: str = "policy",
) -> EngineCall:
    """Sample a completion of ``prompt_ids``, whose last ``new`` tokens follow the call ``parent``.

    ``params.max_tokens`` is lowered to the room that the context leaves. Expert routes are
    requested from the first token that has none yet: the last token of ``parent``, which was
    sampled but has not been through a forward pass.

    Raises:
        ContextFull: the prompt leaves no room for a completion.
        Exception: any error of the engine.
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
    return EngineCall(
        new_ids=np.asarray(prompt_ids)[len(prompt_ids) - new :],
        completion=completion,
        parent=parent,
        agent=agent,
        filled_context=completion.finish_reason == "length" and room < params.max_tokens,
    )


# ---- stitching calls into the fewest samples that train each sampled token once ----


def shared_tokens(token_ids: np.ndarray) -> list[int]:
    """Return token ids as a list of cached ``int`` objects, which all such lists share.

    An ``int`` object takes 32 bytes, so sharing them saves memory.
    """
    above = int(token_ids.max(initial=-1)) + 1
    if above > LARGEST_SHARED:
        return [int(token) for token in token_ids]
    if above > len(_INTEGERS):
        _INTEGERS.extend(range(len(_INTEGERS), above))
    return [_INTEGERS[token] for token in token_ids.tolist()]


def stitch(calls: Sequence[EngineCall], *, temperature: float) -> list[Sample]:
    """Return the fewest samples in which each completion follows the prompt that the engine saw.

    There is one sample for each call that no other call extends; it holds that call and all calls
    before it on its path. Tokens that several samples share are trained only in the first of them,
    so each sampled token is trained once, with its own logprob and version. The tokens between a
    parent's completion and the next completion are marked in the ``observation_mask`` of the sample
    that trains that completion. A sample has the expert routes of all of its calls. A parent that
    is not in ``calls`` serves as context, and is not trained.

    Raises:
        ValueError: a completion is empty, so there is nothing to train; or ``calls`` contains a
            call twice.
    """
    if len({id(call) for call in calls}) < len(calls):
        raise ValueError("calls contains an engine call twice, whose tokens would be trained twice")
    untrained = {id(call) for call in calls}
    return [_sample(leaf, untrained, temperature) for leaf in _leaves(calls)]


def _leaves(calls: Sequence[EngineCall]) -> Iterator[EngineCall]:
    """Return the calls that no other of ``calls`` extends."""
    extended: set[int] = set()
    for call in calls:
        parent = call.parent
        while parent is not None and id(parent) not in extended:
            extended.add(id(parent))
            parent = parent.parent
    return (call for call in calls if id(call) not in extended)


def _sample(leaf: EngineCall, untrained: set[int], temperature: float) -> Sample:
    """Return the sample of ``leaf``'s path; remove the calls that it trains from ``untrained``."""
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
