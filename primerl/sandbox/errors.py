"""What goes wrong with sandboxes themselves, as against what goes wrong inside."""

import errno as _errno
from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Probe:
    """One thing that a tier needs, and whether this machine lets it be done."""

    name: str
    errno: int = 0
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether it worked."""
        return self.errno == 0 and not self.message

    def __str__(self) -> str:
        if self.ok:
            return f"{self.name}: ok"
        name = _errno.errorcode.get(self.errno, "")
        return f"{self.name}: {' '.join(filter(None, [name, self.message]))}"


class SandboxError(RuntimeError):
    """A sandbox could not be made, or does not answer."""


class SandboxUnavailable(SandboxError):
    """This machine lacks what a tier of isolation needs; ``probes`` says what failed and how."""

    def __init__(self, message: str, probes: Sequence[Probe] = ()) -> None:
        self.probes = tuple(probes)
        failed = [f"  {probe}" for probe in self.probes if not probe.ok]
        super().__init__("\n".join([message, *failed]))


class BadReply(SandboxError):
    """What came out of a sandbox is not what its first process would say."""
