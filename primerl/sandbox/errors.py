"""Errors of the sandboxes themselves, as opposed to failures of the code inside them."""

import errno as _errno
from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Probe:
    """The result of checking whether this machine supports one requirement of a tier."""

    name: str
    errno: int = 0
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether the check succeeded."""
        return self.errno == 0 and not self.message

    def __str__(self) -> str:
        if self.ok:
            return f"{self.name}: ok"
        name = _errno.errorcode.get(self.errno, "")
        return f"{self.name}: {' '.join(filter(None, [name, self.message]))}"


class SandboxError(RuntimeError):
    """A sandbox could not be created, or does not respond."""


class SandboxUnavailable(SandboxError):
    """This machine lacks a requirement of an isolation tier; ``probes`` has the checks' results."""

    def __init__(self, message: str, probes: Sequence[Probe] = ()) -> None:
        self.probes = tuple(probes)
        failed = [f"  {probe}" for probe in self.probes if not probe.ok]
        super().__init__("\n".join([message, *failed]))


class SandboxNotStarted(SandboxError):
    """The machine lacked the resources to start a sandbox or its job: no untrusted code ran."""


class SandboxLost(SandboxError):
    """The other host of a sandbox was lost, perhaps while code ran in the sandbox."""


class BadReply(SandboxError):
    """A sandbox sent a message that its init process would never send."""
