"""Errors of a command line, as one line that only rank 0 prints."""

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

STATUS = 2  # the exit status of argparse and tyro after an error
_WAIT_S = 30.0


def prints() -> bool:
    """Whether this process prints for all: it is rank 0, or not one of several ranks."""
    return os.environ.get("RANK", "0") == "0"


def refuse(message: str) -> NoReturn:
    """End the script with status 2, after one line that rank 0 prints.

    The other ranks wait until torchrun ends them: torchrun ends all ranks as soon as one has
    failed, which could be before rank 0 has printed.
    """
    if prints():
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {message}\n")
    else:
        with contextlib.suppress(KeyboardInterrupt):  # SIGTERM, see track.interruptible
            time.sleep(_WAIT_S)
    raise SystemExit(STATUS)


def parsed(parse: Callable[[], object]) -> object:
    """Return what tyro parses; its errors, which are boxes of several lines, become one line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return parse()
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
    refuse(f"{one_line(errors.getvalue())}; --help lists all flags")


def one_line(box: str) -> str:
    """Return the message of tyro's box in one line, with the flags that it suggests."""
    message, *others = [" ".join(part) for part in _parts(box)] or [""]
    message = re.sub(r"^Error parsing [A-Z]\w*: ", "", message).rstrip(".")
    for part in others:
        if part.startswith("Perhaps you meant"):
            flags = re.findall(r"(?<=\s)--[a-z][\w-]*", part)
            message += f"; perhaps you meant {' or '.join(flags)}"
    return message


def _parts(box: str) -> Iterator[list[str]]:
    """Yield the parts of a box between its rules, without its title."""
    part: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip(" │╭╮╰╯|+")
        if text.strip("─-"):
            part.append(text)
        elif part:
            yield part
            part = []
    if part:
        yield part
