"""A folder of checkpoints: which are whole, which is the last, which may go."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec
import xxhash

from primerl._files import member
from primerl.checkpoint.tensor_file import FileRecord, digest, write_bytes

logger = logging.getLogger(__name__)

FORMAT = 1
SUBFOLDER = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP = re.compile(r"step-([0-9]{8,18})")
_REMAINS = re.compile(rf"{_STEP.pattern}\.(partial|removed)")  # of what was interrupted
_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint consists of."""

    format: int
    step: int
    world_size: int
    files: dict[str, FileRecord]


class State(msgspec.Struct, frozen=True):
    """What rank 0 saves beside tensors."""

    step: int
    optimizer: dict[str, Any]
    schedule: Any
    values: dict[str, Any]
    bytes: dict[str, str]
    """Names of files, by the names of what they hold."""


@attrs.frozen(kw_only=True, eq=False)
class Saved:
    """A checkpoint that was found whole, or the start of a new run: see ``last_good``."""

    folder: Path | None = None
    """Where it is; None for a new run."""
    step: int = 0
    """Policy steps taken when it was saved."""
    world_size: int = 0
    """Ranks that saved it."""
    values: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    """Whatever rank 0 gave ``Checkpoints.save``, in JSON's types or as bytes."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value that was saved under this name, or ``default``."""
        return self.values.get(name, default)


def last_good(folder: str | os.PathLike[str] | None, *, verify: bool = True) -> Saved:
    """The last checkpoint of a run that is whole.

        saved = checkpoint.last_good("runs/mine")
        rollouts = rollout.worker(..., state=saved.get("worker"))

    A checkpoint that is damaged, or lacks a file, is named in a warning, and the one before it is
    taken. It can be called before the ranks connect, by rank 0 alone.

    Args:
        folder: of the run; its ``checkpoints`` are looked at. None for a new run: the result has no
            folder, and step 0.
        verify: whether every file is read and compared with its digest, not its size alone: a few
            seconds for each 10 GB, by one process.

    Raises:
        ValueError: there is no such folder, it has no checkpoint, or none that is whole; the
            message names each, and what is wrong with it. A run that was meant to be resumed never
            starts from step 0.
    """
    if folder is None:
        return Saved()
    inside = Path(folder) / SUBFOLDER
    found = steps(inside)
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
        f"none of the {len(found)} checkpoint(s) in {inside} is whole, so the run cannot be "
        f"resumed ({'; '.join(damages)}). Restore one of these folders from a copy; to train anew "
        "from step 0, choose another run folder"
    )


def _why_none(run: Path, inside: Path) -> str:
    if not run.is_dir():
        return f"there is no folder {run} to resume from; to begin a run there, do not resume"
    remains = sorted(path.name for path in inside.glob("step-*"))
    left = f"; {inside} has only {', '.join(remains)}, of interrupted saves" if remains else ""
    return (
        f"{run} has no checkpoint to resume from (no {inside / 'step-NNNNNNNN'}){left}. If this is "
        "the wrong folder, pass that of the run; to begin a run, do not resume, and choose a "
        "folder that holds none"
    )


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step; not all need be whole."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    match = _STEP.fullmatch(path.name)
    assert match
    return int(match[1])


