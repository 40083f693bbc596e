"""Engine calls: what each prompt adds to the call before it, and the completion."""

from typing import Any

import attrs
import numpy as np
from jaxtyping import Int32

from primerl.rollout.engines.protocol import Engine
from primerl.types import Completion, SamplingParams

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


def shared_tokens(token_ids: np.ndarray) -> list[int]:
    """Token ids as a list whose ``int`` objects, of 32 bytes each, all such lists share."""
    above = int(token_ids.max(initial=-1)) + 1
    if above > LARGEST_SHARED:
        return [int(token) for token in token_ids]
    if above > len(_INTEGERS):
        _INTEGERS.extend(range(len(_INTEGERS), above))
    return [_INTEGERS[token] for token in token_ids.tolist()]
