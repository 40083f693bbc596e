"""A tier without namespaces, for containers that forbid them: Landlock and the filter alone."""

from primerl.sandbox.results import Isolation
from primerl.sandbox.tiers.local.tier import LocalTier


class Landlock(LocalTier):
    """A folder of the host's for each sandbox, all else out of reach or read-only.

    Each order has a Landlock domain of its own: its processes can't be signalled by those of
    another order of the same session.
    """

    name = "landlock"
    way = "landlock"
    lacks = frozenset({"network", "roots", "snapshots"})
    needs = frozenset({"seccomp filter", "pidfd", "landlock", "landlock of version 6"})

    def isolation(self) -> Isolation:
        """See ``Tier``."""
        own = self.launcher.user != 0
        weak = [
            "seeing which files the host has, their sizes and owners (stat)",
            "a bug in the kernel that the allowed system calls reach: the kernel is shared",
            "side channels of the processor and of timing",
            "seeing the host's name, load and uptime",
            "filling the disk for up to 0.1 s, until the watchdog sees it",
            "filling it by deleted files that stay mapped and not open, which nothing sees",
            "outliving the pool where its keeper is killed by SIGKILL",
            "use of processor time by all sandboxes together, within their limits",
        ]
        if not own:
            weak.append("using up the pool's user's limit of processes: it is kept per user")
        return Isolation(
            tier=self.name,
            shared_kernel=True,
            memory=self.memory(),
            user="for each sandbox one whom no account has" if own else self.user(),
            layers=("landlock", "seccomp", "no capabilities", "rlimits"),
            stops=(
                "reading the host's files, but for the listed folders, and writing any",
                "network: no socket can be made, but pairs",
                "signalling and tracing the host's processes and other sandboxes",
                "system calls off a list of about 230",
                "more processes, files, memory, time and output than allowed",
                "outliving its owner",
            ),
            does_not_stop=tuple(weak),
        )
