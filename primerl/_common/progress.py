"""Progress reports of long operations, through Python's logging; shown by ``track.LiveView``."""

import logging

NAME = "primerl.progress"

_log = logging.getLogger(NAME)
_last = ["nothing yet"]


def report(phase: str, detail: str = "") -> None:
    """Report the current phase, such as ``"rollouts"``, and progress, such as ``"3/8 groups"``."""
    _last[0] = f"{phase}: {detail}" if detail else phase
    _log.info("%s", _last[0], extra={"phase": phase})


def last_report() -> str:
    """Return the last report of this process."""
    return _last[0]