def folder_name(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """What a rank's tensors are called."""
    return f"rank-{rank:05d}.safetensors"


def _read(path: Path, *, verify: bool) -> Saved:
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        file = member(path, name)
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if file.stat().st_size != record.size:
            raise ValueError(f"{name} has {file.stat().st_size} bytes of {record.size}")
        if verify and digest(file) != record.digest:
            raise ValueError(f"{name} is damaged: its digest is not that of the manifest")
    state = read_state(path, manifest)
    values = dict(state.values)
    values |= {name: member(path, file).read_bytes() for name, file in state.bytes.items()}
    return Saved(folder=path, step=manifest.step, world_size=manifest.world_size, values=values)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ValueError: it is missing, damaged, or of another step.
    """
    if path.is_symlink():
        raise ValueError("it is a symbolic link, expected a folder")
    try:
        whole = json.loads(member(path, MANIFEST).read_bytes())
        content = whole["manifest"]
        damaged = _digest(content) != whole["digest"]
        version = content["format"]
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error!r}") from None
    if damaged:
        raise ValueError(f"{MANIFEST} is damaged")
    if version != FORMAT:
        raise ValueError(f"it has format {version}, expected {FORMAT}")
    try:
        manifest = msgspec.convert(content, type=Manifest)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from None
    if manifest.step != step_of(path):
        raise ValueError(f"{MANIFEST} is of step {manifest.step}")
    ranks = {name for name in manifest.files if name.startswith("rank-")}
    if len(ranks) != manifest.world_size:
        raise ValueError(f"{MANIFEST} has files of {len(ranks)} ranks of {manifest.world_size}")
    if ranks != {rank_file(rank) for rank in range(manifest.world_size)}:
        raise ValueError(f"{MANIFEST} has files of other ranks: {', '.join(sorted(ranks))}")
    return manifest


def read_state(path: Path, manifest: Manifest) -> State:
    """What rank 0 saved beside tensors.

    Raises:
        ValueError: it cannot be read, or names a file that is not in the manifest.
    """
    try:
        # Not msgspec's own decoder, which knows no infinite numbers.
        state = msgspec.convert(json.loads(member(path, STATE).read_bytes()), type=State)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{STATE} cannot be read: {error!r}") from None
    strangers = {STATE, *state.bytes.values()} - manifest.files.keys()
    if strangers:
        raise ValueError(f"{STATE} names {min(strangers)!r}, which is not in {MANIFEST}")
    return state


def rank_files(path: Path, manifest: Manifest) -> list[Path]:
    """Where the tensors of each rank are, in order."""
    return [member(path, rank_file(rank)) for rank in range(manifest.world_size)]


def _digest(manifest: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def encode(state: dict[str, Any], values: Mapping[str, Any]) -> dict[str, bytes]:
    """What rank 0 writes beside tensors: the contents of files, by name.

    Args:
        state: of the training, in JSON's types.
        values: the caller's.

    Raises:
        ValueError: one is neither bytes nor in JSON's types, or its name is no name of a file.
    """
    for name in values:
        if not _VALUE.fullmatch(name):
            raise ValueError(f"a value is named {name!r}; expected letters, digits, '_', '-', '.'")
    files = {f"{name}.bin": value for name, value in values.items() if isinstance(value, bytes)}
    plain = {name: value for name, value in values.items() if not isinstance(value, bytes)}
    binary = {name: f"{name}.bin" for name in values.keys() - plain.keys()}
    try:
        text = json.dumps({**state, "values": plain, "bytes": binary})
    except TypeError as error:
        raise ValueError(
            f"what is saved beside tensors ({', '.join([*state, *plain])}) must be bytes or in "
            f"JSON's types: {error}"
        ) from None
    return {**files, STATE: text.encode()}


def publish(
    partial: Path, target: Path, *, step: int, world_size: int, files: Mapping[str, Any]
) -> None:
    """Make a checkpoint of what lies in ``partial``: the manifest, and then the name."""
    manifest = {"format": FORMAT, "step": step, "world_size": world_size, "files": dict(files)}
    text = json.dumps({"manifest": manifest, "digest": _digest(manifest)}, indent=1)
    write_bytes(partial / MANIFEST, text.encode())
    sync_folder(partial)
    if target.exists():
        remove(target)
    partial.rename(target)
    sync_folder(target.parent)


def retain(folder: Path, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints."""
    for path in _own(steps(folder))[:-keep]:
        remove(path)


def claim(folder: Path, *, resumed: int | None) -> None:
    """Make a folder ready for the checkpoints of a run: new, or resumed after a step.

    What interrupted saves left is removed. Checkpoints of later steps, which are damaged, are
    renamed.

    Raises:
        ValueError: a new run, in a folder that holds checkpoints.
    """
    found = steps(folder)
    if resumed is None and found:
        raise ValueError(
            f"{folder} holds checkpoints already, the last one {found[-1].name}; resume from them "
            "(checkpoint.last_good, and Checkpoints.load before the first save), or choose "
            "another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in _own(folder.glob("step-*")):
        if _REMAINS.fullmatch(path.name):
            shutil.rmtree(path)
    for path in found:
        if resumed is not None and step_of(path) > resumed:
            path.rename(_unused(path.with_name(f"{path.name}.skipped")))


def _own(paths: Iterable[Path]) -> list[Path]:
    """Those that may be removed: folders, but no links to folders."""
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _unused(path: Path) -> Path:
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def remove(path: Path) -> None:
    """Remove a checkpoint; what an interruption leaves does not look like one."""
    doomed = path.with_name(f"{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
