"""Reader of untrusted tar archives, in few and short steps.

``tarfile`` takes quadratic time to read some extended headers (CVE-2024-6232), and never ends where
the size of a member is negative (CVE-2025-8194), in versions of Python that this package supports.
"""

import io
import time
from collections.abc import Iterator
from typing import BinaryIO, Literal

import attrs

Kind = Literal["file", "link", "symbolic link", "folder", "other"]

_BLOCK = 512
_LONGEST_LENGTH = 20  # digits in front of a record of an extended header
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",  # a contiguous file
    b"1": "link",
    b"2": "symbolic link",
    b"5": "folder",
}
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders and pipes
_SPARSE = b"S"
_SPARSE_RECORD = "GNU.sparse."
_KEYS = ("path", "linkpath", "size")
_LONGEST_KEY = 20
_LONGEST_NAME = 1 << 16
# Bytes of a long name, and of an extended header, whose other records are passed over.
_MOST_BYTES = {b"L": _LONGEST_NAME, b"K": _LONGEST_NAME} | dict.fromkeys(
    (b"x", b"X", b"g"), 1 << 20
)
MOST_STEPS = 200_000  # headers, and records of extended headers: one takes less than 10 µs
_STEPS_AT_ONCE = 20
_CHUNK = 1 << 20
_LARGEST = 1 << 50
_LATEST = (1 << 33) - 1  # of octal digits in a header; file systems know later times
_REST_S = 1e-4  # lets the event loop take over, which would otherwise wait for 5 ms


class BadArchive(ValueError):
    """The bytes are not a tar archive, or use a feature that this module does not read."""


class MemberContent:
    """The content of a member, which is read from the archive's file before the next member is."""

    def __init__(self, file: BinaryIO, size: int, at: int) -> None:
        self._file = file
        self._at = at
        self._left = size

    def read(self, most: int = -1) -> bytes:
        """Return the next bytes, at most ``most`` bytes; none at the end.

        Raises:
            BadArchive: the archive is cut off.
        """
        wanted = self._left if most < 0 else min(most, self._left)
        content = self._file.read(wanted)
        if len(content) < wanted:
            raise BadArchive(f"the member at byte {self._at} is cut off")
        self._left -= wanted
        return content

    def skip(self, padding: int) -> None:
        """Pass over the rest, and ``padding`` further bytes."""
        rest = self._left + padding
        self._left = 0
        if rest > _CHUNK and self._file.seekable():
            self._file.seek(rest - 1, io.SEEK_CUR)
            rest = 1
        while rest:
            passed = len(self._file.read(min(rest, _CHUNK)))
            if not passed:
                raise BadArchive(f"the member at byte {self._at} is cut off")
            rest -= passed


@attrs.frozen(kw_only=True)
class ArchiveMember:
    """A member of an archive.

    ``target`` is the name of the member that a hard link refers to, or the target of a symbolic
    link. ``size`` is that of the content in bytes, ``mode`` has the permissions, and ``modified``
    is the time of the last change, in seconds since 1970.
    """

    name: str
    kind: Kind
    target: str
    size: int
    mode: int
    modified: int
    content: MemberContent


class _Steps:
    """Counts the steps of reading an archive, and rests between them."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._count = 0
        self._most = most

    def step(self) -> None:
        self._count += 1
        if self._count > self._most:
            raise BadArchive(f"it has more than {self._most} headers and records")
        if self._count % _STEPS_AT_ONCE == 0:
            time.sleep(_REST_S)


def members(file: BinaryIO, *, most_steps: int = MOST_STEPS) -> Iterator[ArchiveMember]:
    """Yield the members of an archive in the formats of POSIX and of GNU.

    ``file`` is read once, from its current position. The reader rests between its steps, so that
    other threads are not held up.

    Raises:
        BadArchive: the bytes are not such an archive, have a sparse file, or need more than
            ``most_steps`` steps.
    """
    steps = _Steps(most_steps)
    at = 0
    always: dict[str, str] = {}  # the records of global headers
    own: dict[str, str] = {}  # the records for the next member
    while header := file.read(_BLOCK):
        steps.step()
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
        if size > _LARGEST:
            raise BadArchive(f"the member at byte {at} is cut off")
        if size > _MOST_BYTES.get(kind, size):
            raise BadArchive(f"the extended header at byte {at} has {size} bytes")
        content = MemberContent(file, size, at)
        if kind == b"L":
            own["path"] = _text(content.read())
        elif kind == b"K":
            own["linkpath"] = _text(content.read())
        elif kind == b"g":
            always |= _records(content.read(), steps)
        elif kind in b"xX":
            own |= _records(content.read(), steps)
        else:
            if kind == _SPARSE or _SPARSE_RECORD in records:
                raise BadArchive("it has a sparse file")
            yield _member(header, kind, records, size, content)
            own = {}
        content.skip(-size % _BLOCK)
        at += size + -size % _BLOCK
    if at == 0:
        raise BadArchive("it is empty")


def _member(
    header: bytes, kind: bytes, records: dict[str, str], size: int, content: MemberContent
) -> ArchiveMember:
    name = _text(header[:100])
    if kind == b"\0" and name.endswith("/"):  # how the oldest archives write folders
        kind = b"5"
    folder = _text(header[345:500])
    if folder:
        name = f"{folder}/{name}"
    return ArchiveMember(
        name=records.get("path", name),
        kind=_KINDS.get(kind, "other"),
        target=records.get("linkpath", _text(header[157:257])),
        size=size,
        mode=_number(header[100:108]) & 0o7777,
        modified=_time(header[136:148]),
        content=content,
    )


def _records(content: bytes, steps: _Steps) -> dict[str, str]:
    """Return the records of an extended header, each written as ``LENGTH NAME=VALUE\\n``."""
    found = {}
    at = 0
    while at < len(content) and content[at]:
        steps.step()
        space = content.find(b" ", at, at + _LONGEST_LENGTH)
        length = _decimal(_text(content[at : max(at, space)]))
        record = content[space + 1 : at + length]
        name, equals, value = record[:-1].partition(b"=")
        if not record.endswith(b"\n") or not equals or at + length > len(content):
            raise BadArchive("an extended header is malformed")
        key = _text(name[:_LONGEST_KEY])
        # Only these, so that records that nobody needs cost nothing with each further member.
        if key in _KEYS or key.startswith(_SPARSE_RECORD):
            if len(value) > _LONGEST_NAME or b"\0" in value:
                raise BadArchive("a name is too long, or has a zero byte")
            found[key if key in _KEYS else _SPARSE_RECORD] = value.decode(errors="surrogateescape")
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


def _time(field: bytes) -> int:
    """Return a time of a header; 0 for one before 1970, which GNU's tar writes in binary."""
    return 0 if field[0] == 0xFF else min(_number(field), _LATEST)


def _decimal(digits: str) -> int:
    if not digits.isascii() or not digits.isdigit() or len(digits) > _LONGEST_LENGTH:
        raise BadArchive(f"an extended header has the number {digits!r:.40}")
    return int(digits)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")
