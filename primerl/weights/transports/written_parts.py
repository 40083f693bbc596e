"""The parts of a version that the ranks of a sharded trainer write, and which ranks write them."""

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from primerl._common.digests import TensorDigest
from primerl._common.ranks import exchange, on_first_rank
from primerl.weights.transports.publications import PublicationManifest


@attrs.frozen(kw_only=True)
class WrittenPart:
    """The part of a version that a rank has written."""

    kind: str
    digest: str
    size: int
    tensors: dict[str, TensorDigest]
    seconds: dict[str, float]

    @classmethod
    def of(cls, manifest: PublicationManifest, seconds: dict[str, float]) -> "WrittenPart":
        """Describe a rank's part by its manifest."""
        return cls(
            kind=manifest.kind,
            digest=manifest.digest,
            size=manifest.file_size,
            tensors=manifest.tensors,
            seconds=seconds,
        )

    def as_builtins(self) -> dict[str, Any]:
        """Return the part as built-in types, for JSON."""
        tensors = {name: [one.dtype, one.shape, one.digest] for name, one in self.tensors.items()}
        return {**attrs.asdict(self, recurse=False), "tensors": tensors}


def parts_of(told: Sequence[dict[str, Any] | None]) -> list[WrittenPart | None]:
    """Return what the ranks have written, from JSON."""
    parts: list[WrittenPart | None] = []
    for one in told:
        if one is None:
            parts.append(None)
            continue
        tensors = {
            name: TensorDigest(dtype, tuple(shape), digest)
            for name, (dtype, shape, digest) in one["tensors"].items()
        }
        parts.append(WrittenPart(**{**one, "tensors": tensors}))
    return parts


def part_name(rank: int) -> str:
    """Return the name of the subfolder of a rank's part."""
    return f"part-{rank:04d}"


def remove_parts(folder: Path, *, kept: Sequence[int]) -> None:
    """Remove the parts of ranks that write no longer, after a run was resumed on fewer."""
    names = {part_name(rank) for rank in kept}
    for path in folder.glob("part-[0-9][0-9][0-9][0-9]"):
        if path.name not in names and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def ranks_that_see(folder: Path, group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks that see a file that rank 0 writes into ``folder``."""
    if group is None:
        return [0]
    mark = folder / f".seen-{on_first_rank(lambda: uuid.uuid4().hex)}"

    def written() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()

    on_first_rank(written)
    seen = exchange(mark.exists(), group)
    on_first_rank(mark.unlink)
    return [rank for rank, one in enumerate(seen) if one]
