"""An engine in verifiers' seats: its model client, and a harness that calls it without HTTP.

Imported on first use: importing this module imports verifiers.
"""

import contextlib
import copy
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs

from primerl._optional import require
from primerl.rollout.engine import Engine
from primerl.rollout.trace_samples import SampledLogprobs
from primerl.types import SamplingParams

vf: Any = require("verifiers.v1", extra="verifiers")
_graph: Any = require("verifiers.v1.graph", extra="verifiers")
_interception: Any = require("verifiers.v1.interception", extra="verifiers")
_runtimes: Any = require("verifiers.v1.runtimes", extra="verifiers")

CLIENT: ContextVar["EngineClient"] = ContextVar("primerl_engine_client")
"""Answers for every agent of the episode that the current task plays."""


class ContextFull(Exception):  # noqa: N818 - an outcome
    """The prompt leaves no room for a reply."""


class EngineClient(vf.Client):  # type: ignore[misc]
    """verifiers' model client over one engine, for one episode.

    Args:
        engine: samples the replies.
        params: of every reply; the renderer's stop tokens stop it as well.
        renderer: from messages to tokens and back.
    """

    def __init__(self, engine: Engine, params: SamplingParams, renderer: Any) -> None:
        stops = dict.fromkeys((*params.stop_token_ids, *renderer.get_stop_token_ids()))
        self.params = attrs.evolve(params, stop_token_ids=tuple(stops))
        self.sessions: dict[str, Any] = {}
        self.error: Exception | None = None
        self._engine = engine
        self._renderer = renderer

    async def complete(self, turn: Any, session_id: str | None) -> Any:
        """The engine's reply to ``turn``, as verifiers' ``Response``.

        Raises:
            ContextFull: the prompt leaves no room for a reply.
        """
        tools = [_wire_tool(tool) for tool in turn.tools] or None
        prompt_ids = self._prompt(turn, tools)
        room = self._engine.context_length - len(prompt_ids)
        if room < 1:
            raise ContextFull(f"the prompt has {len(prompt_ids)} tokens")
        params = self.params
        if room < params.max_tokens:
            params = attrs.evolve(params, max_tokens=room)
        try:
            completion = await self._engine.generate(prompt_ids, params, session=session_id)
        except Exception as error:
            self.error = error  # verifiers keeps only its text
            raise
        token_ids = completion.token_ids.tolist()
        parsed = self._renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
        calls = _tool_calls(parsed.tool_calls) if tools else None
        cut = completion.finish_reason == "length"
        return vf.Response.model_construct(
            id="",
            created=0,
            model="policy",
            message=vf.AssistantMessage(
                content=parsed.content or None,
                reasoning_content=parsed.reasoning_content,
                tool_calls=calls,
            ),
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            usage=vf.Usage.model_construct(
                prompt_tokens=len(prompt_ids), completion_tokens=len(token_ids)
            ),
            tokens=vf.TurnTokens.model_construct(
                prompt_ids=prompt_ids,
                completion_ids=token_ids,
                completion_logprobs=SampledLogprobs(
                    completion, filled_context=cut and params is not self.params
                ),
            ),
            raw=None,
        )

    async def get_response(
        self,
        dialect: Any,  # noqa: ARG002 - the messages are parsed already
        body: Mapping[str, Any],  # noqa: ARG002
        sampling: Any,  # noqa: ARG002 - params decide
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,  # noqa: ARG002
    ) -> Any:
        """Serve a harness that speaks HTTP, through verifiers' own server."""
        try:
            response = await self.complete(turn, session_id)
        except ContextFull as error:
            turn.trace.stop("context")
            raise vf.ProviderError(str(error), status_code=400) from error
        response.raw = _wire_response(response)
        return response

    def _prompt(self, turn: Any, tools: Any) -> list[int]:
        tail = [_wire_message(message) for message in turn.tail]
        previous = turn.previous_renderer_token_ids() if tail else None
        rendered = None
        if previous is not None:
            rendered = self._renderer.bridge_to_next_turn(*previous, tail, tools=tools)
        if rendered is None:
            messages = [_wire_message(message) for message in turn.prompt]
            rendered = self._renderer.render(messages, tools=tools, add_generation_prompt=True)
        token_ids: list[int] = rendered.token_ids
        return token_ids


