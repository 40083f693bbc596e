"""The parts of a version, which the ranks of a sharded trainer write and commit together."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import msgspec
import torch.distributed as dist

from primerl._common.digests import TensorDigest
from primerl._common.ranks import on_every_rank, on_every_rank_gathering
from primerl.weights.transports.publications.manifests import PublicationManifest, part_name
from primerl.weights.transports.publications.publisher import Publisher


@attrs.frozen(kw_only=True)
class WrittenPart:
    """The part of a version that a rank has written."""

    kind: str
    digest: str
    size: int
    tensors: dict[str, TensorDigest]
    seconds: dict[str, float]


@attrs.frozen(kw_only=True, eq=False)
class PartWriter:
    """Writer of versions by all ranks, each of which writes a part. All ranks call its methods."""

    publisher: Publisher | None
    """This rank's; None if it writes nothing."""
    group: dist.ProcessGroup | None = None
    """A gloo group of all ranks; None without a process group."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return 0 if self.group is None else dist.get_rank()

    def write(
        self,
        version: int,
        prepare: Callable[[Publisher], tuple[PublicationManifest, dict[str, float]]],
        *,
        size: int,
        gathered: Iterable[object] = (),
    ) -> list[WrittenPart | None]:
        """Prepare a version on each rank that writes; return what each has written.

        Args:
            version: the version.
            prepare: has the publisher write this rank's part; returns its manifest, and the
                seconds of each phase.
            size: the bytes for which this rank needs room at most.
            gathered: the collectives in which other ranks take part while a rank writes.

        Raises:
            RuntimeError: a rank could not write its part, such as for lack of room.
        """

        def work() -> Any:
            if self.publisher is None:
                return None
            try:
                manifest, seconds = prepare(self.publisher)
            except OSError as error:
                raise RuntimeError(
                    f"version {version} could not be written into {self.publisher.files}, which "
                    f"needs up to {size / 1e9:.1f} GB for it: {error}"
                ) from error
            part = WrittenPart(
                kind=manifest.kind,
                digest=manifest.digest,
                size=manifest.file_size,
                tensors=manifest.tensors,
                seconds=seconds,
            )
            return msgspec.to_builtins(part)

        what = f"the files of version {version} from all ranks"
        told = on_every_rank_gathering(work, iter(gathered), self.group, what=what)
        return msgspec.convert(told, list[WrittenPart | None])

    def commit(self, written: Sequence[WrittenPart | None]) -> int:
        """Publish what all ranks have written: the parts first, then rank 0's manifest.

        Returns the size of all files in bytes.
        """
        parts = {part_name(rank): one.digest for rank, one in enumerate(written) if rank and one}

        def work(*, first: bool) -> int:
            if self.publisher is None or first is not (self.rank == 0):
                return 0
            return self.publisher.commit(parts=parts if first else {})

        sizes: list[int] = on_every_rank(lambda: work(first=False), self.group)
        sizes += on_every_rank(lambda: work(first=True), self.group)
        return sum(sizes) + sum(one.size for one in written if one)
