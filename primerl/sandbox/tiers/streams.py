"""Non-blocking pipes between an event loop and a sandbox, with a limit on the output kept."""

import asyncio
import os
from collections.abc import Callable

_CHUNK = 1 << 16


class Output:
    """The host's end of one output stream, of which at most ``limit`` bytes are kept."""

    def __init__(
        self,
        limit: int,
        on_overflow: Callable[[], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.content = bytearray()
        self.overflowed = False
        self._limit = limit
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
        if not self.content:
            self._on_start()
        self.content += chunk
        if len(self.content) > self._limit:
            del self.content[self._limit :]
            self.overflowed = True
            self._on_overflow()  # before closing, which kills the writer by SIGPIPE
            self.close()
            return False
        return True

    def _stop(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._ours)

    def finish(self) -> bytes:
        """Return what was written until now, and close this end."""
        while self._open and self._read():
            pass
        self.close()
        return bytes(self.content)

    def close(self) -> None:
        """Close this end; the content is kept."""
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
