"""``RemoteFile``, the reading of a published file that is in another host's memory, by TCP."""

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import as_completed
from pathlib import Path
from typing import BinaryIO

import attrs

from primerl._common.files import whole_or_nothing
from primerl._common.tensor_files import ByteMove, moves_between
from primerl._common.threads import BoundedThreads
from primerl.weights.transports.publications.manifests import (
    FileSource,
    PublicationManifest,
    describe,
    timeout_of,
)
from primerl.weights.transports.publications.server import (
    REFUSALS,
    REQUEST,
    SENT,
    left_until,
    shut,
)

_SILENT_S = 60.0  # a host that sends nothing for so long, or does not let connect, is dead
_PIECE = 64 << 20  # bytes of a request
_BUFFER = 1 << 20


class RemoteFile:
    """The tensor file of a publication in the memory of another host.

    Its methods read it in several streams. They raise RuntimeError if that fails, takes longer than
    ``timeout_of`` the bytes, or nothing arrives for 60 s, and OSError if this host has no room.

    Args:
        folder: the folder of the publication's manifest.
        manifest: the manifest, which names the host.
        threads: how many streams read at the same time.
    """

    def __init__(self, folder: Path, manifest: PublicationManifest, *, threads: int) -> None:
        assert manifest.source is not None, "the file is in the folder"
        self._source = manifest.source
        self._name = manifest.file
        self._size = manifest.file_size
        self._threads = threads
        self._what = f"{describe(folder / manifest.file)} of {manifest.source}"

    def copy(self, target: Path) -> None:
        """Read the whole file."""
        with whole_or_nothing(target) as file:
            self._read([ByteMove(0, 0, self._size)], file)

    def copy_without_tensors(self, target: Path) -> None:
        """Read the header into a file of the same size, in which the tensors' bytes are a hole."""
        with whole_or_nothing(target) as file:
            self._read([ByteMove(0, 0, 8)], file)
            length = int.from_bytes(Path(file.name).read_bytes(), "little")
            self._read([ByteMove(8, 8, min(length, self._size - 8))], file)
            file.truncate(self._size)

    def copy_tensors(self, header: Path, target: Path, names: Iterable[str]) -> None:
        """Read tensors into a file that has the same tensors; ``header`` is a file of the header.

        Raises:
            ValueError: a file lacks a tensor, or has it with another dtype or shape.
        """
        with target.open("r+b") as file:
            self._read(moves_between(header, target, names), file)

    def _read(self, moves: Iterable[ByteMove], target: BinaryIO) -> None:
        pieces = deque(_pieces(moves))
        if not pieces:
            return
        size = sum(piece.size for piece in pieces)
        limit_s = timeout_of(size)
        reading = _Streams(self._source, self._name, pieces, target, time.monotonic() + limit_s)
        try:
            reading.run(min(self._threads, len(pieces)))
        except _Broken as error:
            raise RuntimeError(
                f"{self._what} could not be read: {error} "
                f"({size / 1e9:.1f} GB have {limit_s:.0f} s)"
            ) from error


class _Broken(Exception):
    """A connection that failed or was refused, told apart from a failure to write."""


class _Streams:
    """Streams that read pieces of a remote file into a file on this host.

    Args:
        source: the file's host.
        name: the file's name there.
        pieces: what to read; the streams empty it.
        target: the file on this host.
        deadline: when all must have been read.
    """

    def __init__(
        self,
        source: FileSource,
        name: str,
        pieces: deque[ByteMove],
        target: BinaryIO,
        deadline: float,
    ) -> None:
        self._source = source
        self._name = name
        self._pieces = pieces
        self._target = target.fileno()
        self._deadline = deadline
        self._connections: list[socket.socket] = []

    def run(self, streams: int) -> None:
        """Read all pieces; the first failure ends all streams, and is raised."""
        with BoundedThreads(streams) as threads:
            reading = [threads.submit(self._stream) for _ in range(streams)]
            try:
                for stream in as_completed(reading):
                    stream.result()
            except BaseException:
                self._pieces.clear()
                for connection in self._connections:
                    shut(connection)
                raise

    def _stream(self) -> None:
        buffer = memoryview(bytearray(_BUFFER))
        with self._connected() as connection:
            self._connections.append(connection)
            while self._pieces:
                with contextlib.suppress(IndexError):  # another stream has taken the last piece
                    self._receive(connection, self._pieces.popleft(), buffer)

    def _connected(self) -> socket.socket:
        try:
            return socket.create_connection(
                (self._source.host, self._source.port),
                timeout=min(_SILENT_S, left_until(self._deadline)),
            )
        except OSError as error:
            raise _Broken(f"no connection: {error}") from error

    def _receive(self, connection: socket.socket, piece: ByteMove, buffer: memoryview) -> None:
        token = bytes.fromhex(self._source.token)
        asked = REQUEST.pack(token, self._name.encode(), piece.start, piece.size)
        try:
            connection.sendall(asked)
        except OSError as error:
            raise _Broken(str(error)) from error
        answer = self._received(connection, buffer[:1])[0]
        if answer != SENT:
            raise _Broken(REFUSALS.get(answer, "its host does not speak this protocol"))
        place, end = piece.place, piece.place + piece.size
        while place < end:
            received = self._received(connection, buffer[: end - place])
            # Written to the file, not to mapped memory, where a lack of room would end the process.
            while received:
                written = os.pwrite(self._target, received, place)
                received, place = received[written:], place + written

    def _received(self, connection: socket.socket, buffer: memoryview) -> memoryview:
        """Return the bytes that have arrived, at least one and at most as many as fit."""
        try:
            connection.settimeout(min(_SILENT_S, left_until(self._deadline)))
            size = connection.recv_into(buffer)
        except TimeoutError as error:
            if time.monotonic() >= self._deadline:
                raise _Broken("timed out") from error
            raise _Broken(f"its host sent nothing for {_SILENT_S:g} s") from error
        except OSError as error:
            raise _Broken(str(error)) from error
        if not size:
            raise _Broken("its host ended the connection")
        return buffer[:size]


def _pieces(moves: Iterable[ByteMove]) -> Iterator[ByteMove]:
    """Join what is adjacent in both files, and divide the rest into what one request reads."""
    joined: list[ByteMove] = []
    for move in sorted(moves, key=lambda one: one.start):
        if joined and joined[-1].continues_with(move):
            before = joined.pop()
            move = attrs.evolve(before, size=before.size + move.size)
        joined.append(move)
    for move in joined:
        for done in range(0, move.size, _PIECE):
            size = min(_PIECE, move.size - done)
            yield ByteMove(move.start + done, move.place + done, size)
