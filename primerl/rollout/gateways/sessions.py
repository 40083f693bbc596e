"""A gateway's session of one rollout: its keys, history, limits and request outcomes."""

import asyncio
import contextlib
import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs

from primerl.rollout.agents.limits import AgentLimits, Budget, LimitReached
from primerl.rollout.agents.loop import history_rollout
from primerl.rollout.conversations.calls import ContextFull
from primerl.rollout.conversations.history import History, Reply
from primerl.rollout.conversations.prompts import Unrenderable
from primerl.rollout.gateways.apis import ModelRequest
from primerl.rollout.gateways.deliveries import Deliveries
from primerl.rollout.gateways.recorded import RecordedReplies
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


# How many times the event loop looks for news before a session ends.
EVENTS = 3


@attrs.define(eq=False)
class _Sampling:
    """A request that is being sampled, and how many clients wait for its reply."""

    task: "asyncio.Task[Reply]"
    waiting: int = 0


class GatewaySession:
    """A rollout whose agents sample through a gateway; made by ``Gateway.open``.

    OpenAI's clients take ``base_url`` and ``key``; Anthropic's take ``anthropic_url`` and ``key``.
    ``look`` looks which clients can't have read what was sent to them for a session.
    """

    def __init__(
        self,
        history: History,
        limits: AgentLimits,
        *,
        url: str,
        look: Callable[[object], None],
    ) -> None:
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
        self.recorded = RecordedReplies()
        """The replies, by the ids that clients know."""
        self.malformed = 0
        self._budget = Budget(limits)
        self._agents: dict[str, str] = {}  # agent names by the secret of their key
        self._deliveries = Deliveries()
        self._sampling: dict[bytes, _Sampling] = {}
        self._look = look
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
            if hmac.compare_digest(known.encode(), secret.encode(errors="replace")):
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
        Requests that are the same and in flight at once get one reply.

        Raises:
            LimitReached: the rollout has reached a limit.
            ContextFull: the prompt leaves no room for a reply.
            Unrenderable: the messages can't be rendered.
            Exception: any error of the engine.
        """
        if self.closed:
            raise LimitReached("closed", "the rollout is over")
        reply = self._deliveries.waiting(digest)
        if reply is not None:
            self.outcomes["redelivered"] += 1
            return reply
        sampling = self._sampling.get(digest)
        if sampling is None:
            task = asyncio.create_task(self._sample(request, agent, digest))
            sampling = self._sampling[digest] = _Sampling(task)
            task.add_done_callback(lambda _: self._end_sampling(digest, task))
        sampling.waiting += 1
        try:
            return await asyncio.shield(sampling.task)
        except (LimitReached, ContextFull) as end:
            self.stop = end.reason if isinstance(end, LimitReached) else "context"
            self.outcomes["limited" if isinstance(end, LimitReached) else "context"] += 1
            raise
        except Unrenderable:
            self.outcomes["refused"] += 1
            raise
        except asyncio.CancelledError:
            self.outcomes["disconnected"] += 1
            if sampling.waiting == 1:  # the last client that waited
                self._end_sampling(digest, sampling.task)
                sampling.task.cancel()
            raise
        except Exception as error:
            self.error = error
            self.outcomes["failed"] += 1
            raise
        finally:
            sampling.waiting -= 1

    def _end_sampling(self, digest: bytes, task: "asyncio.Task[Reply]") -> None:
        """Let equal requests that come later be sampled anew."""
        if digest in self._sampling and self._sampling[digest].task is task:
            del self._sampling[digest]

    @contextlib.contextmanager
    def delivery(self, reply: Reply) -> Iterator[None]:
        """Note that a reply is sent to a client within this context."""
        try:
            yield
        except (ConnectionError, asyncio.CancelledError):
            self.outcomes["disconnected"] += 1
            raise
        self._deliveries.of(reply).sent += 1
        self.outcomes["answered"] += 1

    def unread(self, reply: Reply) -> None:
        """Note that a client has left without having read the reply that was sent to it."""
        self._deliveries.of(reply).sent -= 1
        self.outcomes["answered"] -= 1
        self.outcomes["disconnected"] += 1

    async def close(self) -> None:
        """Refuse further requests, and cancel those in flight.

        Replies that no client has received are not trained, because they had no effect.
        """
        if self.closed:
            return
        self.closed = True
        tasks = [sampling.task for sampling in self._sampling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(EVENTS):  # the system may have news of connections
            await asyncio.sleep(0)
        self._look(self)
        unreceived = list(self._deliveries.unreceived)
        for reply in unreceived:
            self.history.forget(reply.call)
        self.outcomes["undelivered"] = len(unreceived)

    def rollout(
        self,
        *,
        reward: float,
        agents: Sequence[str] | None = None,
        stop: str | None = None,
        side_jobs: bool = True,
        keep_conversation: bool = False,
    ) -> Rollout:
        """Return the session as a ``Rollout`` with ``reward`` and one sample per branch.

        Args:
            reward: the reward of the rollout.
            agents: the agents whose tokens are trained; all by default.
            stop: why the rollout ended; by default, how the last request ended.
            side_jobs: whether side jobs are trained, too; see ``History.side_jobs``.
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
            side_jobs=side_jobs,
            keep_conversation=keep_conversation,
        )

    async def _sample(self, request: ModelRequest, agent: str, digest: bytes) -> Reply:
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
                    stop=request.stop,
                    one_call=request.one_call,
                    begins=request.begins,
                    template=request.template,
                )
        except (Unrenderable, ContextFull):
            self._budget.turns -= 1  # nothing was sampled
            raise
        except TimeoutError:
            if not deadline.expired():
                raise
            used = f"the rollout reached its limit of {self._budget.limits.timeout_s} s"
            raise LimitReached("timeout", used) from None
        self._deliveries.add(reply, digest)
        self.error = None
        self._budget.count(len(reply.call.completion.token_ids))
        self.malformed += len(reply.malformed)
        self.stop = self._budget.stop_after(reply.finish_reason)
        return reply
