"""What an engine is: tokens in, sampled tokens out."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from primerl.types import Completion, PolicyVersion, SamplingParams


@runtime_checkable
class Engine(Protocol):
    """Samples completions from a policy whose weights may change while it serves.

    A client of a remote server sets ``portable = True``: the worker's process uses a pickled copy,
    whose optional ``learn(version)`` is called with each version that the original reports as
    served. Any other engine stays in its process and is called there.

    Two optional members limit what completions may contain, which every worker checks:
    ``vocab_size``, the number of token ids, and ``newest_version``, the newest version of any
    replica.
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
