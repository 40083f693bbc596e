"""A harness that runs verifiers' chat loop with tools in this process, without HTTP."""

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any

from primerl._common.optional import require
from primerl.rollout.agents.loop import take_turns
from primerl.rollout.conversations.calls import ContextFull, shared_tokens
from primerl.rollout.conversations.messages import Message
from primerl.rollout.environments.verifiers_adapter.apis import HarnessApis
from primerl.rollout.environments.verifiers_adapter.client import EngineClient, ModelReply
from primerl.rollout.environments.verifiers_adapter.messages import wire_message
from primerl.rollout.environments.verifiers_adapter.trace_calls import SampledLogprobs

vf: Any = require("verifiers.v1", extra="verifiers")
_graph: Any = require("verifiers.v1.graph", extra="verifiers")
_interception: Any = require("verifiers.v1.interception", extra="verifiers")

CLIENT: ContextVar[EngineClient] = ContextVar("primerl_engine_client")
"""The model client of every agent in the episode that the current asyncio task plays."""


class EngineInterception(_interception.Interception):  # type: ignore[misc]
    """The connection between the rollouts of this process and their model client.

    With ``http`` it also listens on a port, for stateful tool servers and harnesses that use HTTP.
    """

    def __init__(self, *, http: bool, state_secrets: Sequence[str] = ()) -> None:
        super().__init__()
        services = tuple(state_secrets)
        self._server = HarnessApis(state_service_secrets=services) if http else None

    async def start(self) -> None:
        """Start the HTTP server, if there is one."""
        if self._server is not None:
            await self.stack.enter_async_context(self._server)

    @contextlib.asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[tuple[str, str, str]]:
        """Register ``session`` with the model client of the current episode."""
        client = CLIENT.get()
        async with contextlib.AsyncExitStack() as stack:
            if self._server is None:
                slot = ("http://127.0.0.1:9", secrets.token_hex(8), "")  # nothing listens there
                stack.callback(session.release)
            else:
                slot = await stack.enter_async_context(self._server.acquire(session))
            session.client = client
            client.sessions[slot[1]] = session
            stack.callback(client.sessions.pop, slot[1])
            yield slot


class EngineHarness(vf.Harness):  # type: ignore[misc]
    """A harness that acts like verifiers' ``null``, but starts no program for each rollout."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: Any, http: Any = None) -> None:
        super().__init__(config)
        self.http = http

    async def launch(self, *_: Any, **__: Any) -> Any:
        """Raise ``NotImplementedError``: this harness is played through ``session``."""
        raise NotImplementedError("EngineHarness has no launch(); play it through session()")

    async def session(self, *place: Any, **options: Any) -> Any:
        """Return the chat session of one rollout."""
        return ChatSession(self, *place, **options)


class ChatSession(vf.HarnessSession):  # type: ignore[misc]
    """One rollout's conversation, kept between the segments of an interaction."""

    def __init__(self, harness: Any, *place: Any, **options: Any) -> None:
        super().__init__(harness, *place, **options)
        self._rollout = CLIENT.get().sessions[self.secret]
        hooks = ("request_interceptors", "request_stops", "response_interceptors", "response_stops")
        hooked = any(getattr(self._rollout, hook) for hook in hooks)
        self._turns = HookedTurns(self._rollout) if hooked else PlainTurns(self._rollout)
        system, prompt = harness.resolve_prompt(self.data)
        self._messages = [] if system is None else [vf.SystemMessage(content=system)]
        if isinstance(prompt, str):
            self._messages.append(vf.UserMessage(content=prompt))
        else:
            self._messages.extend(prompt or [])

    async def _run(self, messages: list[Any] | None) -> Any:
        self._messages.extend(messages or [])
        if self.mcp_urls:
            from primerl.rollout.environments.verifiers_adapter.tools import toolbox

            timeout_s = self.harness.config.tool_timeout
            async with toolbox(self.mcp_urls, self.harness.http, timeout_s=timeout_s) as tools:
                await self._converse(tools)
        else:
            await self._converse(None)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _converse(self, tools: Any) -> None:
        offered = [] if tools is None else tools.tools

        async def answers(reply: Any) -> AsyncIterator[Any]:
            for call in reply.tool_calls or ():
                result = await self._call(tools, call)
                if result is None:  # the rollout is over, so the next turn returns None
                    return
                yield result

        await take_turns(self._messages, reply=lambda: self._turn(offered), answers=answers)

    async def _turn(self, tools: list[Any]) -> Any:
        """Return the assistant's next message, or None if the rollout is over."""
        session = self._rollout
        if session.released or session.stopped or await session.refused() is not None:
            return None
        if session.on_turn_input is not None:
            acknowledge, session.on_turn_input = session.on_turn_input, None
            acknowledge()
        try:
            return await self._turns.take(self._messages, tools)
        except ContextFull:
            self.trace.stop("context")
            return None
        except vf.RolloutError:
            raise
        except Exception as error:
            raise vf.ProviderError(f"{type(error).__name__}: {error}") from error

    async def _call(self, tools: Any, call: Any) -> Any:
        session = self._rollout
        if session.request_interceptors or session.request_stops:
            verdict = await session.decide_tool(call.id, call.name, call.arguments)
            if verdict["action"] == "stop":
                return None
            if verdict["action"] == "deny":
                return vf.ToolMessage.model_validate(verdict["message"])
        content = await tools.call(call.name, call.arguments)
        return vf.ToolMessage(tool_call_id=call.id, content=content, name=call.name)


