"""Safetensors files that are written from a stream of tensors and read by memory mapping."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor

from primerl._common.checkpoint_tensors import TensorLayout
from primerl._common.digests import raw_bytes
from primerl._common.files import whole_or_nothing
from primerl._common.threads import BoundedThreads

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint32: "U32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_MAX_HEADER = 1 << 30
_METADATA = "__metadata__"


@attrs.frozen
class ByteSpan:
    """The bytes of a tensor in a file, as offsets after the header."""

    layout: TensorLayout
    start: int
    end: int


def encode_header(
    layout: Mapping[str, TensorLayout], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, ByteSpan]]:
    """Return the header of a file, and the byte span of each tensor after it, in file order.

    Tensors with wide elements come first, so that all are aligned without gaps.

    Raises:
        ValueError: the format has no name for a dtype.
    """
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    start, spans = 0, {}
    for name, entry in sorted(layout.items(), key=lambda item: -item[1].dtype.itemsize):
        if entry.dtype not in _CODES:
            raise ValueError(f"{name} is {entry.dtype}, which safetensors files cannot hold")
        end = start + entry.nbytes
        spans[name] = ByteSpan(entry, start, end)
        entries[name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans


def write_tensors(
    path: Path,
    layout: Mapping[str, TensorLayout],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    spare: Path | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a stream of tensors, in any order, whose names and shapes are known in advance.

    If a file ``spare`` exists, it is overwritten and renamed: the kernel need not clear its pages
    again. ``metadata`` is stored in the header.

    Raises:
        ValueError: a tensor is missing, comes twice, or doesn't match ``layout``.
    """
    header, spans = encode_header(layout, metadata)
    left = dict(spans)
    with whole_or_nothing(path, spare=spare) as file:
        file.truncate(len(header) + max((span.end for span in spans.values()), default=0))
        file.write(header)
        for name, tensor in tensors:
            span = left.pop(name, None)
            found = TensorLayout(tensor.dtype, tuple(tensor.shape))
            if span is None or span.layout != found:
                raise ValueError(f"{path.name}: {_why_not(name, found, layout)}")
            file.seek(len(header) + span.start)
            file.write(raw_bytes(tensor).data)
        if left:
            raise ValueError(f"{path.name}: tensors are missing: {', '.join(sorted(left)[:5])}")


def _why_not(name: str, found: TensorLayout, layout: Mapping[str, TensorLayout]) -> str:
    if name not in layout:
        return f"{name} is not in the model's layout"
    return (
        f"{name} was given twice"
        if layout[name] == found
        else f"{name} is {found}, not {layout[name]}"
    )


@attrs.frozen
class FileHeader:
    """The content of a file's header, and where the tensors' bytes begin."""

    start: int
    spans: dict[str, ByteSpan]
    metadata: dict[str, str]


def read_header(path: Path) -> FileHeader:
    """Read the header of a file.

    Raises:
        ValueError: the file is not a safetensors file, or is truncated; the message names it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path} is truncated, or is not a safetensors file")
        try:
            header = json.loads(file.read(length))
            metadata = dict(header.pop(_METADATA, {}))
            spans = {name: _span(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} has a broken header: {error}") from error
    if any(not 0 <= span.start <= span.end <= size - 8 - length for span in spans.values()):
        raise ValueError(f"{path} is truncated: it has {size} bytes")
    return FileHeader(8 + length, spans, metadata)


def read_tensors(path: Path, *, writable: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file by name, memory-mapped, and the file's metadata.

    With ``writable``, writing to a tensor writes to the file.

    Raises:
        ValueError: the file is not a safetensors file, or is truncated; the message names it.
    """
    header = read_header(path)
    # Copy on write: torch requires a writable buffer, and the file must not change.
    data = np.memmap(path, mode="r+" if writable else "c", dtype=np.uint8)[header.start :]
    tensors = {
        name: as_tensor(data[span.start : span.end], span.layout)
        for name, span in header.spans.items()
    }
    return tensors, header.metadata


