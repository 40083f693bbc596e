"""Conversations in JSONL and Parquet files, read from disk when they are accessed."""

import bisect
import itertools
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec

from primerl._common import optional

ROLES = ("system", "developer", "user", "assistant", "tool")
_SUFFIXES = (".jsonl", ".parquet")
_JSON = msgspec.json.Decoder()


class Conversations(Sequence[dict[str, Any]]):
    """A sequence of the conversations in files and folders; memory holds only file offsets.

    One conversation is a line of a ``.jsonl`` file or a row of a ``.parquet`` file:

        {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
         "tools": [...]}

    ``tools`` (schemas for the chat template) and the ``tool_calls`` of an assistant's message are
    optional; if they are strings of JSON, they are decoded. Other columns are kept. In Parquet, a
    null means that the key is absent. A conversation without ``"id"`` gets its file and line as id,
    such as ``"chats.jsonl:17"``. All conversations are checked when the files are opened, so that
    no error occurs in the middle of a run.

    Args:
        paths: files, and folders of such files (which are read in the order of their names).

    Raises:
        ValueError: a path is neither a file of these kinds nor a folder of such files, a file is
            empty, or a conversation is malformed; the message begins with its file and line.
        ImportError: there are Parquet files, but ``datasets`` is not installed.
    """

    def __init__(self, *paths: str | os.PathLike[str]) -> None:
        files = list(itertools.chain.from_iterable(_files(Path(path)) for path in paths))
        if not files:
            raise ValueError("no files of conversations; pass at least one path")
        self._files = [_open(path) for path in files]
        # For each file, the index after its last conversation.
        self._ends = list(itertools.accumulate(len(rows) for rows in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # negative indices, and IndexError
        number = bisect.bisect_right(self._ends, place)
        rows = self._files[number]
        return rows[place - self._ends[number] + len(rows)]


class _LinesOfJSON:
    """The conversations of a JSONL file; blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("Q")
        self._lines = array("Q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _conversation(_decode(line, f"{path}:{number}"), f"{path}:{number}")
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = f"{self._path}:{self._lines[index]}"
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            return _conversation(_decode(file.readline(), place), place)


class _RowsOfParquet:
    """The conversations of a Parquet file, read from the memory-mapped copy of ``datasets``."""

    def __init__(self, path: Path) -> None:
        datasets = optional.require("datasets", extra="data")
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        if not _can_be_written(cache):
            raise ValueError(
                f"{path}: datasets copies the Parquet file to {cache}, which is not writable: set "
                "HF_HOME to a writable folder"
            )
        self._path = path
        self._rows = datasets.Dataset.from_parquet(str(path))
        for index in range(len(self)):
            self[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _conversation(_without_nulls(self._rows[index]), f"{self._path}, row {index}")


def _can_be_written(folder: Path) -> bool:
    """Create a folder if it is missing, and return whether it is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not inside:
            raise ValueError(f"{path}: the folder has no files that end in {_kinds()}")
        yield from inside
    elif not path.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    elif path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: expected a file that ends in {_kinds()}, or a folder of them")
    else:
        yield path


def _kinds() -> str:
    return " or ".join(_SUFFIXES)


def _open(path: Path) -> _LinesOfJSON | _RowsOfParquet:
    rows = _LinesOfJSON(path) if path.suffix == ".jsonl" else _RowsOfParquet(path)
    if not len(rows):
        raise ValueError(f"{path}: the file is empty; expected one conversation per line or row")
    return rows


def _decode(text: bytes | str, place: str) -> Any:
    try:
        return _JSON.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{place}: not valid JSON ({error})") from None


def _conversation(row: Any, place: str) -> dict[str, Any]:
    """Check the conversation in a row, add its id, and decode strings of JSON."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{place}: expected an object with 'messages', a list with at least one message; "
            f"found {row!r:.80}"
        )
    conversation = {
        "id": place,
        **row,
        "messages": [
            _message(message, f"{place}: messages[{index}]")
            for index, message in enumerate(messages)
        ],
    }
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = conversation["tools"] = _decode(tools, f"{place}: tools")
    if not isinstance(tools, list | None):
        raise ValueError(f"{place}: tools is {tools!r:.80}; expected a list of schemas")
    if not any(message["role"] == "assistant" for message in conversation["messages"]):
        raise ValueError(f"{place}: no message has the role 'assistant': there is nothing to train")
    return conversation


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} is {message!r:.80}; expected an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{place}.role is {role!r:.80}; expected one of {', '.join(ROLES)}")
    content = message.get("content")
    calls = message.get("tool_calls")
    if not isinstance(content, str | list) and not (content is None and calls):
        raise ValueError(f"{place}.content is {content!r:.80}; expected a string")
    checked = dict(message)
    if isinstance(calls, str):
        calls = _decode(calls, f"{place}.tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise ValueError(f"{place}.tool_calls is {calls!r:.80}; expected a list")
        checked["tool_calls"] = [
            _tool_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return checked


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    """Check a tool call, and decode JSON arguments to an object, which chat templates expect."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{place} is {call!r:.80}; expected {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    function = dict(function)
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _decode(function["arguments"], f"{place}.arguments")
    return {**call, "function": function} if "function" in call else function


def _without_nulls(value: Any) -> Any:
    """Remove keys that are null, as Parquet fills keys that only other rows have with null."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
