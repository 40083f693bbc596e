"""Reading of checkpoints: finding the last undamaged one, and its manifest and values."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from primerl._common.digests import digest_of_file
from primerl._common.files import member
from primerl.checkpoint import folders
from primerl.checkpoint.folders import MANIFEST, STATE
from primerl.checkpoint.rank_files import FileRecord

logger = logging.getLogger(__name__)


class CheckpointManifest(msgspec.Struct, frozen=True):
    """The manifest of a checkpoint: its step, number of ranks, and files with digests."""

    format: int
    step: int
    world_size: int
    files: dict[str, FileRecord]


class State(msgspec.Struct, frozen=True):
    """The training state and the caller's values, which rank 0 saves in addition to tensors."""

    step: int
    optimizer: dict[str, Any]
    schedule: Any
    values: dict[str, Any]
    bytes: dict[str, str]
    """Names of the files of values that are bytes, by the values' names."""
    adapter_scales: dict[str, dict[str, int]] | None = None
    """How many layers of each adapter have each scale, which is not among the tensors."""


@attrs.frozen(kw_only=True, eq=False)
class Saved:
    """An undamaged checkpoint, or the start of a new run: see ``last_good``."""

    folder: Path | None = None
    """Folder of the checkpoint; None for a new run."""
    step: int = 0
    """Number of policy steps taken when it was saved."""
    world_size: int = 0
    """Number of ranks that saved it."""
    values: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    """Values that rank 0 gave ``Checkpoints.save``, as bytes or JSON's types."""
    verified: bool = True
    """Whether the digests of the ranks' files were compared; if not, ``Checkpoints.load`` does."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value that was saved under this name, or ``default``."""
        return self.values.get(name, default)


def last_good(folder: str | os.PathLike[str] | None, *, verify: bool = True) -> Saved:
    """Find the last undamaged checkpoint of a run.

        saved = checkpoint.last_good("runs/mine")
        rollouts = rollout.worker(..., state=saved.get("worker"))

    A checkpoint that is damaged or incomplete is skipped with a warning, and the one before it is
    tried. Rank 0 alone can call this, before the ranks connect.

    Args:
        folder: the folder of the run, which holds ``checkpoints``. None for a new run: the result
            has no folder, and step 0.
        verify: read every file and compare its digest, which takes a few seconds per 10 GB, in one
            process. False compares only the sizes of the ranks' files, and ``Checkpoints.load``
            then verifies them on all ranks. Use it for checkpoints of hundreds of GB.

    Raises:
        ValueError: there is no such folder, it has no checkpoint, or all are damaged; the message
            lists each damage. A run that should be resumed never starts from step 0 instead.
    """
    if folder is None:
        return Saved()
    inside = Path(folder) / folders.SUBFOLDER
    found = folders.steps(inside)
    if not found:
        raise ValueError(_why_none(Path(folder), inside))
    damages = []
    for path in reversed(found):
        try:
            saved = _read(path, verify=verify)
        except (ValueError, OSError, RecursionError) as error:
            logger.warning("%s is skipped: %s", path, error)
            damages.append(f"{path.name}: {error}")
            continue
        logger.info("resuming from %s", path)
        return saved
    raise ValueError(
        f"none of the {len(found)} checkpoint(s) in {inside} is undamaged, so the run cannot be "
        f"resumed ({'; '.join(damages)}). Restore one of these folders from a copy; to start again "
        "from step 0, choose another run folder"
    )


def _why_none(run: Path, inside: Path) -> str:
    if not run.is_dir():
        return f"there is no folder {run} to resume from; to start a new run, do not resume"
    remains = sorted(path.name for path in inside.glob("step-*"))
    left = f"; {inside} has only {', '.join(remains)} from interrupted saves" if remains else ""
    return (
        f"{run} has no checkpoint to resume from (no {inside / 'step-NNNNNNNN'}){left}. If this is "
        "the wrong folder, pass the folder of the run; to start a new run, do not resume, and "
        "choose a folder without a run"
    )


def _read(path: Path, *, verify: bool) -> Saved:
    manifest = read_manifest(path)
    ranks = {folders.rank_file(rank) for rank in range(manifest.world_size)}
    for name, record in manifest.files.items():
        file = member(path, name)
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if file.stat().st_size != record.size:
            raise ValueError(f"{name} has {file.stat().st_size} bytes, expected {record.size}")
        if verify or name not in ranks:
            _require_digest(file, record)
    state = read_state(path, manifest)
    values = dict(state.values)
    values |= {name: member(path, file).read_bytes() for name, file in state.bytes.items()}
    return Saved(
        folder=path,
        step=manifest.step,
        world_size=manifest.world_size,
        values=values,
        verified=verify,
    )


def verify_share(path: Path, *, rank: int, world_size: int) -> None:
    """Compare the digests of every ``world_size``-th rank's file, from ``rank`` on.

    Raises:
        ValueError: a file is damaged.
    """
    manifest = read_manifest(path)
    for number in range(rank, manifest.world_size, world_size):
        name = folders.rank_file(number)
        _require_digest(member(path, name), manifest.files[name])


def _require_digest(file: Path, record: FileRecord) -> None:
    if digest_of_file(file) != record.digest:
        raise ValueError(f"{file.name} is damaged: its digest is not the one in the manifest")


def read_manifest(path: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        ValueError: the manifest is missing, damaged, or of another step.
    """
    if path.is_symlink():
        raise ValueError("it is a symbolic link, expected a folder")
    file = member(path, MANIFEST)
    try:
        whole = json.loads(file.read_bytes())
        content = whole["manifest"]
        damaged = folders.manifest_digest(content) != whole["digest"]
        version = content["format"]
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error!r}") from None
    if damaged:
        raise ValueError(f"{MANIFEST} is damaged")
    if version != folders.FORMAT:
        raise ValueError(f"it has format {version}, expected {folders.FORMAT}")
    try:
        manifest = msgspec.convert(content, type=CheckpointManifest)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from None
    if manifest.step != folders.step_of(path):
        raise ValueError(f"{MANIFEST} is of another step, {manifest.step}")
    ranks = {name for name in manifest.files if name.startswith("rank-")}
    if len(ranks) != manifest.world_size:
        raise ValueError(
            f"{MANIFEST} has files of {len(ranks)} ranks, expected {manifest.world_size}"
        )
    if ranks != {folders.rank_file(rank) for rank in range(manifest.world_size)}:
        raise ValueError(
            f"{MANIFEST} has files of ranks that the run did not have: {', '.join(sorted(ranks))}"
        )
    return manifest


def read_state(path: Path, manifest: CheckpointManifest) -> State:
    """Read the training state and values that rank 0 saved beside tensors.

    Raises:
        ValueError: they can't be read, or name a file that is not in the manifest.
    """
    file = member(path, STATE)
    try:
        # json.loads, because msgspec's decoder does not accept infinite numbers.
        state = msgspec.convert(json.loads(file.read_bytes()), type=State)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{STATE} cannot be read: {error!r}") from None
    unknown = {STATE, *state.bytes.values()} - manifest.files.keys()
    if unknown:
        raise ValueError(f"{STATE} names {min(unknown)!r}, which is not in {MANIFEST}")
    return state
