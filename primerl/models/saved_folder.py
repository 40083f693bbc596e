"""A folder that is written whole, in place of an earlier one, and of nothing else."""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@contextmanager
def saved_folder(folder: str | os.PathLike[str], *, marker: str) -> Iterator[Path]:
    """A folder to write into, which gets its name at the end.

    An earlier folder of that name is replaced if it was written so, too. One that holds other files
    beside is renamed to ``NAME.earlier``.

    Args:
        folder: the name.
        marker: a file that every such folder has.

    Raises:
        ValueError: at the beginning: the name is taken by what was not written so.
    """
    target = Path(folder).resolve()
    partial = target.with_name(target.name + ".partial")
    for path in (target, partial):
        _require_own(path, marker)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        raise
    if target.exists():
        _remove(target, {path.name for path in partial.iterdir()})
    partial.rename(target)


def _require_own(path: Path, marker: str) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir() or (any(path.iterdir()) and not (path / marker).is_file()):
        raise ValueError(
            f"{path} exists, and was not saved by this function (it has no {marker}); choose "
            "another folder, or remove it"
        )


def _remove(target: Path, names: set[str]) -> None:
    others = [
        path.name
        for path in target.iterdir()
        if not path.is_file() or not (path.name in names or _SHARD.fullmatch(path.name))
    ]
    if not others:
        shutil.rmtree(target)
        return
    number, earlier = 1, target.with_name(f"{target.name}.earlier")
    while os.path.lexists(earlier):
        number += 1
        earlier = target.with_name(f"{target.name}.earlier-{number}")
    target.rename(earlier)
    logger.warning("%s holds other files (%s); it is %s now", target, ", ".join(others), earlier)
