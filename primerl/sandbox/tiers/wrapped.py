"""What the tiers have in common whose sandboxes another program makes."""

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
