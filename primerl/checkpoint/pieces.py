"""One rank's part of a checkpoint: pieces of tensors in a safetensors file."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import xxhash
from torch import Tensor

from primerl._checkpoint_tensors import TensorLayout
from primerl._digests import raw_bytes
from primerl._tensor_files import encode_header, read_tensors

_BLOCK = 1 << 24


@attrs.frozen(kw_only=True, eq=False)
class Piece:
    """A rectangle of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the rectangle begins in it."""
    values: Tensor


@attrs.frozen
class FileRecord:
    """What a file should hold."""

    size: int
    """In bytes."""
    digest: str
    """xxh3_128, in hexadecimal."""


class DigestingFile:
    """A new file that is digested while it is written, and synced when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: Any) -> None:
        """Append bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BLOCK):  # digested while in the processor's cache
            block = view[start : start + _BLOCK]
            self._digest.update(block)
            self._file.write(block)
        self._size += len(view)

    def close(self) -> FileRecord:
        """What was written, once it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._size, self._digest.hexdigest())


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write a file, and sync it."""
    file = DigestingFile(path)
    file.write(content)
    return file.close()


def write_pieces(path: Path, pieces: Sequence[Piece], notes: Mapping[str, str]) -> FileRecord:
    """Write pieces of tensors, and notes, as a safetensors file.

    A piece is called ``NAME@OFFSET,OFFSET``; the shapes of the whole tensors are in the header.

    Raises:
        ValueError: a tensor's dtype has no name in the format.
    """
    values = {f"{p.name}@{','.join(map(str, p.offsets))}": p.values for p in pieces}
    layout = {key: TensorLayout(one.dtype, tuple(one.shape)) for key, one in values.items()}
    shapes = json.dumps({piece.name: list(piece.shape) for piece in pieces})
    header, spans = encode_header(layout, {**notes, "shapes": shapes})
    file = DigestingFile(path)
    file.write(header)
    for key in spans:
        if values[key].numel():
            file.write(raw_bytes(values[key]))
    return file.close()


def read_pieces(path: Path) -> tuple[list[Piece], dict[str, str]]:
    """The pieces and notes of a file; values lie where the file is in the page cache.

    Raises:
        ValueError: it is no such file, or is truncated; the message names it.
    """
    tensors, notes = read_tensors(path)
    try:
        shapes = json.loads(notes.pop("shapes"))
        return [_piece(key, values, shapes) for key, values in tensors.items()], notes
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has a broken header: {error}") from error


def _piece(key: str, values: Tensor, shapes: Mapping[str, Sequence[int]]) -> Piece:
    name, _, offsets = key.rpartition("@")
    return Piece(
        name=name,
        shape=tuple(shapes[name]),
        offsets=tuple(int(offset) for offset in offsets.split(",") if offset),
        values=values,
    )
