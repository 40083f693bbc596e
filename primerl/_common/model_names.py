"""Names of models: folders, and ids of the Hugging Face hub."""

import os
from pathlib import Path


def require_model(model: str | os.PathLike[str]) -> None:
    """Check that a name is that of a model folder that exists, or could be a hub id.

    Raises:
        ValueError: the name is neither.
    """
    name = os.fspath(model)
    folder = Path(name)
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{name} is not a model folder: it has no config.json")
    elif folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise ValueError(f"there is no model folder {name}; pass a folder or a hub id (org/name)")
