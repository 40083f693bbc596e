"""The base class of Ray actors, whose code travels with them: a host may have another primerl.

This module and the modules of derived classes therefore import primerl only in methods that are
called after ``open``, apart from this module itself.
"""

import socket
import sys


class HostActor:
    """A Ray actor that uses the modules of its driver, with a name for the lines of its log."""

    what = "actor"

    def __repr__(self) -> str:
        return f"{self.what} on {socket.gethostname()}"  # in front of each line of its log

    async def open(self, path: list[str]) -> tuple[str, dict[str, str]]:
        """Look for modules in the folders of the driver first; return the host and its versions."""
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        try:
            from primerl._common.ray.versions import versions
        except ImportError:  # there is none here, or another release
            return socket.gethostname(), {}
        return socket.gethostname(), versions()
