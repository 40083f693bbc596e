"""What the tiers have in common whose sandboxes another program makes."""

import os

from primerl.sandbox.engine import skeleton
from primerl.sandbox.engine.wrapped import PLACES
from primerl.sandbox.results import Isolation
from primerl.sandbox.tiers.local import LocalTier


class WrappedTier(LocalTier):
    """A program makes namespaces and mounts; our first process inside limits and watches."""

    way = "command"
    lacks = frozenset({"network", "roots"})
    hides = PLACES
    needs = frozenset(
        {
            *("user namespace", "mount namespace", "pid namespace", "network namespace"),
            *("ipc namespace", "uts namespace", "tmpfs in a user namespace", "seccomp filter"),
        }
    )
    program: str

    def beside_places(self) -> list[str]:
        """The readable paths that are in none of the sandbox's own filesystems."""
        below = {path for place in PLACES for path in skeleton.below(place, self.options.readable)}
        return [path for path in self.options.readable if path not in below]

    def in_places(self, folder: str) -> list[tuple[str, str]]:
        """The read-only mounts, in order, as (source, target) pairs in those filesystems.

        A folder that only leads to a readable path is an empty one, made in ``folder``: as a mount
        of its own, it can be neither written nor renamed.
        """
        holders, paths = [], []
        for place in PLACES:
            shown = skeleton.below(place, self.options.readable)
            leading = [entry for entry in skeleton.entries(place, shown) if entry not in shown]
            holders += [(f"{folder}/holders{entry}", entry) for entry in leading]
            paths += [(path, path) for path in shown]
        for path, _ in paths:
            skeleton.make_target(f"{folder}/holders{path}", path)
        for made, _, _ in os.walk(f"{folder}/holders"):
            os.chmod(made, 0o755)  # whatever the umask says
        return holders + paths

    def isolation(self) -> Isolation:
        """See ``Tier``."""
        return Isolation(
            tier=self.name,
            shared_kernel=True,
            memory=self.memory(),
            user=self.user(),
            layers=(f"namespaces (by {self.program})", "seccomp", "no capabilities", "rlimits"),
            stops=(
                "reading and writing the host's files",
                "network: no network",
                "seeing, signalling and tracing the host's processes and other sandboxes",
                "system calls off a list of about 240",
                "more processes, files, memory, time and output than allowed",
                "outliving its owner",
            ),
            does_not_stop=(
                "a bug in the kernel that the allowed system calls reach: the kernel is shared",
                f"a bug in {self.program}",
                "side channels of the processor and of timing",
                "use of processor time by all sandboxes together, within their limits",
                "reading the listed read-only folders, and what /proc says of the host",
            ),
        )
