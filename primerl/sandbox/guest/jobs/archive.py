"""Snapshots of a sandbox's files as a tar stream, to be unpacked in another sandbox."""

import os
import re
import tarfile

_OCTAL = re.compile(rb"\\([0-7]{3})")


def pack(paths: list[str]) -> int:
    """Write the files under ``paths`` to stdout as a tar stream; return 0, the exit code.

    Sockets and devices are left out, as are read-only mounts, which belong to the host.
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
    """Unpack a tar stream from stdin over ``/``; return 0, the exit code.

    The archive may name any path: this process can't reach files outside the sandbox.
    """
    with (
        open(0, "rb", closefd=False) as stdin,
        tarfile.open(fileobj=stdin, mode="r|") as archive,
    ):
        if hasattr(tarfile, "fully_trusted_filter"):  # keeps links and modes unchanged
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
    """Return the mount points of read-only mounts."""
    with open("/proc/self/mountinfo", "rb") as file:
        rows = [line.split() for line in file]
    # The kernel escapes spaces and similar characters as a backslash and an octal number.
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
