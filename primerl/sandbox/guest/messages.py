"""The message and payload formats between the owner and a sandbox's init process.

Requests and replies are single JSON packets of at most ``LARGEST`` bytes, with file descriptors
attached. The payload of a job (code, files, arguments) is in a memfd: the length of the header in
eight bytes, the header as JSON, and the contents of the files, one after another.
"""

import array
import json
import os
import socket
import struct
from typing import Any, BinaryIO

LARGEST = 16384
MOST_DESCRIPTORS = 5
LONGEST_REASON = 500  # bytes of the reason why a job could not be started
TURN = struct.Struct("!QB")  # a REPL turn: its number, and its exit code in the reply

_LENGTH = struct.Struct("!Q")


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one packet with its file descriptors, or ``b""`` if the connection has ended."""
    space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
    flags = socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, received_flags, _ = connection.recvmsg(LARGEST, space, flags)
    except ConnectionError:  # the other end closed with data unread
        return b"", []
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(content) - len(content) % descriptors.itemsize
            descriptors.frombytes(content[:whole])
    if received_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError(f"a message exceeds {LARGEST} bytes or has too many file descriptors")
    return data, list(descriptors)


def packed(header: dict[str, Any], contents: list[bytes]) -> bytes:
    """Serialize a header and file contents as one payload."""
    encoded = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(encoded)), encoded, *contents])


def payload(header: dict[str, Any], contents: list[bytes]) -> int:
    """Write a payload to a memfd; return its file descriptor, which the caller must close."""
    descriptor = os.memfd_create("primerl-sandbox", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(packed(header, []))
        for content in contents:
            file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_payload(descriptor: int) -> tuple[dict[str, Any], list[bytes]]:
    """Read the header and contents that ``payload`` wrote; close the file descriptor."""
    with open(descriptor, "rb") as file:
        return unpacked(file)


def unpacked(file: BinaryIO) -> tuple[dict[str, Any], list[bytes]]:
    """Read a header and contents from a file, which may have more data after them.

    Raises:
        EOFError: the file ends too early.
    """
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    header = json.loads(_exactly(file, length))
    return header, [_exactly(file, size) for size in header["sizes"]]


def _exactly(file: BinaryIO, size: int) -> bytes:
    parts = []
    while size:
        part = file.read(size)
        if not part:
            raise EOFError("the payload of a job ended too early")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
