"""Conversations in JSONL and Parquet files, read from disk when they are accessed."""

import bisect
import itertools
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from primerl.data.digests import file_digests
from primerl.data.errors import ConversationError
from primerl.data.files import LinesOfJSON, RowsOfParquet, files_in, open_rows, unread_files
from primerl.data.messages import checked_conversation
from primerl.data.other_formats import require_messages, to_messages


class Conversations(Sequence[dict[str, Any]]):
    """A sequence of the conversations in files and folders; memory holds only file offsets.

    One conversation is a line of a ``.jsonl`` file or a row of a ``.parquet`` file:

        {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
         "tools": [...]}

    ``tools`` (schemas for the chat template) and the ``tool_calls`` of an assistant's message are
    optional; if they, or the arguments of a call, are strings of JSON, they are decoded. Content in
    parts is joined, and reasoning is found under all common keys, or in parts of content (see
    ``checked_conversation``). A null means that the key is absent, since ``datasets`` writes nulls
    for the keys of other rows; a null argument that is meant is written in arguments as JSON text.
    Other columns are kept. ``"read_from"`` is set to the file and line, such as
    ``"chats.jsonl:17"``; they are also the ``"id"`` of a conversation that has none. All
    conversations are checked when the files are opened, so that no such error occurs in the middle
    of a run.

    Args:
        paths: files, and folders of such files (which are read in the order of their names).
        convert: convert rows in other formats, such as ShareGPT, or a prompt and a completion.
        skip_bad: leave malformed conversations out; their errors are in ``bad``.

    Attributes:
        bad: the errors of the conversations that were left out.
        unread: the keys of messages and parts that are neither trained nor shown to the policy.
        unread_files: the files and folders in the folders that are not read, but for hidden ones.

    Raises:
        ValueError: a path is neither a file of these kinds nor a folder of such files, a file has
            no conversation, or a conversation is malformed or says something that would be lost;
            then the message begins with its file and line.
        ImportError: there are Parquet files, but ``datasets`` is not installed.
    """

    def __init__(
        self, *paths: str | os.PathLike[str], convert: bool = False, skip_bad: bool = False
    ) -> None:
        files = list(itertools.chain.from_iterable(files_in(Path(path)) for path in paths))
        if not files:
            raise ValueError("no files of conversations; pass at least one path")
        self.bad: list[str] = []
        self.unread: set[str] = set()
        self.unread_files = [
            os.path.join(path, name) for path in paths for name in unread_files(Path(path))
        ]
        self._convert = convert
        self._skip_bad = skip_bad
        self._files = [self._open(path) for path in files]
        # For each file, the index after its last conversation.
        self._ends = list(itertools.accumulate(len(rows) for rows in self._files))
        self._digests = file_digests(files)

    def __len__(self) -> int:
        return self._ends[-1]

    def digests(self) -> list[tuple[str, str]]:
        """Return the name of each file and the digest of its bytes when it was opened, in order.

        The streams of ``rollout`` save the digests, and refuse to be restored with other contents.
        """
        return list(self._digests)

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
        try:
            return self._conversation(rows, place - self._ends[number] + len(rows))
        except (ConversationError, OSError) as error:
            self._raise_if_changed(rows, error)
            raise

    def _raise_if_changed(self, rows: LinesOfJSON | RowsOfParquet, error: Exception) -> None:
        """Raise an error that names the file, if it has changed since it was opened."""
        if rows.has_changed():
            raise ValueError(
                f"{rows.path}: the file has been changed or removed since it was opened, so a "
                f"conversation can't be read any more ({error}); restore it, and resume the run"
            ) from error

    def _open(self, path: Path) -> LinesOfJSON | RowsOfParquet:
        rows = open_rows(path)
        good = array("Q")
        first = ""
        for index in range(len(rows)):
            try:
                self._conversation(rows, index, self.unread)
            except ConversationError as error:
                if not self._skip_bad:
                    raise ValueError(str(error)) from None
                first = first or str(error)
                self.bad.append(str(error))
                continue
            good.append(index)
        if not good:
            raise ValueError(f"{path}: no conversation is well-formed; the first: {first}")
        rows.keep(good)
        return rows

    def _conversation(
        self, rows: LinesOfJSON | RowsOfParquet, index: int, unread: set[str] | None = None
    ) -> dict[str, Any]:
        row = rows.read(index)
        place = rows.place(index)
        own = row.get("id") if isinstance(row, Mapping) else None
        own = None if own == "" else own
        named = place if own is None else f"{place} ({own!s:.80})"
        if self._convert:
            row = to_messages(row, named)
        else:
            require_messages(row, named)
        conversation = checked_conversation(row, named, unread=unread)
        if not any(message["role"] == "assistant" for message in conversation["messages"]):
            raise ConversationError(
                f"{named}: no message has the role 'assistant': there is nothing to train"
            )
        return {**conversation, "id": place if own is None else own, "read_from": place}
