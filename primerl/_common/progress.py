"""Progress reports of long operations, through Python's logging; shown by ``track.LiveView``."""

import logging

NAME = "primerl.progress"

_log = logging.getLogger(NAME)


def report(phase: str, detail: str = "") -> None:
    """Report the current phase, such as ``"rollouts"``, and progress, such as ``"3/8 groups"``."""
    _log.info("%s", f"{phase}: {detail}" if detail else phase, extra={"phase": phase})
