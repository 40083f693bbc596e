"""JSON text, and checks of the values that it holds."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from primerl.data.errors import ConversationError

_MOST_LEVELS = 64
_SIMPLE = (int, bool, type(None))


def decoded_json(text: str | bytes, place: str) -> Any:
    """Decode JSON, and refuse keys that occur twice.

    Raises:
        ConversationError: the text is not JSON, or a key occurs twice in an object.
    """

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        decoded = dict(pairs)
        if len(decoded) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConversationError(f"{place}: the key {twice!r:.40} occurs twice in an object")
        return decoded

    decoder = json.JSONDecoder(object_pairs_hook=made)
    try:
        return decoder.decode(text.decode() if isinstance(text, bytes) else text)
    except ConversationError:
        raise
    except RecursionError:
        raise ConversationError(f"{place}: nested in more than {_MOST_LEVELS} levels") from None
    except ValueError as error:
        raise ConversationError(f"{place}: not valid JSON ({error})") from None


def decoded_if_text(value: Any, place: str) -> Any:
    """Decode a value that is JSON text, and check it; any other value is returned as it is."""
    if not isinstance(value, str) or not value.strip():
        return value
    decoded = decoded_json(value, place)
    require_plain(decoded, place)
    return decoded


def says_nothing(value: Any) -> bool:
    """Return whether a value is null, false, or an empty text, list or object."""
    if value is None or value is False:
        return True
    return isinstance(value, str | list | tuple | Mapping) and not value


def without_nulls(value: Any) -> Any:
    """Remove keys that are null: ``datasets`` fills keys that only other rows have with null.

    An object whose keys are all null is null, too, but for an item of a list, which stays ``{}``.
    """
    if isinstance(value, Mapping):
        items = {key: without_nulls(item) for key, item in value.items()}
        kept = {key: item for key, item in items.items() if item is not None}
        return kept if kept or not items else None
    if isinstance(value, list):
        return [
            {} if isinstance(item, Mapping) and kept is None else kept
            for item, kept in ((item, without_nulls(item)) for item in value)
        ]
    return value


def require_plain(value: Any, place: str, *, finite: bool = True) -> None:
    """Check that a nested value is not too deep and has texts and finite numbers only.

    Raises:
        ConversationError: the value is nested in more than 64 levels, a text or key has a lone
            surrogate, or, if ``finite``, a number is not finite.
    """
    level: list[Any] = [(value,)]
    for _ in range(_MOST_LEVELS + 1):
        inner: list[Any] = []
        for item in level:
            children = item
            if isinstance(item, Mapping):
                children = item.values()
                if not _is_text("".join(map(str, item))):
                    _raise_problem(value, place)
            for child in children:
                kind = type(child)
                if kind is str:
                    if not child.isascii() and not _is_text(child):
                        _raise_problem(value, place)
                elif kind is float:
                    if finite and not math.isfinite(child):
                        _raise_problem(value, place)
                elif kind not in _SIMPLE and isinstance(child, Mapping | list | tuple):
                    inner.append(child)
        level = inner
        if not level:
            return
    raise ConversationError(f"{place}: nested in more than {_MOST_LEVELS} levels")


def _raise_problem(value: Any, place: str) -> None:
    """Raise the error of the first value that is no text and no finite number."""
    for path, one in leaves(value, place, keys=True):
        if isinstance(one, float) and not math.isfinite(one):
            raise ConversationError(f"{path} is {one}, which is not a finite number")
        if isinstance(one, str) and not _is_text(one):
            raise ConversationError(f"{path} has a lone surrogate, which is no text: remove it")


def _is_text(text: Any) -> bool:
    if not isinstance(text, str) or text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def leaves(value: Any, path: str, *, keys: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of a nested value that are neither objects nor lists.

    With ``keys``, the keys of all objects are yielded, too.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if keys:
                yield f"{path}, the key {key!r:.40}", key
            yield from leaves(item, f"{path}.{key}", keys=keys)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]", keys=keys)
    else:
        yield path, value
