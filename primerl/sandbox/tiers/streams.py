"""Non-blocking pipes between an event loop and a sandbox, with a limit on the output kept."""

import asyncio
import os
from collections.abc import Callable

_CHUNK = 1 << 16
_PIPE_CHUNKS = 2  # at least the capacity of a pipe
_LARGE = 1 << 20


class Output:
    """The host's end of one output stream, of which at most ``limit`` bytes are kept."""

    def __init__(
        self,
        limit: int,
        on_overflow: Callable[[], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.overflowed = False
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0
        self._on_overflow = on_overflow
        self._on_start = on_start  # called when the first byte arrives
        self._loop = asyncio.get_running_loop()
        self._ours, self.theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._ours, False)
        self._loop.add_reader(self._ours, self._read)
        self._open = True

    def _read(self) -> bool:
        """Read one available chunk; return whether there may be more."""
        try:
            chunk = os.read(self._ours, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._stop()
            return False
        if not self._chunks:
            self._on_start()
        self._chunks.append(chunk[: self._limit - self._size])
        self._size += len(chunk)
        if self._size > self._limit:
            self.overflowed = True
            self._on_overflow()  # before closing, which kills the writer by SIGPIPE
            self.close()
            return False
        return True

    def _stop(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._ours)

    async def finish(self) -> bytes:
        """Return what was written until now, and close this end."""
        for _ in range(_PIPE_CHUNKS):  # what is in the pipe; another process may still write
            if not self._open or not self._read():
                break
        self.close()
        if self._size > _LARGE:  # joined without holding up the event loop
            return await asyncio.to_thread(b"".join, self._chunks)
        return b"".join(self._chunks)

    def close(self) -> None:
        """Close this end."""
        self._stop()
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1


class Input:
    """The host's end of stdin: writes ``content`` as the reader consumes it, then closes."""

    def __init__(self, content: bytes) -> None:
        self._left = memoryview(content)
        self._loop = asyncio.get_running_loop()
        if not content:
            self.theirs = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self._ours = -1
            return
        self.theirs, self._ours = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._ours, False)
        self._loop.add_writer(self._ours, self._write)

    def _write(self) -> None:
        try:
            written = os.write(self._ours, self._left[:_CHUNK])
        except BlockingIOError:
            return
        except OSError:  # the reader is gone
            self.close()
            return
        self._left = self._left[written:]
        if not self._left:
            self.close()

    def close(self) -> None:
        """Close this end."""
        if self._ours >= 0:
            self._loop.remove_writer(self._ours)
            os.close(self._ours)
            self._ours = -1
