"""One rollout behind a gateway: its keys, its history, its limits, and how its requests ended."""

import asyncio
import hmac
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from primerl.rollout.agents.limits import AgentLimits, Budget, LimitReached
from primerl.rollout.agents.loop import history_rollout
from primerl.rollout.conversations.calls import ContextFull
from primerl.rollout.conversations.history import History, Reply, Unrenderable
from primerl.rollout.gateways.apis import Request
from primerl.types import Rollout

OUTCOMES = (
    "answered",  # the client has the whole reply
    "redelivered",  # the same, of a reply that was sampled for an earlier attempt
    "disconnected",  # the client left before it had the reply
    "limited",  # a limit was reached
    "context",  # the conversation fills the engine's context
    "refused",  # the request can't be served
    "failed",  # the engine raised an error
)


class GatewaySession:
    """A rollout whose agents ask through a gateway; made by ``Gateway.open``.

    ``base_url`` and ``key`` are what an OpenAI client takes; ``anthropic_url`` is Anthropic's.
    """

    def __init__(self, history: History, limits: AgentLimits, *, url: str) -> None:
        self.name = secrets.token_hex(8)
        self.anthropic_url = url
        self.base_url = f"{url}/v1"
        self.history = history
        self.outcomes: Counter[str] = Counter()
        """How many requests ended how; see ``OUTCOMES``."""
        self.stop = "stop"
        """Why the rollout ended, or would end now."""
        self.error: Exception | None = None
        """The last error of the engine, which clients see as one of the server."""
        self.replies: dict[str, Reply] = {}
        """By their id in the Responses API."""
        self.malformed = 0
        self._budget = Budget(limits)
        self._agents: dict[str, str] = {}  # by the secret of their key
        self._undelivered: dict[bytes, Reply] = {}
        self._requests: set[asyncio.Task[Any]] = set()
        self.closed = False
        self.key = self.key_for("policy")

    def key_for(self, agent: str) -> str:
        """A key for a further agent of this rollout, whose conversations are kept apart."""
        secret = secrets.token_urlsafe(24)
        self._agents[secret] = agent
        return f"{self.name}.{secret}"

    def agent_of(self, secret: str) -> str | None:
        """Whose key it is; compared in a time that tells nothing of the key."""
        found = None
        for known, agent in self._agents.items():
            if hmac.compare_digest(known.encode(), secret.encode()):
                found = agent
        return None if self.closed else found

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that clients and command-line agents read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
        }

    async def reply(self, request: Request, agent: str, digest: bytes) -> Reply:
        """The policy's reply; ``digest`` identifies the request as it was sent.

        A request whose reply was sampled, but did not arrive, gets that reply.

        Raises:
            LimitReached, ContextFull: the request can't be served any more.
            Unrenderable: it can't be served.
            Exception: what the engine raises.
        """
        reply = self._undelivered.pop(digest, None)
        if reply is not None:
            self.outcomes["redelivered"] += 1
            return reply
        current = asyncio.current_task()
        assert current is not None
        self._requests.add(current)
        try:
            return await self._sample(request, agent)
        except (LimitReached, ContextFull) as end:
            self.stop = end.reason if isinstance(end, LimitReached) else "context"
            self.outcomes["limited" if isinstance(end, LimitReached) else "context"] += 1
            raise
        except Unrenderable:
            self.outcomes["refused"] += 1
            raise
        except asyncio.CancelledError:
            self.outcomes["disconnected"] += 1
            raise
        except Exception as error:
            self.error = error
            self.outcomes["failed"] += 1
            raise
        finally:
            self._requests.discard(current)

    def lost(self, reply: Reply, digest: bytes) -> None:
        """Keep a reply that did not arrive for the next attempt of the same request."""
        self._undelivered[digest] = reply
        self.outcomes["disconnected"] += 1

    async def close(self) -> None:
        """Refuse further requests, and cancel those in flight.

        Replies that no client has received are not trained: they had no part in what happened.
        """
        self.closed = True
        for task in list(self._requests):
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        for reply in self._undelivered.values():
            self.history.forget(reply.call)
        self.outcomes["undelivered"] = len(self._undelivered)
        self._undelivered.clear()

    def rollout(
        self,
        *,
        reward: float,
        agents: Sequence[str] | None = None,
        stop: str | None = None,
        keep_conversation: bool = False,
    ) -> Rollout:
        """What was sampled with its reward, one sample for each branch.

        Args:
            reward: of the rollout.
            agents: whose tokens are trained; all by default.
            stop: why it ended, if not by what the last request met.
            keep_conversation: whether the rollout has its ``conversation``.

        Raises:
            Exception: the last error of the engine, if nothing was sampled after it.
        """
        if self.error is not None:
            raise self.error
        requests = {f"requests_{name}": float(count) for name, count in self.outcomes.items()}
        return history_rollout(
            self.history,
            reward=reward,
            stop=self.stop if stop is None else stop,
            metrics={
                **requests,
                "malformed_calls": float(self.malformed),
                "resent": float(self.history.resent),
            },
            agents=agents,
            keep_conversation=keep_conversation,
        )

    async def _sample(self, request: Request, agent: str) -> Reply:
        left = self._budget.begin_turn()
        limits = [limit for limit in (left, request.max_tokens) if limit is not None]
        deadline = asyncio.timeout(max(0.0, self._budget.seconds_left))
        try:
            async with deadline:
                reply = await self.history.reply(
                    request.messages,
                    tools=request.tools,
                    agent=agent,
                    max_tokens=min(limits, default=None),
                )
        except TimeoutError:
            if not deadline.expired():
                raise
            used = f"the rollout's {self._budget.limits.timeout_s} s are over"
            raise LimitReached("timeout", used) from None
        self.error = None
        self._budget.tokens += len(reply.call.completion.token_ids)
        self.malformed += len(reply.malformed)
        self.stop = reply.finish_reason
        return reply
