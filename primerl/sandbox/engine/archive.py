"""Files of a sandbox as one stream, to take a snapshot and to unpack it in another sandbox."""

import os
import tarfile


def pack(paths: list[str]) -> int:
    """Write what is under ``paths`` to stdout; sockets and devices are left out."""
    with (
        open(1, "wb", closefd=False) as stdout,
        tarfile.open(fileobj=stdout, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in paths:
            archive.add(path, arcname=path.lstrip("/") or ".", filter=_wanted)
    return 0


def unpack() -> int:
    """Unpack stdin over ``/``: this process can reach no file outside the sandbox."""
    with (
        open(0, "rb", closefd=False) as stdin,
        tarfile.open(fileobj=stdin, mode="r|") as archive,
    ):
        if hasattr(tarfile, "fully_trusted_filter"):  # links and modes as they were
            archive.extraction_filter = tarfile.fully_trusted_filter
        for member in archive:
            path = f"/{member.name}"
            if member.isdir() and os.path.isdir(path):
                continue
            if os.path.lexists(path) and not os.path.isdir(path):
                os.unlink(path)
            archive.extract(member, "/", set_attrs=True, numeric_owner=True)
    return 0


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if member.isfile() or member.isdir() or member.issym() or member.islnk():
        member.uid = member.gid = os.getuid()
        return member
    return None
