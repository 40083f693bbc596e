"""A folder of checkpoints: which are whole, which is the last, which may go."""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import xxhash

from primerl.checkpoint.tensor_file import digest, write_bytes

logger = logging.getLogger(__name__)

FORMAT = 1
SUBFOLDER = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP = re.compile(r"step-(\d{8,})")
_REMAINS = (".partial", ".removed")  # of saves and removals that were interrupted


@attrs.frozen(kw_only=True, eq=False)
class Saved:
    """A checkpoint that was found whole, or none at all: ``last_good`` returns it."""

    folder: Path | None = None
    """Where it is; None if there is none."""
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
    """The last checkpoint of a run that is whole; one without a folder if there is none.

        saved = checkpoint.last_good("runs/mine")
        rollouts = rollout.worker(..., state=saved.get("worker"))

    A checkpoint that is damaged, or lacks a file, is named in a warning, and the one before it is
    taken. It can be called before the ranks connect, by rank 0 alone.

    Args:
        folder: of the run; its ``checkpoints`` are looked at. None is a run that has none.
        verify: whether every file is read and compared with its digest, not its size alone: a few
            seconds for each 10 GB, by one process.
    """
    if folder is None:
        return Saved()
    for path in reversed(steps(Path(folder) / SUBFOLDER)):
        try:
            saved = _read(path, verify=verify)
        except (ValueError, OSError) as error:
            logger.warning("%s is skipped: %s", path, error)
            continue
        logger.info("going on from %s", path)
        return saved
    logger.warning("%s has no checkpoint; beginning at step 0", folder)
    return Saved()


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
    manifest = _manifest(path)
    for name, record in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if file.stat().st_size != record["size"]:
            raise ValueError(f"{name} has {file.stat().st_size} bytes of {record['size']}")
        if verify and digest(file) != record["digest"]:
            raise ValueError(f"{name} is damaged: its digest is not that of the manifest")
    state = json.loads((path / STATE).read_bytes())
    values = dict(state["values"])
    values |= {name: (path / file).read_bytes() for name, file in state["bytes"].items()}
    return Saved(
        folder=path, step=manifest["step"], world_size=manifest["world_size"], values=values
    )


def _manifest(path: Path) -> dict[str, Any]:
    try:
        whole = json.loads((path / MANIFEST).read_bytes())
        manifest, expected = whole["manifest"], whole["digest"]
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from None
    if _digest(manifest) != expected:
        raise ValueError(f"{MANIFEST} is damaged")
    if manifest["format"] != FORMAT:
        raise ValueError(f"it has format {manifest['format']}, expected {FORMAT}")
    found: dict[str, Any] = manifest
    return found


def _digest(manifest: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def encode(state: dict[str, Any], values: Mapping[str, Any]) -> dict[str, bytes]:
    """What rank 0 writes beside tensors: the contents of files, by name.

    Args:
        state: of the training, in JSON's types.
        values: the caller's.

    Raises:
        ValueError: one is neither bytes nor in JSON's types.
    """
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
    for path in steps(folder)[:-keep]:
        remove(path)


def set_aside_later(folder: Path, step: int) -> None:
    """Rename what a run that goes on from ``step`` leaves behind: what came later is damaged."""
    for path in steps(folder):
        if step_of(path) > step:
            skipped = path.with_name(f"{path.name}.skipped")
            shutil.rmtree(skipped, ignore_errors=True)
            path.rename(skipped)


def remove(path: Path) -> None:
    """Remove a checkpoint; what an interruption leaves does not look like one."""
    doomed = path.with_name(f"{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_remains(folder: Path) -> None:
    """Remove what interrupted saves left."""
    for path in folder.glob("step-*"):
        if path.suffix in _REMAINS:
            shutil.rmtree(path)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
