"""What the host and a sandbox's first process say to each other, and where payloads lie.

Orders and replies are single packets of JSON, at most ``LARGEST`` bytes; file descriptors go along.
What an order is about (code, files, arguments) is in a file in memory: the length of a header as
eight bytes, the header as JSON, and the contents of files, one behind the other.
"""

import array
import json
import os
import socket
import struct
from typing import Any, BinaryIO

LARGEST = 16384
MOST_DESCRIPTORS = 5
TURN = struct.Struct("!QB")  # of a REPL: its number, and its exit code once it is over

_LENGTH = struct.Struct("!Q")


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and the descriptors that came with it, or ``b""`` at the end."""
    space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
    flags = socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, received_flags, _ = connection.recvmsg(LARGEST, space, flags)
    except ConnectionError:  # the other end has gone, and left something unread
        return b"", []
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(content) - len(content) % descriptors.itemsize
            descriptors.frombytes(content[:whole])
    if received_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError(f"a message has more than {LARGEST} bytes or too many descriptors")
    return data, list(descriptors)


def packed(header: dict[str, Any], contents: list[bytes]) -> bytes:
    """A header and contents in one piece."""
    encoded = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(encoded)), encoded, *contents])


def payload(header: dict[str, Any], contents: list[bytes]) -> int:
    """The descriptor of a file in memory that holds a header and contents; the caller closes it."""
    descriptor = os.memfd_create("primerl-sandbox", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(packed(header, contents))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_payload(descriptor: int) -> tuple[dict[str, Any], list[bytes]]:
    """The header and contents that ``payload`` has written; closes the descriptor."""
    with open(descriptor, "rb") as file:
        return unpacked(file)


def unpacked(file: BinaryIO) -> tuple[dict[str, Any], list[bytes]]:
    """The header and contents at the start of a file; what follows them isn't read.

    Raises:
        EOFError: the file ends before them.
    """
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    header = json.loads(_exactly(file, length))
    return header, [_exactly(file, size) for size in header["sizes"]]


def _exactly(file: BinaryIO, size: int) -> bytes:
    parts = []
    while size:
        part = file.read(size)
        if not part:
            raise EOFError("an order was cut short")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
