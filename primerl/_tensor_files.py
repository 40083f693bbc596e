"""Files of named tensors in the safetensors format, written as a stream and mapped in place."""

import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import attrs
import numpy as np
import torch
from torch import Tensor

from primerl._checkpoint_tensors import TensorLayout
from primerl._digests import raw_bytes

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_MAX_HEADER = 1 << 30


@attrs.frozen
class _Span:
    layout: TensorLayout
    start: int
    end: int


@contextmanager
def whole_or_nothing(path: Path, *, spare: Path | None = None) -> Iterator[BinaryIO]:
    """A file that appears under its name when all of it is on the disk.

    With ``spare``, a file that is there and that nobody reads becomes it, with what it holds.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a dead process that had this number
        found = spare is not None and _taken(spare, partial)
        # Made anew: in a shared folder a link may lie there, to a file that is not ours.
        with partial.open("r+b" if found else "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, survives a power failure
    finally:
        os.close(folder)


def _taken(spare: Path, place: Path) -> bool:
    """Move a file, if it is there and nobody holds a lock on it."""
    try:
        with spare.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            spare.rename(place)
            return True
    except OSError:  # not there, held, or no locks here
        return False


def write_tensors(
    path: Path,
    layout: Mapping[str, TensorLayout],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    spare: Path | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a stream of tensors, whose names and shapes are known before, in whatever order.

    Over the file ``spare``, if there is one: memory that a file has is not cleared again.
    ``metadata`` goes into the header.

    Raises:
        ValueError: a tensor is missing, comes twice, or isn't what ``layout`` says.
    """
    spans = _spans(layout)
    entries: dict[str, object] = {
        name: {
            "dtype": _CODES[span.layout.dtype],
            "shape": list(span.layout.shape),
            "data_offsets": [span.start, span.end],
        }
        for name, span in spans.items()
    }
    notes = {"__metadata__": dict(metadata)} if metadata else {}
    header = json.dumps(notes | entries).encode()
    header += b" " * (-len(header) % 8)
    left = dict(spans)
    with whole_or_nothing(path, spare=spare) as file:
        file.truncate(8 + len(header) + max((span.end for span in spans.values()), default=0))
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors:
            span = left.pop(name, None)
            found = TensorLayout(tensor.dtype, tuple(tensor.shape))
            if span is None or span.layout != found:
                raise ValueError(f"{path.name}: {_why_not(name, found, layout)}")
            file.seek(8 + len(header) + span.start)
            file.write(raw_bytes(tensor).data)
        if left:
            raise ValueError(f"{path.name}: not sent: {', '.join(sorted(left)[:5])}")


def _why_not(name: str, found: TensorLayout, layout: Mapping[str, TensorLayout]) -> str:
    if name not in layout:
        return f"{name} is not in the model's layout"
    return (
        f"{name} came twice" if layout[name] == found else f"{name} is {found}, not {layout[name]}"
    )


def _spans(layout: Mapping[str, TensorLayout]) -> dict[str, _Span]:
    """Where each tensor lies: wide elements first, so that all are aligned without a gap."""
    at, spans = 0, {}
    for name, entry in sorted(layout.items(), key=lambda item: -item[1].dtype.itemsize):
        size = math.prod(entry.shape) * entry.dtype.itemsize
        spans[name] = _Span(entry, at, at + size)
        at += size
    return spans


def map_tensors(path: Path, *, writable: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, by name, where they lie in the page cache.

    With ``writable``, what is written into them is written into the file.

    Raises:
        ValueError: the file is no such file, or is cut off; the message names it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path} is truncated or is no safetensors file")
        try:
            header = json.loads(file.read(length))
            entries = {name: _span(e) for name, e in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has a broken header: {error}") from error
    if any(not 0 <= s.start <= s.end <= size - 8 - length for s in entries.values()):
        raise ValueError(f"{path} is truncated: it has {size} bytes")
    # Copy on write: torch wants a writable buffer, and the file stays as it is.
    data = np.memmap(path, mode="r+" if writable else "c", dtype=np.uint8)[8 + length :]
    return {name: as_tensor(data[s.start : s.end], s.layout) for name, s in entries.items()}


def _span(entry: Mapping[str, object]) -> _Span:
    layout = TensorLayout(_DTYPES[str(entry["dtype"])], tuple(entry["shape"]))  # type: ignore[arg-type]
    start, end = entry["data_offsets"]  # type: ignore[misc]
    if end - start != math.prod(layout.shape) * layout.dtype.itemsize:  # type: ignore[has-type]
        raise ValueError(f"{layout} does not fit into {entry['data_offsets']}")
    return _Span(layout, start, end)  # type: ignore[has-type]


def as_tensor(data: np.ndarray, layout: TensorLayout) -> Tensor:
    """Bytes in row-major order as the tensor that they are; not copied."""
    if not data.size:
        return torch.empty(layout.shape, dtype=layout.dtype)
    return torch.from_numpy(data).view(layout.dtype).reshape(layout.shape)
