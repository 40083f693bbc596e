"""What an engine is: tokens in, sampled tokens out."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from primerl.types import Completion, PolicyVersion, Sample, SamplingParams


@runtime_checkable
class Engine(Protocol):
    """Samples completions from a policy whose weights may change while it serves.

    A client of a remote server sets ``portable = True``: the worker's process uses a pickled copy,
    whose optional ``learn(version)`` is called with each version that the original reports as
    served. Any other engine stays in its process and is called there.

    Two optional members limit what completions may contain, which every worker checks:
    ``vocab_size``, the number of token ids, and ``newest_version``, the newest version of any
    replica. An engine that records expert routes has the ``RouteStore`` that they go to as
    ``routes``; every worker checks the samples' routes with it.
    """

    @property
    def version(self) -> PolicyVersion:
        """The policy version that samples the next token; of replicas, the oldest."""
        ...

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of one request, prompt and completion together."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion; cancelling the awaiting task cancels the request.

        ``session`` names a conversation, so that an engine with several replicas can send its turns
        to the replica that has them cached.
        """
        ...


@runtime_checkable
class RouteStore(Protocol):
    """Where an engine puts expert routes, and what checks those of a sample.

    It is pickled into the worker's process. Both methods are called in threads, several at once;
    on an event loop where the store has a method ``is_instant(tokens)`` that returns True, since
    routes of so few tokens are put and checked in less time than a thread takes to begin.
    """

    def put(
        self, rows: np.ndarray, *, start: int, versions: np.ndarray, shared: int = 0
    ) -> tuple[str, ...]:
        """Store the routes of one completion; returns the references to them.

        Args:
            rows: the experts of each token, uint8 or uint16[t, layers, k], for all decoder layers.
                Row i is of token ``start + i``, in the forward pass that sampled the next one.
            start: the token of the first row.
            versions: of the weights that made each row's forward pass, int32[t].
            shared: how many of the first rows are of the prompt, so that other completions of it
                may have the same.

        Raises:
            ValueError: the rows can't be of this model; the message names layer and token.
        """
        ...

    def check(self, sample: Sample) -> None:
        """Check that ``sample.routes`` refer to routes of the tokens to be trained.

        Raises:
            ValueError: they don't; the message says what was expected.
        """
        ...


def is_instant(store: RouteStore, tokens: int) -> bool:
    """Whether a store says that it puts and checks routes of so many tokens without waiting."""
    says = getattr(store, "is_instant", None)
    return says is not None and says(tokens)