# One set shared by all nodes, because thousands of rollouts are in flight.
_NODE_FIELDS = set(vf.MessageNode.model_fields)


class PlainTurns:
    """Turns in an environment without hooks, where new messages are appended to the trace.

    verifiers itself hashes the whole conversation at each turn to find its node in the trace. Here
    the node is known.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._leaf: int | None = None
        self._wire: list[Message] = []  # the trace's messages in OpenAI's format

    async def take(self, messages: list[Any], tools: list[Any]) -> Any:
        """Return the reply to ``messages``, which begin with the last turn's and its reply."""
        session, trace, started = self._session, self._session.trace, time.time()
        new = messages[len(self._wire) :]
        wire = [*self._wire, *(wire_message(message) for message in new)]
        reply = await session.client.complete(wire, tools=tools, trace=trace.id)
        if session.released or session.stopped:
            return None
        if reply.call is not None and reply.call.parent is None:  # rendered anew: another branch
            self._leaf, new = None, messages
        for message in new:
            self._append(message, tools)
        self._append(reply.message, tools, reply)
        self._wire = [*wire, wire_message(reply.message)]
        _record(trace, self._leaf, reply.finish_reason, reply.usage, started)
        return reply.message

    def _append(self, message: Any, tools: list[Any], reply: ModelReply | None = None) -> None:
        trace, now = self._session.trace, time.time()
        if self._leaf is None and tools:
            trace.tools = tools
        call = None if reply is None else reply.call
        before = [] if call is None else shared_tokens(call.new_ids)
        sampled = [] if call is None else shared_tokens(call.completion.token_ids)
        logprobs: list[float] = []
        if call is not None:
            logprobs = SampledLogprobs(call.completion, filled_context=call.filled_context)
        # All fields are given, because pydantic would inspect each default factory's signature.
        node = vf.MessageNode.model_construct(
            _NODE_FIELDS,
            parent=self._leaf,
            tools=tools if self._leaf is None else [],
            semantic_parents=[],
            message=message,
            sampled=reply is not None,
            timestamp=now,
            token_ids=[*before, *sampled],
            renderer_token_ids=None,
            mask=[False] * len(before) + [True] * len(sampled),
            is_content=[],
            logprobs=logprobs,
        )
        trace.nodes.append(node)
        self._leaf = len(trace.nodes) - 1


class HookedTurns:
    """Turns in an environment that intercepts messages, through verifiers' graph and hooks."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def take(self, messages: list[Any], tools: list[Any]) -> Any:
        """Return the reply to ``messages``, or None if a hook ended the rollout."""
        session, trace = self._session, self._session.trace
        request = vf.Request(messages=messages, tools=tools or None)
        request, rewrites, stopped = await session.rewrite_request(request)
        trace.request_rewrites.extend(rewrites)
        turn = _graph.prepare_turn(trace, request.messages, tools)
        if stopped is not None:
            turn.commit_prompt()
            trace.stop(stopped)
            return None
        started = time.time()
        response = await session.client.respond(turn)
        if session.response_interceptors or session.response_stops:
            response, rewrites, stopped = await session.rewrite_response(response)
            trace.response_rewrites.extend(rewrites)
            if rewrites:  # the text is not what was sampled, so it can't be trained
                response = response.model_copy(update={"tokens": None})
        if session.released or session.stopped:
            return None
        node = turn.commit(response)
        session.consume_prepared(turn.tail)
        _record(trace, node, response.finish_reason, response.usage, started)
        if stopped is None:
            stopped = await session.gate_tool_calls(node)
        if stopped is not None:
            trace.stop(stopped)
            return None
        return response.message


def _record(trace: Any, node: int | None, finish_reason: str, usage: Any, started: float) -> None:
    span = vf.TimeSpan(start=started, end=time.time())
    trace.calls.append(
        vf.ModelCall(node=node, model="policy", finish_reason=finish_reason, usage=usage, time=span)
    )
