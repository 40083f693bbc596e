"""The surroundings that tests and code under test share, as they would in one process.

The code under test gets the tests' environment variables, working folder, ``sys.argv``, levels of
loggers and standard input, but can't change those of the tests. The tests get the output, log
records and warnings of the code under test. Both have the same temporary files.
"""

import base64
import builtins
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any

_MOST_BYTES = 16 << 20  # of files, and of output, in one message
_MOST_FILES = 5000
_MOST_RECORDS = 10_000
_PATH = re.compile(r"(?!(?:.*/)?\.{1,2}(?:/|$))[^/\0]+(?:/[^/\0]+)*")
_NOT_SENT = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION")


def shared_folder() -> str:
    """Create the folder of temporary files, which both sides see, and make it the default one."""
    import tempfile

    folder = os.path.realpath(os.path.join(tempfile.gettempdir(), "shared-files"))
    os.makedirs(folder, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


class _SharedFiles:
    """The files below a folder, as they were when last exchanged."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}

    def changes(self) -> dict[str, str | None]:
        """Return the new content of changed files in base64, "" for folders, None if removed."""
        found: dict[str, Any] = {}
        changed: dict[str, str | None] = {}
        size = 0
        for parent, folders, files in os.walk(self._folder):
            for name in [*folders, *files]:
                path = os.path.join(parent, name)
                state = os.lstat(path)
                relative = os.path.relpath(path, self._folder)
                if name in folders and not os.path.islink(path):
                    found[relative] = "folder"
                elif os.path.isfile(path) and not os.path.islink(path):
                    found[relative] = (state.st_mtime_ns, state.st_size, state.st_ino)
                if relative in found and self._known.get(relative) != found[relative]:
                    size += state.st_size
                    if size > _MOST_BYTES or len(found) > _MOST_FILES:
                        raise OSError(
                            f"the temporary files that changed are too large to exchange: at most "
                            f"{_MOST_BYTES >> 20} MiB and {_MOST_FILES} files"
                        )
                    changed[relative] = _content(path)
        changed |= dict.fromkeys(self._known.keys() - found.keys())
        self._known = found
        return changed

    def apply(self, changed: Any) -> None:
        """Change the files as on the other side; the names and contents are untrusted.

        Raises:
            ValueError: a name leads out of the folder.
        """
        for relative, content in sorted(changed.items(), key=lambda item: item[0]):
            path = os.path.join(self._folder, relative)
            if not _PATH.fullmatch(relative) or os.path.realpath(path) != path:
                raise ValueError("a message holds the name of a file outside the shared folder")
            if content is None:
                _remove(path)
                self._known.pop(relative, None)
            elif content == "/":
                os.makedirs(path, exist_ok=True)
                self._known[relative] = "folder"
            else:
                with open(path, "wb") as file:
                    file.write(base64.b64decode(content))
                state = os.stat(path)
                self._known[relative] = (state.st_mtime_ns, state.st_size, state.st_ino)


def _content(path: str) -> str:
    if os.path.isdir(path):
        return "/"
    with open(path, "rb") as file:
        return base64.b64encode(file.read()).decode()


def _remove(path: str) -> None:
    import shutil

    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)


class OfTests:
    """The surroundings of the tests, which the code under test gets to see."""

    def __init__(self) -> None:
        self._files = _SharedFiles(shared_folder())
        self._sent: dict[str, Any] = {}
        self._warned: list[tuple[Warning, str, int]] = []

    def news(self) -> dict[str, Any]:
        """Return what changed since the last request."""
        import logging

        loggers = logging.root.manager.loggerDict.items()
        now: dict[str, Any] = {
            "environment": {k: v for k, v in os.environ.items() if k not in _NOT_SENT},
            "folder": os.getcwd(),
            "argv": tuple(sys.argv),
            "levels": {"": logging.root.level}
            | {name: one.level for name, one in loggers if isinstance(one, logging.Logger)},
        }
        changed = {name: value for name, value in now.items() if value != self._sent.get(name)}
        if not self._sent:  # only what tests change; both sides have started alike
            changed = {}
        elif "levels" in changed:
            before = self._sent["levels"]
            levels = changed["levels"].items()
            changed["levels"] = {k: v for k, v in levels if before.get(k, 0) != v}
        self._sent = now
        return changed | {"files": self._files.changes()}

    def update(self, message: dict[str, Any], decode: Callable[[Any], Any]) -> None:
        """Show the output, files and log records of the code under test."""
        import logging

        for number, text in message["output"]:
            (sys.stdout if number == 1 else sys.stderr).write(str(text))
        self._files.apply(message["files"])
        for name, level, text, path, line, function, trace in message["records"]:
            logger = logging.getLogger(str(name))
            record = logger.makeRecord(
                str(name), int(level), str(path), int(line), str(text), (), None, str(function)
            )
            record.exc_text = None if trace is None else str(trace)
            logger.handle(record)
        for encoded, path, line in message["warnings"]:
            warning = decode(encoded)
            if not isinstance(warning, Warning):
                raise ValueError("a message holds a malformed warning")
            self._warned.append((warning, str(path), int(line)))

    def warn(self) -> None:
        """Issue the warnings of the code under test, which a filter may turn into exceptions."""
        import warnings

        warned, self._warned = self._warned, []
        for warning, path, line in warned:
            warnings.warn_explicit(warning, None, path, line)

    @staticmethod
    def read_input(name: str, args: list[Any]) -> Any:
        """Read standard input for the code under test.

        Raises:
            ValueError: there is no way of reading with this name.
        """
        if name == "input":
            return builtins.input(*args)
        if name not in ("read", "readline"):
            raise ValueError(f"unknown way to read input: {name!r}")
        return getattr(sys.stdin, name)(*args)


class OfCode:
    """The surroundings of the code under test: those of the tests, and what it tells the tests."""

    def __init__(self, call_test: Callable[..., Any]) -> None:
        self._files = _SharedFiles(shared_folder())
        self._output: list[list[Any]] = []
        self._records: list[list[Any]] = []
        self._warnings: list[tuple[Warning, str, int]] = []
        for number, name in ((1, "stdout"), (2, "stderr")):
            raw: Any = _ForwardedOutput(number, self._output)
            stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        sys.stdin = sys.__stdin__ = _ForwardedInput(call_test)  # type: ignore[assignment,misc]
        builtins.input = lambda *prompt: call_test(do="input", of=None, name="input", args=prompt)
        self._collect()

    def _collect(self) -> None:
        import logging
        import warnings

        handler = logging.Handler()
        handler.emit = self._log  # type: ignore[method-assign]
        logging.root.addHandler(handler)
        warnings.simplefilter("always")
        warnings.showwarning = self._warn  # type: ignore[assignment]

    def _log(self, record: Any) -> None:
        trace = record.exc_text
        if record.exc_info and record.exc_info[0] is not None:
            import traceback

            trace = "".join(traceback.format_exception(*record.exc_info))
        if len(self._records) < _MOST_RECORDS:
            self._records.append(
                [
                    record.name,
                    record.levelno,
                    record.getMessage(),
                    record.pathname,
                    record.lineno,
                    record.funcName,
                    trace,
                ]
            )

    def _warn(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        del category, rest
        if len(self._warnings) < _MOST_RECORDS:
            self._warnings.append((message, filename, lineno))

    def update(self, news: dict[str, Any]) -> None:
        """Make the surroundings as the tests have changed them."""
        import logging

        self._files.apply(news["files"])
        if "environment" in news:
            for name in os.environ.keys() - news["environment"].keys():
                del os.environ[name]
            os.environ.update(news["environment"])
        if "folder" in news and os.path.isdir(news["folder"]):
            os.chdir(news["folder"])
        if "argv" in news:
            sys.argv[:] = news["argv"]
        for name, level in news.get("levels", {}).items():
            logging.getLogger(name or None).setLevel(level)

    def news(self, encode: Callable[[Any], Any]) -> dict[str, Any]:
        """Return what happened since the last message."""
        told = {
            "output": self._output[:],
            "records": self._records[:],
            "warnings": [[encode(one), path, line] for one, path, line in self._warnings],
            "files": self._files.changes(),
        }
        for part in (self._output, self._records, self._warnings):
            part.clear()
        return told


class _ForwardedOutput(io.RawIOBase):
    def __init__(self, number: int, written: list[list[Any]]) -> None:
        self._number, self._written = number, written

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        text = bytes(data).decode(errors="backslashreplace")
        if sum(len(one[1]) for one in self._written[-1000:]) < _MOST_BYTES:
            if self._written and self._written[-1][0] == self._number:
                self._written[-1][1] += text
            else:
                self._written.append([self._number, text])
        return len(data)


class _ForwardedInput(io.TextIOBase):
    def __init__(self, call_test: Callable[..., Any]) -> None:
        self._call_test = call_test

    def readable(self) -> bool:
        return True

    def read(self, *size: Any) -> Any:
        return self._call_test(do="input", of=None, name="read", args=size)

    def readline(self, *size: Any) -> Any:
        return self._call_test(do="input", of=None, name="readline", args=size)
