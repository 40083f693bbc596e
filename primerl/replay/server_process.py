"""A context manager that serves the files of a route store from a child process."""

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

from primerl._common.processes import launch
from primerl._common.processes.supervisor import remove_folder
from primerl.replay import file_server

_START_S = 30.0
_STOP_S = 5.0
_ANY_HOST = ("0.0.0.0", "::")
# The server gets its key through a pipe, so it needs no other environment variables.
_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


class SpanServer:
    """A server of byte ranges of a folder's files, in a child process that ends with its owner.

    Args:
        folder: the folder of the files.
        host: the interface to listen on.
        port: the port to listen on; 0 for any free port.
        key: the key that clients have to send.

    Raises:
        RuntimeError: on entering: the server could not be started.
    """

    def __init__(self, folder: Path, *, host: str, port: int, key: str) -> None:
        self._folder = folder
        self._host = host
        self._port = port
        self._key = key
        self._marked = ""  # the marked folder of its supervisors, from launch.make_folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "SpanServer":
        self._marked = launch.make_folder("primerl-server-")
        where = [str(self._folder), self._host, str(self._port)]
        self._process = launch.start(
            [sys.executable, "-I", "-S", file_server.__file__, *where],
            folder=self._marked,
            grace_s=0.0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
        )
        try:
            self._port = self._started_port(self._process)
        except BaseException:
            self._stop(self._process)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._stop(self._process)

    @property
    def address(self) -> str:
        """``http://host:port``, with this host's name if it listens on all interfaces."""
        host = socket.gethostname() if self._host in _ANY_HOST else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def _started_port(self, process: "subprocess.Popen[bytes]") -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(self._key.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading its output below reports that
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        line = process.stdout.readline() if ready else b""
        if not line.strip().isdigit():
            process.terminate()
            reason = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeError(
                f"cannot start the server of routes on {self._host}:{self._port}: "
                f"{reason or f'it did not start within {_START_S:g} s'}"
            )
        return int(line)

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        process.terminate()
        launch.wait_until_over(process, self._marked, timeout_s=_STOP_S)
        remove_folder(self._marked)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
