"""Checks of tool calls, of their results, and of the schemas of tools."""

from collections.abc import Mapping, Sequence
from typing import Any

from primerl.data.errors import ConversationError
from primerl.data.json_text import decoded_if_text, says_nothing

_OTHER_ARGUMENTS = ("parameters", "args", "input")
_SCHEMAS = ("parameters", "input_schema", "inputSchema")
_READ_BESIDE = ("id", "call_id", "type", "index")
_CALL = "{'function': {'name': ..., 'arguments': ...}}"


def calls_of(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Return a reply's calls, each of the form ``{"function": {"name": ..., "arguments": {}}}``.

    Raises:
        ConversationError: a call is malformed, or says something that would be lost.
    """
    if message.keys().isdisjoint(("tool_calls", "function_call")):
        return []
    calls = decoded_if_text(message.get("tool_calls"), f"{place}.tool_calls")
    if not says_nothing(calls) and not isinstance(calls, list | tuple):
        raise ConversationError(f"{place}.tool_calls is {calls!r:.80}; expected a list")
    checked = [
        _call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls or ())
    ]
    legacy = message.get("function_call")
    if not says_nothing(legacy):
        if checked:
            raise ConversationError(
                f"{place} has tool_calls and a function_call; expected one of them"
            )
        checked.append(_call(legacy, f"{place}.function_call"))
    return checked


def _call(call: Any, place: str) -> dict[str, Any]:
    call = decoded_if_text(call, place)
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(f"{place} is {call!r:.80}; expected {_CALL}")
    used = "arguments"
    if function.get("arguments") is None:
        others = [key for key in _OTHER_ARGUMENTS if not says_nothing(function.get(key))]
        used = others[0] if len(others) == 1 else used
    read = {"name", used}
    if "function" in call:
        _require_no_others(function, read, f"{place}.function")
        beside = {*_READ_BESIDE, "function"}
        if call.get("name") == function["name"]:
            beside.add("name")
        _require_no_others(call, beside, place)
    else:
        _require_no_others(call, {*read, *_READ_BESIDE}, place)
    checked: dict[str, Any] = {}
    name = call.get("call_id") or call.get("id")
    if not says_nothing(name):
        checked["id"] = as_id(name, f"{place}.id")
    if isinstance(call.get("index"), int):
        checked["index"] = call["index"]
    if call.get("type") or "function" not in call:
        checked["type"] = "function"
    arguments = _arguments(function.get(used), f"{place}.{used}")
    return {**checked, "function": {"name": function["name"], "arguments": arguments}}


def _require_no_others(call: Mapping[str, Any], read: set[str], place: str) -> None:
    for key in call:
        if key not in read and not says_nothing(call[key]):
            raise ConversationError(
                f"{place}.{key} is {call[key]!r:.60}, which is not read; expected {_CALL} and no "
                "other key than id, type and index: write the arguments as arguments, or remove it"
            )


def _arguments(arguments: Any, place: str) -> dict[str, Any]:
    if isinstance(arguments, str):  # some clients write no text for no arguments
        arguments = decoded_if_text(arguments, place) if arguments.strip() else None
    if arguments is None or arguments == []:
        return {}
    if not isinstance(arguments, Mapping):
        raise ConversationError(
            f"{place} is {arguments!r:.80}; expected an object, or an object as JSON text"
        )
    return dict(arguments)


def as_id(value: Any, place: str) -> str:
    """Return the name of a call as a text; some files number the calls.

    Raises:
        ConversationError: the name is neither a text nor an integer.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConversationError(f"{place} is {value!r:.80}; expected a string")
    return str(value)


def tools_of(row: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Return the schemas of a conversation's tools, each in an object with ``function``.

    Raises:
        ConversationError: a schema is malformed, or there are both ``tools`` and ``functions``.
    """
    found = [key for key in ("tools", "functions") if not says_nothing(row.get(key))]
    if len(found) > 1:
        raise ConversationError(f"{place}: there are tools and functions; expected one of them")
    if not found:
        return []
    key = found[0]
    tools = decoded_if_text(row[key], f"{place}: {key}")
    if not says_nothing(tools) and not isinstance(tools, list | tuple):
        raise ConversationError(f"{place}: {key} is {tools!r:.80}; expected a list of schemas")
    return [_tool(tool, f"{place}: {key}[{index}]") for index, tool in enumerate(tools or ())]


def _tool(tool: Any, place: str) -> dict[str, Any]:
    schema = decoded_if_text(tool, place)
    function = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(
            f"{place} is {tool!r:.80}; expected {{'type': 'function', 'function': {{'name': ..., "
            "'description': ..., 'parameters': ...}}"
        )
    written = [key for key in _SCHEMAS if not says_nothing(function.get(key))]
    if len(written) > 1:
        raise ConversationError(f"{place} has {' and '.join(written)}; expected parameters alone")
    named = {key: item for key, item in function.items() if key not in _SCHEMAS}
    if written:
        named["parameters"] = decoded_if_text(function[written[0]], f"{place}.{written[0]}")
    elif "parameters" in function:
        named["parameters"] = function["parameters"]
    if not isinstance(named.get("parameters", {}), Mapping | None):
        raise ConversationError(
            f"{place}.parameters is {named['parameters']!r:.80}; expected a JSON schema, an object"
        )
    if "function" in schema:
        return {**schema, "type": "function", "function": named}
    named.pop("type", None)
    return {"type": "function", "function": named}


def require_order_of_results(messages: Sequence[Mapping[str, Any]], place: str) -> None:
    """Check that results answer the calls before them, by their ids or else in their order.

    Results after a reply without calls are not checked: some replies have their calls as text.

    Raises:
        ConversationError: a result has an id that no open call has, or another name than its call,
            or there are more results than calls.
    """
    called = False
    waiting: list[tuple[Any, str]] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            calls = message.get("tool_calls", ())
            waiting = [(call.get("id"), call["function"]["name"]) for call in calls]
            called = bool(waiting)
        elif message["role"] == "tool" and called:
            where = f"{place}: messages[{index}]"
            waiting.remove(_answered(message, waiting, where))


def _answered(
    result: Mapping[str, Any], waiting: Sequence[tuple[Any, str]], place: str
) -> tuple[Any, str]:
    """Return the id and name of the call that a result answers."""
    ids = [identity for identity, _ in waiting if identity]
    own = result.get("tool_call_id")
    if not waiting:
        raise ConversationError(f"{place} is a result, but all calls before it have one; remove it")
    if own and ids and own not in ids:
        raise ConversationError(
            f"{place}.tool_call_id is {own!r:.40}; expected one of the calls that are not "
            f"answered yet: {', '.join(ids)}"
        )
    call = waiting[0]
    if own and ids:
        call = next(one for one in waiting if one[0] == own)
    if result.get("name") not in (None, "", call[1]):
        raise ConversationError(
            f"{place} is a result of {result['name']!r:.40}, but answers the call of "
            f"{call[1]!r:.40}; put results in the order of their calls, or name the calls by "
            "tool_call_id"
        )
    return call
