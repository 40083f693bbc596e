"""Files of a sandbox as one stream, to take a snapshot and to unpack it in another sandbox."""

import os
import re
import tarfile

_OCTAL = re.compile(rb"\\([0-7]{3})")


def pack(paths: list[str]) -> int:
    """Write what is under ``paths`` to stdout.

    Sockets, devices and read-only mounts, which are the host's, are left out.
    """
    hosts = _read_only_mounts()
    with (
        open(1, "wb", closefd=False) as stdout,
        tarfile.open(fileobj=stdout, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in paths:
            archive.add(
                path, arcname=path.lstrip("/") or ".", filter=lambda member: _wanted(member, hosts)
            )
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


def _read_only_mounts() -> set[str]:
    """Where something is mounted that nothing can be written in."""
    with open("/proc/self/mountinfo", "rb") as file:
        rows = [line.split() for line in file]
    # The kernel writes spaces and their like as octal numbers behind a backslash.
    places = {_OCTAL.sub(_character, row[4]): b"ro" in row[5].split(b",") for row in rows}
    return {os.fsdecode(place) for place, read_only in places.items() if read_only}


def _character(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8)])


def _wanted(member: tarfile.TarInfo, hosts: set[str]) -> tarfile.TarInfo | None:
    if f"/{member.name}" in hosts:
        return None
    if member.isfile() or member.isdir() or member.issym() or member.islnk():
        member.uid = member.gid = os.getuid()
        return member
    return None
