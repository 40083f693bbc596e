"""The protocol of engines: from a prompt's token ids to sampled tokens."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from primerl.types import Completion, PolicyVersion, Sample, SamplingParams

log = logging.getLogger(__name__)


@runtime_checkable
class Engine(Protocol):
    """Samples completions from a policy whose weights may change while it serves.

    A client of a remote server sets ``portable = True``: the worker's process then uses a pickled
    copy. If the copy has a method ``learn(version)``, it is called with each version that the
    original reports as served. Any other engine stays in its process and is called there.

    Two optional members limit what completions may contain, which every worker checks:
    ``vocab_size``, the number of token ids, and ``newest_version``, the newest version that any of
    its servers serves. An engine that records expert routes has its ``RouteStore`` as the attribute
    ``routes``; every worker checks the routes of samples with it.
    """

    @property
    def version(self) -> PolicyVersion:
        """The policy version that samples the next token; with several servers, the oldest one."""
        ...

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of one request, prompt and completion together."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion; cancelling the awaiting task cancels the request.

        ``prompt_ids`` may be a ``TokenSequence``, whose entries are integers, as in a list;
        ``np.asarray(prompt_ids)`` does not copy it. ``session`` names a conversation, so that an
        engine with several servers can send its turns to the server that has them cached.
        """
        ...


@runtime_checkable
class RouteStore(Protocol):
    """A store of expert routes, which also checks the routes of samples.

    It is pickled into the worker's process. Both methods are called in threads, several at once.
    If the store has a method ``is_instant(tokens)`` that returns True, they are called on the event
    loop instead, because so few tokens take less time than starting a thread. If it has a method
    ``discard(references)``, that is called in a thread with references that will not be trained.
    """

    def put(
        self, rows: np.ndarray, *, start: int, versions: np.ndarray, shared: int = 0
    ) -> tuple[str, ...]:
        """Store the routes of one completion; return references to them.

        Args:
            rows: the experts of each token, uint8 or uint16[t, layers, k], for all decoder layers.
                Row i has the experts of token ``start + i``, in the forward pass that sampled the
                next token.
            start: the index of the first row's token.
            versions: the version of the weights in each row's forward pass, int32[t].
            shared: how many of the first rows belong to the prompt; other completions of the same
                prompt may have the same rows.

        Raises:
            ValueError: the rows can't belong to this model; the message names layer and token.
        """
        ...

    def check(self, sample: Sample) -> None:
        """Check that ``sample.routes`` refer to routes of the tokens to be trained.

        Raises:
            ValueError: they do not; the message says what was expected.
        """
        ...


def discard_routes(engine: Any, references: Collection[str]) -> None:
    """Have an engine's store remove routes that will not be trained, in a thread, and return."""
    discard = getattr(getattr(engine, "routes", None), "discard", None)
    if discard is None or not references:
        return

    def work() -> None:
        try:
            discard(references)
        except Exception:  # any kind of store: its routes only take up room until it is closed
            log.exception("the routes of dropped rollouts could not be removed")

    asyncio.get_running_loop().run_in_executor(None, work)


def is_instant(store: RouteStore, tokens: int) -> bool:
    """Return whether a store puts and checks routes of this many tokens without waiting."""
    says = getattr(store, "is_instant", None)
    return says is not None and says(tokens)
