"""pytest's configuration in the files of a repository."""

import configparser
import contextlib
import fnmatch
import posixpath
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from primerl.sandbox import Executable

_FILES = (
    *("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml"),
    *("tox.ini", "setup.cfg"),
)


@attrs.frozen(kw_only=True)
class Configuration:
    """The part of pytest's configuration that says where tests and modules are.

    Attributes:
        patterns: the names of test files (``python_files``).
        folders: the folders of tests (``testpaths``).
        paths: the folders from which modules are imported (``pythonpath``).
    """

    patterns: tuple[str, ...] = ("test_*.py", "*_test.py")
    folders: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @classmethod
    def of(cls, files: Mapping[str, Any]) -> "Configuration":
        """Read the configuration as pytest does: from the first file that has one."""
        for section in _sections(files):
            found = {
                "patterns": _words(section.get("python_files")),
                "folders": _words(section.get("testpaths")),
                "paths": _words(section.get("pythonpath")),
            }
            normal = {
                name: tuple(posixpath.normpath(word) for word in words)
                for name, words in found.items()
                if words
            }
            return cls(**normal)
        return cls()

    def is_test_file(self, path: str) -> bool:
        """Check whether pytest takes a file for a test file, by its name."""
        name = posixpath.basename(path)
        return name == "conftest.py" or any(
            fnmatch.fnmatchcase(path if "/" in pattern else name, pattern)
            for pattern in self.patterns
        )


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return tuple(shlex.split(value))
        return tuple(value.split())
    if isinstance(value, list):
        return tuple(word for word in value if isinstance(word, str))
    return ()


def _sections(files: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the sections with pytest's settings, in pytest's order of the files."""
    for name in _FILES:
        file = files.get(name)
        content = file.content if isinstance(file, Executable) else file
        if not isinstance(content, bytes):
            continue
        text = content.decode(errors="replace")
        section: Any = None
        if name.endswith(".toml"):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                table = tomllib.loads(text)
                for key in ("tool", "pytest") if name == "pyproject.toml" else ("pytest",):
                    table = table.get(key, {}) if isinstance(table, dict) else {}
                section = table.get("ini_options", table) if isinstance(table, dict) else None
        else:
            parser = configparser.RawConfigParser(strict=False)
            with contextlib.suppress(configparser.Error):
                parser.read_string(text)
            key = "tool:pytest" if name == "setup.cfg" else "pytest"
            section = dict(parser[key]) if parser.has_section(key) else None
        if section or (section is not None and name.endswith("pytest.ini")):
            yield section
