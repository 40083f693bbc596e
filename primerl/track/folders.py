"""Where a run is written."""

import os
from pathlib import Path


def fresh_folder(parent: str | os.PathLike[str], name: str) -> Path:
    """Make and return the next free folder ``parent/name-NNN``."""
    parent = Path(parent)
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / f"{name}-{number:03d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