async def take_turn(session: Any, messages: list[Any], tools: list[Any]) -> Any:
    """One model call of ``session`` with what verifiers does around it: limits, stops and hooks.

    Returns:
        The assistant's message, or None if the rollout is over.
    """
    trace = session.trace
    if session.released or session.stopped or await session.refused() is not None:
        return None
    if session.request_interceptors or session.request_stops or session.pinned_tool_results:
        request = vf.Request.model_construct(messages=messages, tools=tools or None)
        request, rewrites, stopped = await session.rewrite_request(request)
        messages = request.messages
        trace.request_rewrites.extend(rewrites)
        if stopped is not None:
            _graph.prepare_turn(trace, messages, tools).commit_prompt()
            trace.stop(stopped)
            return None
    turn = _graph.prepare_turn(trace, messages, tools)
    if session.on_turn_input is not None:
        acknowledge, session.on_turn_input = session.on_turn_input, None
        acknowledge()
    started = time.time()
    try:
        response = await session.client.complete(turn, trace.id)
    except ContextFull:
        trace.stop("context")
        return None
    except vf.RolloutError:
        raise
    except Exception as error:
        raise vf.ProviderError(f"{type(error).__name__}: {error}") from error
    return await _commit(session, turn, response, started)


async def _commit(session: Any, turn: Any, response: Any, started: float) -> Any:
    trace = session.trace
    stopped = None
    if session.response_interceptors or session.response_stops:
        response, rewrites, stopped = await session.rewrite_response(response)
        trace.response_rewrites.extend(rewrites)
        if rewrites:  # other words than those that were sampled: nothing to train
            response = response.model_copy(update={"tokens": None})
    if session.released or session.stopped:
        return None
    node = turn.commit(response)
    session.consume_prepared(turn.tail)
    trace.calls.append(
        vf.ModelCall.model_construct(
            node=node,
            model=response.model,
            finish_reason=response.finish_reason,
            usage=response.usage,
            time=vf.TimeSpan.model_construct(start=started, end=time.time()),
        )
    )
    if stopped is None:
        stopped = await session.gate_tool_calls(node)
    if stopped is not None:
        trace.stop(stopped)
        return None
    return response.message


