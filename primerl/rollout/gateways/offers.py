"""The tools that a request offers: as the policy knows them, and as the client calls them."""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import attrs

from primerl.rollout.conversations.messages import text_of, valid_unicode

_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


@attrs.frozen
class OfferedTool:
    """A tool of a client.

    ``kind`` is custom if the tool takes text. The policy knows such a tool as a function with the
    argument ``input``.
    """

    name: str
    kind: Literal["function", "custom"] = "function"
    namespace: str | None = None


class Offers:
    """The tools of one request.

    The policy calls a tool of a namespace by the tool's name, or by ``namespace__name`` if several
    tools have this name. Tools that only an API's own servers can run are left out.
    """

    def __init__(self) -> None:
        self._tools: dict[tuple[str, str | None], tuple[OfferedTool, dict[str, Any]]] = {}
        self._counts: Counter[str] = Counter()
        self.left_out: list[str] = []

    def add_function(
        self, name: Any, description: Any, parameters: Any, *, namespace: str | None = None
    ) -> None:
        """Add a function.

        Raises:
            ValueError: it has no name.
        """
        function = {"description": text_of(description), "parameters": parameters or {}}
        self._add(OfferedTool(_name(name), "function", namespace), function)

    def add_custom(
        self, name: Any, description: Any, format_: Any, *, namespace: str | None = None
    ) -> None:
        """Add a tool that takes text, maybe of a grammar, which is added to the description.

        Raises:
            ValueError: it has no name.
        """
        described = text_of(description)
        grammar = format_.get("grammar", format_) if isinstance(format_, Mapping) else {}
        if isinstance(grammar, Mapping) and isinstance(grammar.get("definition"), str):
            syntax = grammar.get("syntax", "")
            described += f"\n\nThe input follows this {syntax} grammar:\n{grammar['definition']}"
        function = {"description": valid_unicode(described), "parameters": _TEXT}
        self._add(OfferedTool(_name(name), "custom", namespace), function)

    def leave_out(self, kind: str, tool: Mapping[str, Any]) -> None:
        """Note a tool that is not offered to the policy."""
        name = tool.get("name") or tool.get("server_label")
        self.left_out.append(f"{kind} ({name})" if isinstance(name, str) and name != kind else kind)

    @property
    def wire(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's format, as the policy knows them."""
        return [
            {"type": "function", "function": {"name": self._known_as(tool), **function}}
            for tool, function in self._tools.values()
        ]

    @cached_property
    def by_name(self) -> dict[str, OfferedTool]:
        """The tools by the name under which the policy knows them, once all are added."""
        return {self._known_as(tool): tool for tool, _ in self._tools.values()}

    def policy_name(self, name: Any, namespace: Any = None) -> str:
        """Return the name under which the policy knows a tool that a client names.

        Raises:
            ValueError: the name is not text.
        """
        given = _name(name)
        if not isinstance(namespace, str):
            return given
        return self._known_as(OfferedTool(given, "function", namespace))

    def _add(self, tool: OfferedTool, function: dict[str, Any]) -> None:
        place = (tool.name, tool.namespace)
        known = self._tools.get(place)
        if known is None:
            self._counts[tool.name] += 1
        elif known[0].kind != tool.kind:
            raise ValueError(f"two tools have the name {tool.name!r}")
        self._tools[place] = (tool, function)  # the last definition counts

    def _known_as(self, tool: OfferedTool) -> str:
        if tool.namespace is None or self._counts[tool.name] < 2:
            return tool.name
        return f"{tool.namespace}__{tool.name}"


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError("a tool, or a call of one, has no name; only functions are supported")
    return valid_unicode(name)
