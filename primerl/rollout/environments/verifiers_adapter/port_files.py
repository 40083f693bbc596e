"""The files in which verifiers' tool servers report their ports, which verifiers leaves behind."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"/tmp/vf-port-[0-9a-f]{32}")


def remove_port_file(path: str) -> None:
    """Remove a port file; a path that can't be verifiers' is left alone."""
    if _NAME.fullmatch(path):
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_port_files(runtime: Any) -> None:
    """Remove the port files of the tool servers that a subprocess runtime runs.

    Verifiers gives the path only to the server, so it is read from the environment variables with
    which the server was started.
    """
    for process in getattr(runtime, "_background", []):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            for variable in variables:
                name, _, value = variable.partition(b"=")
                if name == b"MCP_PORT_FILE":
                    remove_port_file(os.fsdecode(value))
