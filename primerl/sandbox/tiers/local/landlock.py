"""The tier ``landlock``: Landlock and seccomp only, for containers that forbid namespaces."""

from primerl.sandbox.results import Isolation
from primerl.sandbox.tiers.local.tier import LocalTier


class Landlock(LocalTier):
    """The tier ``landlock``: each sandbox can write in one host folder, and read listed paths.

    Each job has its own Landlock domain, so its processes can't be signaled by the processes of
    another job of the same session.
    """

    name = "landlock"
    way = "landlock"
    lacks = frozenset({"network", "roots", "images", "snapshots"})
    needs = frozenset({"seccomp filter", "pidfd", "landlock", "landlock of version 6"})

    def isolation(self) -> Isolation:
        """Describe the isolation by Landlock in force."""
        weak = [
            "seeing which files the host has, their sizes and owners (stat)",
            "a bug in the kernel that the allowed system calls reach: the kernel is shared",
            "processor and timing side channels",
            "seeing the host's name, load and uptime",
            "filling the disk for up to 0.1 s, until the watchdog detects it",
            "filling the disk by deleted files that are mapped but not open, which nothing detects",
            "outliving the pool if the keeper process is killed by SIGKILL",
            "high CPU load by all sandboxes together, within their limits",
        ]
        if not self.launcher.separate_users:
            weak.append("using up the process limit of the pool's user, which is counted per user")
        return Isolation(
            tier=self.name,
            shared_kernel=True,
            memory=self.memory(),
            user=self.user(),
            layers=("landlock", "seccomp", "no capabilities", "rlimits"),
            stops=(
                "reading the host's files outside the listed folders, and writing any",
                "network: only socket pairs can be created",
                "signaling and tracing the host's processes and other sandboxes",
                "system calls outside a list of about 230",
                "more processes, files, memory, time and output than allowed",
                "outliving its owner",
            ),
            does_not_stop=tuple(weak),
        )
