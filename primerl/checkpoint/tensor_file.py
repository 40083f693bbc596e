"""One rank's part of a checkpoint: pieces of tensors in a safetensors file."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import xxhash
from torch import Tensor

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint32: "U32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_BLOCK = 1 << 24
_MAX_HEADER = 1 << 30


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
    """A new file whose digest is taken while it is written, and which is synced when closed."""

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


def digest(path: Path) -> str:
    """The xxh3_128 of a file."""
    sum_ = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            sum_.update(block)
    return sum_.hexdigest()


def write_pieces(path: Path, pieces: Iterable[Piece], notes: Mapping[str, str]) -> FileRecord:
    """Write pieces of tensors, and notes, as a safetensors file.

    A piece is called ``NAME@OFFSET,OFFSET``; the shapes of the whole tensors are in the header.

    Raises:
        ValueError: a tensor's dtype has no name in the format.
    """
    # Wide elements first, so that all are aligned without a gap.
    ordered = sorted(pieces, key=lambda piece: -piece.values.element_size())
    shapes = {piece.name: list(piece.shape) for piece in ordered}
    header: dict[str, Any] = {"__metadata__": {**notes, "shapes": json.dumps(shapes)}}
    at = 0
    for piece in ordered:
        if piece.values.dtype not in _CODES:
            raise ValueError(f"{piece.name} is {piece.values.dtype}, which cannot be saved")
        end = at + piece.values.numel() * piece.values.element_size()
        header[f"{piece.name}@{','.join(map(str, piece.offsets))}"] = {
            "dtype": _CODES[piece.values.dtype],
            "shape": list(piece.values.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = DigestingFile(path)
    file.write(len(text).to_bytes(8, "little") + text)
    for piece in ordered:
        if piece.values.numel():
            flat = piece.values.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy())
    return file.close()


def read_pieces(path: Path) -> tuple[list[Piece], dict[str, str]]:
    """The pieces and notes of a file; values lie where the file is in the page cache.

    Raises:
        ValueError: it is no such file, or is cut off; the message names it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path} is truncated or is no safetensors file")
        text = file.read(length)
    # Copy on write: torch wants a writable buffer, and the file stays as it is.
    data = np.memmap(path, mode="c", dtype=np.uint8)[8 + length :]
    try:
        header = json.loads(text)
        notes = header.pop("__metadata__")
        shapes = json.loads(notes.pop("shapes"))
        return [_piece(key, entry, shapes, data) for key, entry in header.items()], notes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a broken header: {error}") from error


def _piece(
    key: str, entry: Mapping[str, Any], shapes: Mapping[str, list[int]], data: np.ndarray
) -> Piece:
    name, _, offsets = key.rpartition("@")
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{key} lies outside of the file")
    if start == end:
        values = torch.empty(shape, dtype=dtype)
    else:
        values = torch.from_numpy(data[start:end]).view(dtype).reshape(shape)
    return Piece(
        name=name,
        shape=tuple(shapes[name]),
        offsets=tuple(int(offset) for offset in offsets.split(",") if offset),
        values=values,
    )
