"""What takes long says what it does, through Python's logging; ``track.LiveView`` shows it."""

import logging

NAME = "primerl.progress"

_log = logging.getLogger(NAME)


def report(phase: str, detail: str = "") -> None:
    """Say what is done now, such as ``"rollouts"``, and how far it is, such as ``"3/8 groups"``."""
    _log.info("%s", f"{phase}: {detail}" if detail else phase, extra={"phase": phase})
