"""Files whose names were read from other files, and which must not lead out of their folder."""

from pathlib import Path


def member(folder: Path, name: object, *, may_be_link: bool = False) -> Path:
    """The path of a file that lies directly in ``folder``, by the name that another file gives.

    Whoever can write one file of a folder must not thereby choose which files of the host are read.

    Args:
        folder: of both files.
        name: as it was read.
        may_be_link: whether a symbolic link is accepted, as in the cache of ``huggingface_hub``.

    Raises:
        ValueError: the name has a folder in it, or is that of a symbolic link.
    """
    plain = isinstance(name, str) and "\0" not in name and name not in ("", "..")
    if not plain or Path(str(name)).name != name:
        raise ValueError(f"{name!r} leads out of the folder; expected the name of a file in it")
    path = folder / str(name)
    if path.is_symlink() and not may_be_link:
        raise ValueError(f"{name} is a symbolic link, expected a file")
    return path