def map_tensors(path: Path, *, writable: bool = False) -> dict[str, Tensor]:
    """Return the memory-mapped tensors of a file by name, without its metadata."""
    return read_tensors(path, writable=writable)[0]


def copy_without_tensors(source: Path, target: Path) -> None:
    """Create a file of the same header and size, in which the tensors' bytes are a hole."""
    start = read_header(source).start
    with whole_or_nothing(target) as file:
        with source.open("rb") as reader:
            file.write(reader.read(start))
        file.truncate(source.stat().st_size)


@attrs.frozen
class ByteMove:
    """Bytes of one file and their place in another."""

    start: int
    place: int
    size: int

    def continues_with(self, other: "ByteMove") -> bool:
        """Return whether the bytes of ``other`` follow these bytes in both files."""
        return (other.start, other.place) == (self.start + self.size, self.place + self.size)


def moves_between(source: Path, target: Path, names: Iterable[str]) -> list[ByteMove]:
    """Return where the bytes of tensors are in two files that have the same tensors.

    Raises:
        ValueError: a file lacks a tensor, or has it with another dtype or shape.
    """
    here, there = read_header(source), read_header(target)
    moves = []
    for name in names:
        span, hole = here.spans.get(name), there.spans.get(name)
        if span is None or hole is None or span.layout != hole.layout:
            raise ValueError(f"{source.name} does not fit the version before it: {name}")
        places = here.start + span.start, there.start + hole.start
        moves.append(ByteMove(*places, span.layout.nbytes))
    return moves


def copy_tensors(source: Path, target: Path, names: Iterable[str], *, threads: int) -> None:
    """Copy the bytes of tensors from one file to another that has the same tensors.

    Raises:
        ValueError: a file lacks a tensor, or has it with another dtype or shape.
        OSError: there is no room for the bytes.
    """
    with BoundedThreads(threads) as pool:
        copies = [
            pool.submit(_copy_bytes, source, target, move)
            for move in moves_between(source, target, names)
        ]
    for copy in copies:
        copy.result()


def _copy_bytes(source: Path, target: Path, move: ByteMove) -> None:
    # Written to the file, not to mapped memory, where a lack of room would end the process.
    with source.open("rb") as reader, target.open("r+b") as writer:
        writer.seek(move.place)
        start, end = move.start, move.start + move.size
        while start < end:
            copied = os.sendfile(writer.fileno(), reader.fileno(), start, end - start)
            if not copied:
                raise ValueError(f"{source} is truncated")
            start += copied


class MappedFiles:
    """Tensor files that are mapped before they are needed, and kept mapped until ``forget``.

    Mapping a file of 60,000 tensors takes seconds.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], dict[str, Tensor]]] = {}

    def tensors(self, path: Path) -> dict[str, Tensor]:
        """Return the tensors of a file by name; map it if it is new, was replaced or resized.

        Raises:
            ValueError: the file is not a safetensors file, or is truncated; the message names it.
        """
        status = path.stat()
        identity = (status.st_dev, status.st_ino, status.st_size)
        if path not in self._known or self._known[path][0] != identity:
            self._known[path] = identity, map_tensors(path)
        return self._known[path][1]

    def forget(self) -> None:
        """Drop all files."""
        self._known.clear()


def _span(entry: Mapping[str, object]) -> ByteSpan:
    layout = TensorLayout(_DTYPES[str(entry["dtype"])], tuple(entry["shape"]))  # type: ignore[arg-type]
    start, end = entry["data_offsets"]  # type: ignore[misc]
    if end - start != layout.nbytes:  # type: ignore[has-type]
        raise ValueError(f"{layout} does not fit its data_offsets {entry['data_offsets']}")
    return ByteSpan(layout, start, end)  # type: ignore[has-type]


def as_tensor(data: np.ndarray, layout: TensorLayout) -> Tensor:
    """Interpret row-major bytes as a tensor, without a copy."""
    if not data.size:
        return torch.empty(layout.shape, dtype=layout.dtype)
    return torch.from_numpy(data).view(layout.dtype).reshape(layout.shape)
