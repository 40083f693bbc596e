"""One rank's part of a checkpoint: pieces of tensors, in a safetensors file."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import xxhash
from torch import Tensor

from primerl._common.checkpoint_tensors import TensorLayout
from primerl._common.digests import raw_bytes
from primerl._common.tensor_files import encode_header, read_tensors
from primerl._common.tensor_pieces import TensorPiece

_BLOCK = 1 << 24


@attrs.frozen
class FileRecord:
    """The expected size and digest of a checkpoint's file."""

    size: int
    """Size in bytes."""
    digest: str
    """xxh3_128 in hexadecimal."""


def write_file(path: Path, parts: Iterable[Any]) -> FileRecord:
    """Write bytes to a new file and sync it; return its size and digest."""
    size, digest = 0, xxhash.xxh3_128()
    with path.open("xb") as file:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _BLOCK):  # blocks are digested in the cache
                block = view[start : start + _BLOCK]
                digest.update(block)
                file.write(block)
            size += len(view)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def write_pieces(path: Path, pieces: Sequence[TensorPiece], notes: Mapping[str, str]) -> FileRecord:
    """Write pieces of tensors, and text notes, as a safetensors file.

    A piece is named ``NAME@OFFSET,OFFSET``; the shapes of the whole tensors are in the header.
    """
    values = {f"{p.name}@{','.join(map(str, p.offsets))}": p.values for p in pieces}
    layout = {key: TensorLayout(one.dtype, tuple(one.shape)) for key, one in values.items()}
    shapes = json.dumps({piece.name: list(piece.shape) for piece in pieces})
    header, spans = encode_header(layout, {**notes, "shapes": shapes})
    contents = (raw_bytes(values[key]) for key in spans if values[key].numel())
    return write_file(path, chain([header], contents))


def read_pieces(path: Path) -> tuple[list[TensorPiece], dict[str, str]]:
    """Read the pieces and notes of a file; the pieces' values are memory-mapped."""
    tensors, notes = read_tensors(path)
    try:
        shapes = json.loads(notes.pop("shapes"))
        return [_piece(key, values, shapes) for key, values in tensors.items()], notes
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has a broken header: {error}") from error


def _piece(key: str, values: Tensor, shapes: Mapping[str, Sequence[int]]) -> TensorPiece:
    name, _, offsets = key.rpartition("@")
    return TensorPiece(
        name=name,
        shape=tuple(shapes[name]),
        offsets=tuple(int(offset) for offset in offsets.split(",") if offset),
        values=values,
    )
