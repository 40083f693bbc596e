"""Reader of untrusted tar archives, in time that is linear in their size.

``tarfile`` takes quadratic time to read some extended headers (CVE-2024-6232), and never ends where
the size of a member is negative (CVE-2025-8194), in versions of Python that this package supports.
"""

from collections.abc import Iterator
from typing import Literal

import attrs

Kind = Literal["file", "link", "symbolic link", "other"]

_BLOCK = 512
_LONGEST_LENGTH = 20  # digits in front of a record of an extended header
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",  # a contiguous file
    b"1": "link",
    b"2": "symbolic link",
}
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders and pipes
_SPARSE = b"S"
_SPARSE_RECORD = "GNU.sparse."


class BadArchive(ValueError):
    """The bytes are not a tar archive, or use a feature that this module does not read."""


@attrs.frozen(kw_only=True)
class Member:
    """A member of an archive.

    ``target`` is the name of the member that a hard link refers to, or the target of a symbolic
    link.
    """

    name: str
    kind: Kind
    target: str
    content: bytes
    executable: bool


def members(archive: bytes) -> Iterator[Member]:
    """Yield the members of an archive in the formats of POSIX and of GNU.

    Raises:
        BadArchive: the bytes are not such an archive, or have a sparse file.
    """
    if not archive:
        raise BadArchive("it is empty")
    at = 0
    always: dict[str, str] = {}  # the records of global headers
    own: dict[str, str] = {}  # the records for the next member
    while header := archive[at : at + _BLOCK]:
        if header == bytes(_BLOCK):
            return
        if len(header) < _BLOCK or _checksum(header) != _number(header[148:156]):
            raise BadArchive(f"there is no valid header at byte {at}")
        at += _BLOCK
        kind = header[156:157]
        records = always | own
        size = _number(header[124:136])
        if "size" in records and kind not in b"LKxXg":
            size = _decimal(records["size"])
        if kind in _WITHOUT_CONTENT:
            size = 0
        begin, at = at, at + size + -size % _BLOCK
        if at > len(archive):
            raise BadArchive(f"the member at byte {begin} is cut off")
        content = archive[begin : begin + size]
        if kind == b"L":
            own["path"] = _text(content)
        elif kind == b"K":
            own["linkpath"] = _text(content)
        elif kind == b"g":
            always |= _records(content)
        elif kind in b"xX":
            own |= _records(content)
        else:
            if kind == _SPARSE or any(name.startswith(_SPARSE_RECORD) for name in records):
                raise BadArchive("it has a sparse file")
            yield _member(header, kind, records, content)
            own = {}


def _member(header: bytes, kind: bytes, records: dict[str, str], content: bytes) -> Member:
    name = _text(header[:100])
    if kind == b"\0" and name.endswith("/"):  # how the oldest archives write folders
        kind = b"5"
    folder = _text(header[345:500])
    if folder:
        name = f"{folder}/{name}"
    return Member(
        name=records.get("path", name),
        kind=_KINDS.get(kind, "other"),
        target=records.get("linkpath", _text(header[157:257])),
        content=content,
        executable=bool(_number(header[100:108]) & 0o100),
    )


def _records(content: bytes) -> dict[str, str]:
    """Return the records of an extended header, each written as ``LENGTH NAME=VALUE\\n``."""
    found = {}
    at = 0
    while at < len(content) and content[at]:
        space = content.find(b" ", at, at + _LONGEST_LENGTH)
        length = _decimal(_text(content[at : max(at, space)]))
        record = content[space + 1 : at + length]
        name, equals, value = record[:-1].partition(b"=")
        if not record.endswith(b"\n") or not equals or at + length > len(content):
            raise BadArchive("an extended header is malformed")
        found[_text(name)] = value.decode(errors="surrogateescape")
        at += length
    return found


def _checksum(header: bytes) -> int:
    """Return the sum of a header's bytes, with the checksum's own field as spaces."""
    return sum(header[:148]) + 8 * ord(" ") + sum(header[156:])


def _number(field: bytes) -> int:
    """Return a number of a header: octal digits, or, if it is large, binary digits."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.partition(b"\0")[0].strip() or b"0"
    if not set(digits) <= set(b"01234567"):
        raise BadArchive(f"a header has the number {digits!r}")
    return int(digits, 8)


def _decimal(digits: str) -> int:
    if not digits.isascii() or not digits.isdigit() or len(digits) > _LONGEST_LENGTH:
        raise BadArchive(f"an extended header has the number {digits!r:.40}")
    return int(digits)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")
