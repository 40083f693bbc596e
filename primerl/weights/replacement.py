"""A folder that appears whole, in place of an earlier one of its kind."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SHARDS = re.compile(r"model-\d+-of-\d+\.safetensors|model\.safetensors(\.index\.json)?")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``target`` when the body has ended.

    Raises:
        ValueError: ``target`` holds what the new folder does not and no saved model has: it is
            left as it is, and the message says where the new one lies.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a dead process that had this number
    partial.mkdir(parents=True)
    yield partial
    if target.exists():
        _check(target, partial)
        shutil.rmtree(target)
    partial.rename(target)


def _check(target: Path, partial: Path) -> None:
    if target.is_symlink() or not target.is_dir():
        raise ValueError(f"{target} is no folder; the model lies in {partial}")
    known = {path.name for path in partial.iterdir()}
    others = sorted(
        path.name
        for path in target.iterdir()
        if path.name not in known and not _SHARDS.fullmatch(path.name)
    )
    if others:
        raise ValueError(
            f"{target} holds more than a saved model ({', '.join(others[:5])}), so it is not "
            f"replaced; the model lies in {partial}: move one of the two"
        )
