"""The base class of Ray actors, whose code travels with them: a host may have another primerl.

This module and the modules of derived classes therefore import primerl only in methods that are
called after ``open``, apart from this module itself.
"""

import socket
import sys
from typing import Any


class HostActor:
    """A Ray actor that uses the modules of its driver, with a name for the lines of its log."""

    what = "actor"

    def __repr__(self) -> str:
        return f"{self.what} on {socket.gethostname()}"  # in front of each line of its log

    async def open(self, path: list[str]) -> tuple[str, str, dict[str, str]]:
        """Look for modules in the folders of the driver first; return host, node and versions."""
        ray: Any = sys.modules["ray"]  # which runs this actor
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        host, node = socket.gethostname(), ray.get_runtime_context().get_node_id()
        try:
            from primerl._common.ray.versions import versions
        except ImportError:  # there is none here, or another release
            return host, node, {}
        return host, node, versions()
