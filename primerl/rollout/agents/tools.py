"""Functions that the policy may call, and what becomes of calls that fail."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from primerl.rollout.conversations.messages import clipped, valid_unicode
from primerl.rollout.errors import located

State = MutableMapping[str, Any]
"""What one rollout's tools share, from the task on: ``{"task": task}``."""


@attrs.frozen(kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    """The name by which the policy calls it."""
    description: str
    """For the policy."""
    parameters: Mapping[str, Any]
    """The arguments, as JSON Schema."""
    call: Callable[[Mapping[str, Any], State], Awaitable[str | bytes] | str | bytes]
    """``(arguments, state) -> text or bytes``, a coroutine function or a plain one.

    All rollouts may share a tool; ``state`` belongs to one rollout. The policy sees the error that
    it raises as the result of the call.
    """

    @property
    def wire(self) -> dict[str, Any]:
        """The tool in OpenAI's form."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@runtime_checkable
class Runtime(Protocol):
    """A place in which commands run: what ``shell`` needs of verifiers' ``Runtime``."""

    async def run(self, argv: list[str], env: dict[str, str]) -> Any:
        """Run a command; the result has ``exit_code``, ``stdout`` and ``stderr``."""
        ...


def shell(runtime: Runtime, *, name: str = "bash", workdir: str | None = None) -> Tool:
    """A tool that runs bash commands in ``runtime``, which is borrowed: it is not closed."""

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
    """A place with files: what ``editor`` needs of verifiers' ``Runtime``."""

    async def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """The content of a file."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Replace the content of a file."""
        ...


def editor(runtime: Files, *, name: str = "edit", max_bytes: int = 1 << 20) -> Tool:
    """A tool that replaces a text, which has to occur once in a file of ``runtime``.

    An empty ``old`` writes the whole file, which may be new.
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
    """The tools of one rollout: results as text, and mistakes of the policy as text, too.

    Args:
        tools: by which the policy can act.
        state: passed to each of them.
        timeout_s: of one call.
        max_output: characters of one result.

    Raises:
        ValueError: two tools have one name.
    """

    def __init__(
        self, tools: Sequence[Tool], state: State, *, timeout_s: float, max_output: int
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ValueError(f"two tools have one name: {sorted(tool.name for tool in tools)}")
        self.wire = [tool.wire for tool in tools]
        self.failed = 0
        """Calls that were answered with an error."""
        self.clipped = 0
        """Results of which something was left out."""
        self._state = state
        self._timeout_s = timeout_s
        self._max_output = max_output

    async def call(self, name: str, arguments: str) -> str:
        """The result of a call, whatever becomes of it."""
        result = valid_unicode(await self._call(name, arguments))
        self.failed += result.startswith("error: ")
        self.clipped += len(result) > self._max_output
        return clipped(result, self._max_output)

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The message that answers a call of a reply, both in OpenAI's form."""
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
            values = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(values, dict):
            return "error: the arguments are not an object of names and values"
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
        except Exception as error:  # a tool may raise anything, and the policy is told
            return f"error: {located(error)}"
        if isinstance(result, bytes):
            return result.decode(errors="replace")
        return str(result)
