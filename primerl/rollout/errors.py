"""Text of exceptions, even if ``__str__`` fails, and their transfer to another process."""

import itertools
import pickle
import sysconfig
import traceback
from pathlib import Path
from typing import Any, TypeAlias

import cloudpickle

import primerl

_MOST_CAUSES = 20

_PACKAGE = str(Path(primerl.__file__).parent)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))

ErrorChain: TypeAlias = list[tuple[bytes | None, str, str]]
"""An exception and its causes, outermost first, each as (pickle, summary, traceback)."""


class EnvironmentFailed(RuntimeError):
    """An environment's own code failed; only the error's ``name`` and text are left."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _failed, (str(self), self.name)


def _failed(message: str, name: str) -> EnvironmentFailed:
    return EnvironmentFailed(message, name=name)


def name_of(error: BaseException) -> str:
    """Return the name under which an error is counted."""
    return error.name if isinstance(error, EnvironmentFailed) else type(error).__name__


def message(error: BaseException) -> str:
    """Return ``str(error)``, or the exception's name if ``__str__`` fails, as user code may."""
    try:
        return str(error)
    except Exception:
        return summary(error)


def summary(error: BaseException) -> str:
    """Return ``Name: message``, the last line of a traceback."""
    return traceback.format_exception_only(error)[0].strip()


def located(error: BaseException) -> str:
    """Return ``summary`` with the line of the user's code that raised the error, or led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [one for one in frames if not one.filename.startswith((_PACKAGE, "<"))]
    own = [one for one in foreign if not one.filename.startswith(_INSTALLED)]
    if not foreign:
        return summary(error)
    frame = (own or foreign)[-1]
    where = f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
    return f"{summary(error)} ({where})"


def describe_error(error: BaseException) -> ErrorChain:
    """Return the exception and its causes in a form that can be sent to another process."""
    chain: ErrorChain = []
    seen: set[int] = set()  # an exception may be its own cause
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _MOST_CAUSES:
        seen.add(id(link))
        text = "".join(traceback.format_exception(link, chain=False))
        chain.append((_pickled(link), summary(link), text))
        link = link.__cause__
    return chain


def rebuild_error(chain: ErrorChain) -> BaseException:
    """Return the exception and its causes, with the other process's tracebacks as notes."""
    errors: list[BaseException] = []
    for content, short, text in chain:
        try:
            error = RuntimeError(short) if content is None else pickle.loads(content)
        except Exception:  # its module may not exist in this process
            error = RuntimeError(short)
        error.add_note(f"in the other process:\n{text}")
        errors.append(error)
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def _pickled(error: BaseException) -> bytes | None:
    """Return the exception's pickle, or None if the pickle can't be dumped or loaded again."""
    if not isinstance(error, Exception):
        return None  # SystemExit and the like would bypass the caller's ``except Exception``
    try:
        content: bytes = cloudpickle.dumps(error)
        str(pickle.loads(content))
    except Exception:  # code of a user's exception may fail in any way
        return None
    return content
