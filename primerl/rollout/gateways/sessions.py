"""A gateway's session of one rollout: its keys, history, limits and request outcomes."""

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
from primerl.rollout.gateways.apis import ModelRequest
from primerl.types import Rollout

OUTCOMES = (
    "answered",  # the client received the whole reply
    "redelivered",  # a reply that was sampled for an earlier attempt of the request was reused
    "disconnected",  # the client disconnected before it had received the reply
    "limited",  # the rollout reached a limit
    "context",  # the conversation fills the engine's context
    "refused",  # the request is invalid or unsupported
    "failed",  # the engine raised an error
)


class GatewaySession:
    """A rollout whose agents sample through a gateway; made by ``Gateway.open``.

    OpenAI's clients take ``base_url`` and ``key``; Anthropic's take ``anthropic_url`` and ``key``.
    """

    def __init__(self, history: History, limits: AgentLimits, *, url: str) -> None:
        self.name = secrets.token_hex(8)
        self.anthropic_url = url
        self.base_url = f"{url}/v1"
        self.history = history
        self.outcomes: Counter[str] = Counter()
        """The number of requests per outcome; see ``OUTCOMES``."""
        self.stop = "stop"
        """Why the rollout ended; before that, how the last request ended."""
        self.error: Exception | None = None
        """The engine's last error, if nothing was sampled since; clients see a server error."""
        self.replies: dict[str, Reply] = {}
        """Replies by their response id, for the Responses API."""
        self.malformed = 0
        self._budget = Budget(limits)
        self._agents: dict[str, str] = {}  # agent names by the secret of their key
        self._undelivered: dict[bytes, Reply] = {}
        self._requests: set[asyncio.Task[Any]] = set()
        self.closed = False
        self.key = self.key_for("policy")

    def key_for(self, agent: str) -> str:
        """Return a new key for ``agent``; each agent's conversations are recorded separately."""
        secret = secrets.token_urlsafe(24)
        self._agents[secret] = agent
        return f"{self.name}.{secret}"

    def agent_of(self, secret: str) -> str | None:
        """Return the agent that owns this key, or None (constant-time comparison)."""
        found = None
        for known, agent in self._agents.items():
            if hmac.compare_digest(known.encode(), secret.encode()):
                found = agent
        return None if self.closed else found

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables from which clients and command-line agents read URLs and keys."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
        }

    async def reply(self, request: ModelRequest, agent: str, digest: bytes) -> Reply:
        """Return the policy's reply; ``digest`` identifies the request as it was sent.

        If a reply to the same request was sampled but not delivered, that reply is returned.

        Raises:
            LimitReached: the rollout has reached a limit.
            ContextFull: the prompt leaves no room for a reply.
            Unrenderable: the messages can't be rendered.
            Exception: any error of the engine.
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
        """Keep a reply that was not delivered, to return it if the same request comes again."""
        self._undelivered[digest] = reply
        self.outcomes["disconnected"] += 1

    async def close(self) -> None:
        """Refuse further requests, and cancel those in flight.

        Replies that no client has received are not trained, because they had no effect.
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
        """Return the session as a ``Rollout`` with ``reward`` and one sample per branch.

        Args:
            reward: the reward of the rollout.
            agents: the agents whose tokens are trained; all by default.
            stop: why the rollout ended; by default, how the last request ended.
            keep_conversation: whether the rollout stores its messages in ``conversation``.

        Raises:
            Exception: the engine's last error, if nothing was sampled after it.
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

    async def _sample(self, request: ModelRequest, agent: str) -> Reply:
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
            used = f"the rollout reached its limit of {self._budget.limits.timeout_s} s"
            raise LimitReached("timeout", used) from None
        self.error = None
        self._budget.tokens += len(reply.call.completion.token_ids)
        self.malformed += len(reply.malformed)
        self.stop = reply.finish_reason
        return reply
