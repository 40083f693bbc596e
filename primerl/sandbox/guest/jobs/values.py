"""A lossless JSON encoding of plain values, with a strict decoder.

``grading.py`` also sends the source of this file into sandboxes, prepended to a program that uses
it.
"""

from collections import Counter
from typing import Any

_MOST_DEPTH = 50
_MOST_WITH_ONE_HASH = 100
_COLLECTIONS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}


def encode(value: Any, refer: Any, depth: int = 0) -> Any:
    """Encode a value for JSON.

    ``refer`` encodes values that are not plain, or are nested too deeply.
    """
    kind = type(value)
    if kind in (type(None), bool, str):
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind in (float, bytes):
        return {kind.__name__: value.hex()}
    if kind in (list, tuple, set, frozenset) and depth < _MOST_DEPTH:
        return {kind.__name__: [encode(item, refer, depth + 1) for item in value]}
    if kind is dict and depth < _MOST_DEPTH:
        pairs = value.items()
        return {"dict": [[encode(part, refer, depth + 1) for part in pair] for pair in pairs]}
    return refer(value)


def decode(encoded: Any, find: Any = None, depth: int = 0) -> Any:
    """Decode a value that ``encode`` encoded; ``find`` decodes what ``refer`` encoded.

    Raises:
        ValueError: the encoded value is malformed.
    """
    if encoded is None or type(encoded) in (bool, str):
        return encoded
    if type(encoded) is not dict or len(encoded) != 1 or depth > _MOST_DEPTH:
        raise ValueError("a message holds a malformed value: expected one type and its content")
    ((kind, content),) = encoded.items()
    if kind not in ("int", "float", "bytes", *_COLLECTIONS):
        if find is None:
            raise ValueError(
                "a message holds a value that is not of a plain type; expected None, a bool, a "
                "number, a string, bytes, or a collection of these"
            )
        return find(kind, content)
    if kind in ("int", "float", "bytes"):
        if type(content) is not str:
            raise ValueError("a message holds a malformed number or bytes: expected a string")
        return _number(kind, content)
    if type(content) is not list:
        raise ValueError("a message holds a malformed collection: expected a list")
    if kind == "dict":
        if not all(type(pair) is list and len(pair) == 2 for pair in content):
            raise ValueError("a message holds a malformed dictionary: expected a list of pairs")
        items = [tuple(decode(part, find, depth + 1) for part in pair) for pair in content]
    else:
        items = [decode(item, find, depth + 1) for item in content]
    try:
        if find is None and kind in ("set", "frozenset", "dict"):  # not where a hash is a call
            _check_hashes(items if kind != "dict" else [key for key, _ in items])
        return _COLLECTIONS[kind](items)
    except TypeError as error:  # an unhashable element or key
        raise ValueError(f"a message holds a malformed {kind}: {error}") from None


def _check_hashes(keys: list[Any]) -> None:
    """Refuse keys with which a hash table would take quadratic time, such as multiples of 2^61 - 1.

    Raises:
        TypeError: a key has no hash.
        ValueError: too many keys have the same hash.
    """
    hashes = Counter(hash(key) for key in keys)
    if max(hashes.values(), default=0) > _MOST_WITH_ONE_HASH:
        raise ValueError("a message holds a collection whose keys have equal hashes")


def _number(kind: str, content: str) -> Any:
    try:
        if kind == "int":
            return int(content, 16)
        return float.fromhex(content) if kind == "float" else bytes.fromhex(content)
    except OverflowError:
        raise ValueError("a message holds a number that is out of range") from None
