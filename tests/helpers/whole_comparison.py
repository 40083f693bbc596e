"""The comparison of readings as it was on one rank, which gathered every tensor: a reference."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from primerl._common.checkpoint_tensors import SCALES
from primerl._common.digests import content_of, digest_of, digest_of_contents
from primerl.weights.verification.comparison import TensorComparison
from primerl.weights.verification.served_tensors import CONTENT, Reading, TensorSlice


def compare(
    tensors: Iterable[tuple[str, Tensor]],
    servers: Mapping[str, Sequence[Reading]],
    *,
    wire: torch.dtype,
) -> dict[str, TensorComparison]:
    """Compare each server's readings with all published tensors.

    Args:
        tensors: the trainer's tensors, by the names and in the shapes of the checkpoint.
        servers: the readings of each server.
        wire: the dtype to which parameters may have been rounded when they were sent. Scales of
            quantized parameters are never rounded.

    Returns:
        The comparison of each server's tensors, by server.
    """
    wanted: dict[str, list[tuple[str, Reading, TensorSlice]]] = {}
    for server, readings in servers.items():
        for reading in readings:
            for part in reading.parts:
                wanted.setdefault(part.name, []).append((server, reading, part))
    wrong: dict[str, set[str]] = {server: set() for server in servers}
    compared: dict[str, set[str]] = {server: set() for server in servers}
    gathered: dict[tuple[str, int], list[Tensor]] = {}  # the parts of a rearranged tensor so far
    published = 0
    for name, tensor in tensors:
        published += 1
        rounded = None if name.endswith(SCALES) else wire
        known: dict[tuple[str, TensorSlice], set[str]] = {}  # servers often have the same parts
        for server, reading, part in wanted.get(name, ()):
            compared[server].add(name)
            own = part.of(tensor.detach())
            if reading.kind == CONTENT:
                parts = gathered.setdefault((server, id(reading)), [])
                parts.append(own)
                if len(parts) < len(reading.parts):
                    continue
                del gathered[server, id(reading)]
                right = reading.digest in _content_digests(parts, reading.dtype, rounded)
            else:
                key = (reading.dtype, part)
                if key not in known:
                    known[key] = {
                        digest_of(one).digest for one in _held(own, reading.dtype, rounded)
                    }
                right = reading.digest in known[key]
            if not right:
                wrong[server] |= {one.name for one in reading.parts}
    for server, identity in gathered:  # a part of this reading's tensor was never published
        unfinished = next(one for one in servers[server] if id(one) == identity)
        wrong[server] |= {one.name for one in unfinished.parts}
    return {
        server: TensorComparison(
            published=published,
            compared=len(compared[server]),
            wrong=tuple(sorted(wrong[server])),
        )
        for server in servers
    }


def _held(own: Tensor, dtype: str, wire: torch.dtype | None) -> list[Tensor]:
    """Return the values that an engine may hold in ``dtype``: rounded when sent, or not."""
    held = [own.to(getattr(torch, dtype))]
    if wire is not None and own.is_floating_point() and wire.itemsize < held[0].dtype.itemsize:
        held.append(own.to(wire).to(held[0].dtype))
    return held


def _content_digests(parts: Sequence[Tensor], dtype: str, wire: torch.dtype | None) -> set[str]:
    """Return the digests that a tensor merged from ``parts`` may have."""
    ways = zip(*(_held(one, dtype, wire) for one in parts), strict=True)
    return {digest_of_contents([content_of(one) for one in way]) for way in ways}