class EngineInterception(_interception.Interception):  # type: ignore[misc]
    """Where rollouts of this process meet their client.

    Args:
        http: also listen, for tool servers that keep state and harnesses that speak HTTP.
        state_secrets: of the shared tool servers.
    """

    def __init__(self, *, http: bool, state_secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._server = None
        if http:
            self._server = _interception.InterceptionServer(
                state_service_secrets=tuple(state_secrets)
            )

    async def start(self) -> None:
        """Listen, if asked to."""
        if self._server is not None:
            await self.stack.enter_async_context(self._server)

    @contextlib.asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[tuple[str, str, str]]:
        """Register ``session`` with the client of the episode that is being played."""
        client = CLIENT.get()
        async with contextlib.AsyncExitStack() as stack:
            if self._server is None:
                slot = ("http://127.0.0.1:9", secrets.token_urlsafe(8), "")
                stack.callback(session.release)
            else:
                slot = await stack.enter_async_context(self._server.acquire(session))
            session.client = client
            client.sessions[slot[1]] = session
            stack.callback(client.sessions.pop, slot[1])
            yield slot


class EngineHarness(vf.Harness):  # type: ignore[misc]
    """verifiers' chat loop with tools (its ``null`` harness), inside this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, *_: Any, **__: Any) -> Any:
        """Unused: ``session`` holds the conversation."""
        raise NotImplementedError("EngineHarness plays through its session")

    async def session(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """The conversation of one rollout."""
        place = (ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url)
        return ChatSession(self, *place)


class ChatSession(vf.HarnessSession):  # type: ignore[misc]
    """One rollout's conversation, kept between the segments of an interaction."""

    def __init__(self, harness: Any, *place: Any) -> None:
        super().__init__(harness, *place)
        self._rollout = CLIENT.get().sessions[self.secret]
        system, prompt = harness.resolve_prompt(self.data)
        self._messages = [] if system is None else [vf.SystemMessage(content=system)]
        if isinstance(prompt, str):
            self._messages.append(vf.UserMessage(content=prompt))
        else:
            self._messages.extend(prompt or [])

    async def _run(self, messages: list[Any] | None) -> Any:
        self._messages.extend(messages or [])
        if self.mcp_urls:
            from primerl.rollout.verifiers_tools import toolbox

            async with toolbox(self.mcp_urls, timeout_s=self.harness.config.tool_timeout) as tools:
                await self._converse(tools)
        else:
            await self._converse(None)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _converse(self, tools: Any) -> None:
        while True:
            offered = [] if tools is None else tools.tools
            reply = await take_turn(self._rollout, self._messages, offered)
            if reply is None:
                return
            self._messages.append(reply)
            if not reply.tool_calls:
                return
            for call in reply.tool_calls:
                result = await self._call(tools, call)
                if result is None:
                    return
                self._messages.append(result)

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


class Workspace(_runtimes.SubprocessRuntime):  # type: ignore[misc]
    """A subprocess runtime whose folder exists once something uses it, which few rollouts do."""

    def __init__(self) -> None:
        super().__init__(vf.SubprocessConfig())

    @property
    def workdir(self) -> Path:
        """The rollout's own folder."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="primerl-rollout-"))
        return self._folder

    @workdir.setter
    def workdir(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def used(self) -> bool:
        """Whether there is anything to clean up."""
        return self._folder is not None or bool(self._background)

    async def start(self) -> None:
        """Make the folder: tool servers ask for its name."""
        self.info.id = str(self.workdir)

    async def teardown(self) -> None:
        """End what runs in the folder, and remove it."""
        if self.used:
            await super().teardown()

    def cleanup(self) -> None:
        """The same, for when there is no event loop any more."""
        for process in self._background:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class EngineAgent(vf.Agent):  # type: ignore[misc]
    """A seat of an environment, played by the engine.

    Args:
        config: the seat's.
        name: the seat's name.
        harness: None keeps the one that ``config`` names.
        interception: shared by all seats.
        shared_tools: the taskset's tool servers, for tasks of ``task_type``.
        task_type: of the taskset.
    """

    def __init__(
        self,
        config: Any,
        *,
        name: str,
        harness: Any,
        interception: Any,
        shared_tools: Mapping[str, Any],
        task_type: type,
    ) -> None:
        super().__init__(config, interception=interception)
        if harness is not None:
            self.harness = harness
        self._name = name
        self._shared_tools = shared_tools
        self._task_type = task_type
        self._traces: list[Any] = []

    def for_episode(self, traces: list[Any]) -> "EngineAgent":
        """This seat in one episode, whose finished traces go to ``traces``."""
        agent = copy.copy(self)
        agent._traces = traces
        return agent

    async def run(
        self,
        task: Any,
        *,
        runtime: Any = None,
        tools: Any = None,
        on_trace: Any = None,
        collect_artifacts: bool = False,
    ) -> Any:
        """Play ``task`` once."""
        async with self._workspace(task, runtime) as box:
            trace = await super().run(
                task,
                runtime=box,
                tools=self._tools(task) if tools is None else tools,
                on_trace=self._stamp(on_trace),
                collect_artifacts=collect_artifacts,
            )
        self._traces.append(trace)
        return trace

    @contextlib.asynccontextmanager
    async def interaction(
        self, task: Any, *, runtime: Any = None, tools: Any = None, on_trace: Any = None
    ) -> AsyncIterator[Any]:
        """Play ``task`` turn by turn, with the environment as the user."""
        minted: list[Any] = []
        try:
            async with (
                self._workspace(task, runtime) as box,
                super().interaction(
                    task,
                    runtime=box,
                    tools=self._tools(task) if tools is None else tools,
                    on_trace=self._stamp(on_trace, minted.append),
                ) as interaction,
            ):
                yield interaction
        finally:
            self._traces.extend(minted)

    def _tools(self, task: Any) -> Mapping[str, Any]:
        return self._shared_tools if isinstance(task, self._task_type) else {}

    def _stamp(self, *observers: Callable[[Any], None] | None) -> Callable[[Any], None]:
        def stamp(trace: Any) -> None:
            trace.agent.name = self._name
            trace.agent.trainable = self.trainable
            for observer in observers:
                if observer is not None:
                    observer(trace)

        return stamp

    @contextlib.asynccontextmanager
    async def _workspace(self, task: Any, runtime: Any) -> AsyncIterator[Any]:
        if runtime is not None or not isinstance(self.runtime_config, vf.SubprocessConfig):
            yield runtime  # the environment's own, or one that verifiers starts
            return
        box = Workspace()
        try:
            if task.toolsets(task.config):
                await box.start()
            yield box
        finally:
            if box.used:
                await box.stop()


def _wire_tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _wire_message(message: Any) -> dict[str, Any]:
    wire = {"role": message.role, "content": _text(message.content)}
    if message.role == "assistant":
        if message.reasoning_content is not None:
            wire["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            wire["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    elif message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            wire["name"] = message.name
    return wire


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type != "text" for part in content):
        raise ValueError("a message holds an image; this adapter renders text only")
    return "\n".join(part.text for part in content)


def _wire_call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_calls(parsed: Sequence[Any]) -> list[Any] | None:
    calls = []
    for index, call in enumerate(parsed):
        if call.name and str(call.status) == "ok":
            arguments = call.arguments
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments or {})
            name = call.id or f"call_{index}"
            calls.append(vf.ToolCall(id=name, name=call.name, arguments=arguments))
    return calls or None


def _wire_response(response: Any) -> dict[str, Any]:
    message = _wire_message(response.message)
    usage = response.usage
    return {
        "id": "primerl",
        "object": "chat.completion",
        "created": 0,
        "model": response.model,
        "choices": [{"index": 0, "message": message, "finish_reason": response.finish_reason}],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


__all__ = ["CLIENT", "EngineAgent", "EngineClient", "EngineHarness", "EngineInterception"]
