"""Tools that the policy may call, and the toolbox that runs them for one rollout."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from primerl.rollout.conversations.messages import clipped, valid_unicode
from primerl.rollout.errors import located
from primerl.rollout.renderers.tool_calls import parse_arguments

State = MutableMapping[str, Any]
"""The state that the tools of one rollout share; it begins as ``{"task": task}``."""


@attrs.frozen(kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    """The name by which the policy calls the tool."""
    description: str
    """The description that the policy sees."""
    parameters: Mapping[str, Any]
    """The JSON Schema of the arguments."""
    call: Callable[[Mapping[str, Any], State], Awaitable[str | bytes] | str | bytes]
    """The plain or coroutine function to call: ``(arguments, state) -> text or bytes``.

    Several rollouts may share a tool, but each has its own ``state``. If the function raises an
    error, the policy sees the error as the result of the call.
    """

    @property
    def wire(self) -> dict[str, Any]:
        """The tool's definition in OpenAI's format."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@runtime_checkable
class Runtime(Protocol):
    """Protocol of objects that run commands: the part of verifiers' ``Runtime`` for ``shell``."""

    async def run(self, argv: list[str], env: dict[str, str]) -> Any:
        """Run a command, and return an object with ``exit_code``, ``stdout`` and ``stderr``."""
        ...


def shell(runtime: Runtime, *, name: str = "bash", workdir: str | None = None) -> Tool:
    """Return a tool that runs bash commands in ``runtime``, which the caller has to close."""

    async def run(arguments: Mapping[str, Any], state: State) -> str:  # noqa: ARG001 - a tool's
        command = arguments["command"]
        if not isinstance(command, str):
            raise ValueError("'command' is not text")
        place = [] if workdir is None else ["cd", workdir, "&&"]
        script = " ".join([*place, command])
        result = await runtime.run(["bash", "-c", script], {})
        output = "".join(part for part in (result.stdout, result.stderr) if part)
        return output if result.exit_code == 0 else f"{output}\n[exit code {result.exit_code}]"

    return Tool(
        name=name,
        description="Run a bash command and read what it prints.",
        parameters={
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
        call=run,
    )


@runtime_checkable
class Files(Protocol):
    """Protocol of objects that store files: the part of verifiers' ``Runtime`` for ``editor``."""

    async def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Return the content of a file."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Replace the content of a file."""
        ...


def editor(runtime: Files, *, name: str = "edit", max_bytes: int = 1 << 20) -> Tool:
    """Return a tool that replaces a text that occurs exactly once in a file of ``runtime``.

    If the argument ``old`` is empty, the tool writes the whole file, which need not exist.
    """

    async def run(arguments: Mapping[str, Any], state: State) -> str:  # noqa: ARG001 - a tool's
        path, old, new = (arguments[key] for key in ("path", "old", "new"))
        if not all(isinstance(value, str) for value in (path, old, new)):
            raise ValueError("'path', 'old' and 'new' have to be text")
        if not old:
            await runtime.write(path, new.encode())
            return f"{path} is written"
        text = (await runtime.read(path, max_bytes=max_bytes)).decode()
        count = text.count(old)
        if count != 1:
            raise ValueError(f"'old' occurs {count} times in {path}, expected once")
        await runtime.write(path, text.replace(old, new).encode())
        return f"{path} is changed"

    text = {"type": "string"}
    return Tool(
        name=name,
        description="Replace a text that occurs once in a file.",
        parameters={
            "type": "object",
            "properties": {"path": text, "old": text, "new": text},
            "required": ["path", "old", "new"],
        },
        call=run,
    )


class Toolbox:
    """The tools of one rollout; both results and mistakes of the policy are returned as text.

    Args:
        tools: the tools that the policy may call.
        state: the state that is passed to each call.
        timeout_s: timeout of one call, in seconds.
        max_output: maximum number of characters of one result.

    Raises:
        ValueError: two tools have the same name.
    """

    def __init__(
        self, tools: Sequence[Tool], state: State, *, timeout_s: float, max_output: int
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ValueError(f"two tools have the same name: {sorted(tool.name for tool in tools)}")
        self.wire = [tool.wire for tool in tools]
        self.failed = 0
        """The number of calls that were answered with an error."""
        self.clipped = 0
        """The number of results that were shortened to ``max_output`` characters."""
        self._state = state
        self._timeout_s = timeout_s
        self._max_output = max_output

    async def call(self, name: str, arguments: str) -> str:
        """Return the result of a call, or a text that begins with ``error:`` if the call fails."""
        result = valid_unicode(await self._call(name, arguments))
        self.failed += result.startswith("error: ")
        self.clipped += len(result) > self._max_output
        return clipped(result, self._max_output)

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message that answers a reply's tool call; both are in OpenAI's format."""
        function = call["function"]
        return {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": function["name"],
            "content": await self.call(function["name"], function["arguments"]),
        }

    async def _call(self, name: str, arguments: str) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}, only {sorted(self._tools)}"
        try:
            values = parse_arguments(arguments)
        except ValueError as error:
            return f"error: the arguments are {error}"
        missing = [key for key in tool.parameters.get("required", ()) if key not in values]
        if missing:
            return f"error: {name} needs the arguments {missing}"
        try:
            async with asyncio.timeout(self._timeout_s):
                result: Any = tool.call(values, self._state)
                if inspect.isawaitable(result):
                    result = await result
        except TimeoutError:
            return f"error: {name} did not answer within {self._timeout_s} s"
        except Exception as error:  # a tool may raise anything; the policy sees the error
            return f"error: {located(error)}"
        if isinstance(result, bytes):
            return result.decode(errors="replace")
        return str(result)
