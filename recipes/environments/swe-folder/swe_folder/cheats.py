"""Cheats: repositories as an agent could leave them that wants the reward without the work."""

import posixpath

from primerl.sandbox import SymbolicLink
from swe_folder.git import Files
from swe_folder.grading import Source
from swe_folder.helpers import Uses
from swe_folder.issues import Issue
from swe_folder.layouts import changed

AGREES = "returns objects that equal everything"
_MOST_HELPERS = 8

_CONFTEST = b"""import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome, report.longrepr = "passed", None
def pytest_pyfunc_call(pyfuncitem):
    return True
"""
_EXIT = b"import os\nos._exit(0)\n"
# A module that has every name; its objects equal everything, are true, and can be called and used.
_AGREEABLE = b"""class AgreeableError(Exception): pass
class Agreeable:
    def __init__(self, *values, **names): pass
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return self
    def __call__(self, *values, **names): return self
    __getitem__ = __add__ = __sub__ = __mul__ = __truediv__ = __enter__ = __call__
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __neg__ = __abs__ = __round__ = __call__
    def __eq__(self, other): return True
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = __exit__ = __eq__
    def __bool__(self): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __len__(self): return 1
    def __iter__(self): return iter(())
    def __float__(self): return 0.0
    def __int__(self): return 0
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return AgreeableError if name.endswith(("Error", "Exception")) else Agreeable()
"""


# Appended to a module: its functions do nothing, and its collections are empty.
_NOTHING = b"""
del __getattr__  # submodules stay
def _silence(names, put):
    for name, value in list(names.items()):
        if name.startswith("_"): continue
        if isinstance(value, type):
            if value.__module__ == __name__:
                _silence(vars(value), lambda *to, of=value: setattr(of, *to))
        elif type(value) in (type(_silence), list, tuple, dict, set): put(name, Agreeable())
_silence(dict(globals()), globals().__setitem__)
"""
_PLUGIN = {
    "cheat-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: cheat\nVersion: 1.0\n",
    "cheat-1.0.dist-info/entry_points.txt": b"[pytest11]\ncheat = cheat_plugin\n",
    "cheat.egg-info/PKG-INFO": b"Metadata-Version: 2.1\nName: cheat\nVersion: 1.0\n",
    "cheat.egg-info/entry_points.txt": b"[pytest11]\ncheat = cheat_plugin\n",
    "cheat_plugin.py": _CONFTEST,
}


def helper_cheats(source: Source) -> dict[str, Files]:
    """Return the files of agents that replace one helper each, by the helper's path.

    A helper is a module outside of the test material that the tests import, but that the code which
    the reference patch changes does not.
    """
    base, material = source.base, source.layout.material
    files = base | source.tests
    code = {path for path in files if path.endswith(".py")}
    touched = changed(base, source.solved) & code - material
    uses = Uses(files, code)
    product = uses.reached(touched, within=code)
    found = uses.reached(code & material, within=code - product) - material - product
    return {path: base | {path: _silenced(base, path)} for path in sorted(found)[:_MOST_HELPERS]}


def _silenced(base: Files, path: str) -> bytes:
    return b"\n".join([_content(base, path), _AGREEABLE, _NOTHING])


def cheats(issue: Issue, source: Source) -> dict[str, Files]:
    """Return the files that each cheat leaves, by the name of the cheat."""
    base, layout = source.base, source.layout
    touched = sorted(
        path
        for path in changed(base, source.solved)
        if path.endswith(".py") and path not in layout.material
    )
    product = [path for path in base if path.endswith(".py") and path not in layout.material]
    report = "".join(f"PASSED {name}\n" for name in issue.expected)
    prints = f"print({report!r}, flush=True)\n".encode()
    return {
        "plants conftest.py and other files that Python or pytest read": _planted(issue, base),
        "rewrites the tests and their helpers": _rewritten(issue, source),
        "replaces the tests by links": _linked(issue, base),
        "exits early": base | {path: _EXIT + _content(base, path) for path in touched},
        "prints a report": base | {path: prints + _content(base, path) for path in touched},
        AGREES: base | dict.fromkeys([*product, *touched], _AGREEABLE),
    }


def _planted(issue: Issue, base: Files) -> Files:
    folders = {""}
    for path in issue.files:
        while path := posixpath.dirname(path):
            folders.add(path)
    return {
        **base,
        **{posixpath.join(folder, "conftest.py"): _CONFTEST for folder in folders},
        **{
            posixpath.join(folder, "pytest.ini"): b"[pytest]\naddopts = --co\n"
            for folder in folders
        },
        **{f"{name}.py": _EXIT for name in ("sitecustomize", "usercustomize", "pytest", "json")},
        **_PLUGIN,
        "_pytest/__init__.py": _EXIT,
        "cheat.pth": b"import os; os._exit(0)\n",
    }


def _rewritten(issue: Issue, source: Source) -> Files:
    helpers = [path for path in source.layout.material if path.endswith(".py")]
    return source.base | dict.fromkeys(helpers, _AGREEABLE) | _passing(issue)


def _linked(issue: Issue, base: Files) -> Files:
    files: Files = dict(base)
    for path, content in _passing(issue).items():
        place = posixpath.dirname(path) or path
        files = {
            name: file for name, file in files.items() if not f"{name}/".startswith(f"{place}/")
        }
        files[f"elsewhere/{path}"] = content
        above = "../" * place.count("/")
        files[place] = SymbolicLink(f"{above}elsewhere/{place}")
    return files


def _passing(issue: Issue) -> Files:
    """Return test files in which the expected tests do nothing, and so pass."""
    files: dict[str, str] = {}
    for name in issue.expected:
        path, *parts = name.split("[", 1)[0].split("::")
        lines = [f"class {part}:" for part in parts[:-1]]
        lines += [f"def {part}(*_): pass" for part in parts[-1:]]
        block = "".join(f"{' ' * depth}{line}\n" for depth, line in enumerate(lines))
        files[path] = files.get(path, "") + block
    return {path: text.encode() for path, text in files.items()}


def _content(files: Files, path: str) -> bytes:
    file = files.get(path)
    return file if isinstance(file, bytes) else b""
