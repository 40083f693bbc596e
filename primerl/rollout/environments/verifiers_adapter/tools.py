"""Tools of an environment's tool servers, called over MCP with a timeout."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from primerl._common.optional import require
from primerl.rollout.renderers.tool_calls import parse_arguments

vf: Any = require("verifiers.v1", extra="verifiers")
_mcp: Any = require("mcp", extra="verifiers")
_transport: Any = require("mcp.client.streamable_http", extra="verifiers")
_http: Any = require("httpx2", extra="verifiers")


MAX_BYTES = 1 << 24  # per answer of a tool server


def connections() -> Any:
    """Return an HTTP client for tool servers, which all rollouts of an event loop share.

    A client per rollout would cost 30 ms each, mostly for certificates. An answer that is
    compressed or has more than ``MAX_BYTES`` is an error.
    """
    return _http.AsyncClient(
        follow_redirects=True,
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [_bound]},
        timeout=_http.Timeout(None, connect=30.0),  # each call has its own timeout
        limits=_http.Limits(max_connections=None, max_keepalive_connections=64),
    )


async def _bound(response: Any) -> None:
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _http.ReadError("a tool server answered with compressed content")
    response.stream = _Bounded(response.stream)


class _Bounded(_http.AsyncByteStream):  # type: ignore[misc]
    """A stream that raises an error after ``MAX_BYTES``."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = 0
        async for chunk in self._stream:
            received += len(chunk)
            if received > MAX_BYTES:
                raise _http.ReadError(f"a tool server answered with more than {MAX_BYTES:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


@contextlib.asynccontextmanager
async def toolbox(
    urls: Mapping[str, str], http: Any, *, timeout_s: float
) -> AsyncIterator["ServedTools"]:
    """Connect to the tool servers at ``urls``, by name, and yield their tools.

    ``http`` is the client that ``connections`` returned.

    Raises:
        verifiers.v1.ToolsetError: a server does not answer within ``timeout_s``, or two tools have
            the same name.
    """
    async with contextlib.AsyncExitStack() as stack:
        tools: dict[str, tuple[Any, str]] = {}
        described = []
        for server, url in urls.items():
            try:
                async with asyncio.timeout(timeout_s):
                    client = await stack.enter_async_context(
                        _mcp.Client(_transport.streamable_http_client(url, http_client=http))
                    )
                    listed = await client.list_tools()
            except TimeoutError:
                raise vf.ToolsetError(
                    f"tool server {server!r} did not answer within {timeout_s} s"
                ) from None
            for tool in listed.tools:
                name = f"{server}_{tool.name}" if server else tool.name
                if name in tools:
                    raise vf.ToolsetError(f"two tools are named {name!r}; give one a TOOL_PREFIX")
                tools[name] = (client, tool.name)
                described.append(
                    vf.Tool(
                        name=name,
                        description=tool.description or "",
                        parameters=tool.input_schema,
                    )
                )
        yield ServedTools(described, tools, timeout_s)


class ServedTools:
    """The tools of an environment's servers, which the policy may call.

    ``owners`` maps each tool's name to its server's client and to the server's name for the tool.
    """

    def __init__(
        self, tools: list[Any], owners: Mapping[str, tuple[Any, str]], timeout_s: float
    ) -> None:
        self.tools = tools
        self._owners = owners
        self._timeout_s = timeout_s

    async def call(self, name: str, arguments: str) -> str:
        """Return the result of a call as text; mistakes of the policy are returned as text, too."""
        if name not in self._owners:
            return f"error: there is no tool {name!r}, only {sorted(self._owners)}"
        try:
            values = parse_arguments(arguments)
        except ValueError as error:
            return f"error: the arguments are {error}"
        client, own_name = self._owners[name]
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await client.call_tool(own_name, values)
        except TimeoutError:
            return f"error: {name} did not answer within {self._timeout_s} s"
        return "\n".join(
            block.text if block.type == "text" else f"[{block.type}]" for block in result.content
        )
