"""What an engine is: tokens in, sampled tokens out."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from primerl.types import Completion, PolicyVersion, SamplingParams


@runtime_checkable
class Engine(Protocol):
    """Samples completions from a policy whose weights may change while it serves.

    An engine that is a client of a server elsewhere sets ``portable = True``: a copy of it in
    another process serves as well. Any other stays in its process, and is called from outside.

    Two optional members bound what its answers may hold, which every worker checks: ``vocab_size``,
    the number of token ids, and ``newest_version``, where replicas may be ahead of ``version``.
    """

    @property
    def version(self) -> PolicyVersion:
        """The policy version that the next token will be sampled with."""
        ...

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and completion together, in one request."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion; cancelling the awaiting task cancels the request.

        ``session`` names a conversation, so that an engine of several replicas can keep its turns
        where their cache is.
        """
        ...
