"""The folder of a run's checkpoints: file names, committing a checkpoint, removing old ones."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from primerl._common.files import sync_folder, unused_name
from primerl.checkpoint.rank_files import write_file

FORMAT = 1
SUBFOLDER = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP = re.compile(r"step-([0-9]{8,18})")
_REMAINS = re.compile(rf"{_STEP.pattern}\.(partial|removed)")  # of an interrupted save
_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, in the order of steps; some may be damaged."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's name states."""
    match = _STEP.fullmatch(path.name)
    assert match
    return int(match[1])


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def manifest_digest(manifest: Any) -> str:
    """Compute the digest of a manifest, which is stored in the same file."""
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def encode(state: dict[str, Any], values: Mapping[str, Any]) -> dict[str, bytes]:
    """Encode the training state and the caller's values, which rank 0 writes beside tensors.

    Returns the contents of files, by name.
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
            f"values saved beside tensors ({', '.join([*state, *plain])}) must be bytes or have "
            f"JSON's types: {error}"
        ) from None
    return {**files, STATE: text.encode()}


def publish(
    partial: Path, target: Path, *, step: int, world_size: int, files: Mapping[str, Any]
) -> None:
    """Commit the files in ``partial`` as a checkpoint: write the manifest, then rename."""
    manifest = {"format": FORMAT, "step": step, "world_size": world_size, "files": dict(files)}
    text = json.dumps({"manifest": manifest, "digest": manifest_digest(manifest)}, indent=1)
    write_file(partial / MANIFEST, [text.encode()])
    sync_folder(partial)
    replaced = _set_aside(target) if target.exists() else None
    partial.rename(target)
    sync_folder(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def retain(folder: Path, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints."""
    for path in _own(steps(folder))[:-keep]:
        remove(path)


def claim(folder: Path, *, resumed: int | None) -> None:
    """Prepare a folder for the checkpoints of a run, which is new or resumed after a step.

    Remains of interrupted saves are removed. Checkpoints of later steps, which are damaged, are
    renamed.
    """
    found = steps(folder)
    if resumed is None and found:
        raise ValueError(
            f"{folder} already holds checkpoints, up to {found[-1].name}; resume from them "
            "(checkpoint.last_good, and Checkpoints.load before the first save), or choose "
            "another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in _own(folder.glob("step-*")):
        if _REMAINS.fullmatch(path.name):
            shutil.rmtree(path)
    for path in found:
        if resumed is not None and step_of(path) > resumed:
            skip(path)


def skip(path: Path) -> Path:
    """Rename a damaged checkpoint, and return its new path."""
    return path.rename(unused_name(path.with_name(f"{path.name}.skipped")))


def _own(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that may be removed: folders, but not links to folders."""
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def remove(path: Path) -> None:
    """Remove a checkpoint, renamed first, so that an interruption leaves no partial checkpoint."""
    shutil.rmtree(_set_aside(path))


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside
