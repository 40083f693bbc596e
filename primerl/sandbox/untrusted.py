"""Reading of what a sandbox said, in steps so short that the event loop can do other work."""

import asyncio
import codecs
import json
from typing import Any

_CHUNK = 1 << 16
_ROWS = 500
_LONGEST_ROW = 1 << 14


async def text(said: bytes) -> str:
    """Decode bytes as UTF-8; wrong bytes become replacement characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [decoder.decode(said[:_CHUNK], len(said) <= _CHUNK)]
    for at in range(_CHUNK, len(said), _CHUNK):
        await asyncio.sleep(0)
        parts.append(decoder.decode(said[at : at + _CHUNK], at + _CHUNK >= len(said)))
    return "".join(parts)


async def rows(said: bytes) -> list[Any]:
    """Parse lines of JSON; return no more rows from the first malformed or overlong line on."""
    found: list[Any] = []
    at = 0
    while (end := said.find(b"\n", at, at + _LONGEST_ROW)) >= 0:
        try:
            found.append(json.loads(said[at:end]))
        except (ValueError, RecursionError):
            break
        at = end + 1
        if len(found) % _ROWS == 0:
            await asyncio.sleep(0)
    return found


def shown(value: Any) -> str:
    """Represent a value that a sandbox returned, in at most 200 characters, whatever it is."""
    try:
        return f"{value!r:.200}"
    except (ValueError, RecursionError):  # a huge int, or deep nesting
        return f"<{type(value).__name__}, too large to show>"
