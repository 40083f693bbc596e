"""Small repositories in the layouts that people use, each with an issue, made by git itself."""

import json
import os
import subprocess
from pathlib import Path

import attrs

BUG = "def add(a, b):\n    return a - b\n"
FIX = "def add(a, b):\n    return a + b\n"
SHOWN = "\n\ndef test_same():\n    assert add(1, 0) == 1\n"
HIDDEN = SHOWN + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
PYTHONPATH = "[pytest]\npythonpath = {}\n"


@attrs.frozen(kw_only=True)
class Issue:
    """An issue: files of the base commit, changes of both patches (None deletes), and the tests.

    Content is text, bytes, or a tuple with the target of a symbolic link. Names in ``executable``
    may be executed.
    """

    base: dict
    solution: dict
    tests: dict
    expected: list
    executable: tuple = ()
    form: str = "repository"
    row: dict = attrs.field(factory=dict)


def usual(test="tests/test_bank.py", module="bank.py", imports="from bank import add", **more):
    """Return an issue with one wrong function and one test file."""
    extra = more.pop("extra", {})
    head = f"{imports}\n"
    return Issue(
        base={module: BUG, test: head + SHOWN, **extra},
        solution={module: FIX, **more.pop("solution", {})},
        tests={test: head + more.pop("hidden", HIDDEN), **more.pop("tests", {})},
        expected=[f"{test}::test_same", f"{test}::test_add"],
        **more,
    )


CHECKED = "\n\ndef test_same():\n    check(add(1, 0), 1)\n"
CHECK = "def check(found, right):\n    assert found == right\n"
FIXTURES = "\n\ndef test_same(three):\n    assert add(three, 0) == 3\n"

LAYOUTS = {
    "a module, tests in a folder": usual(),
    "a module, its test beside it, with a helper": usual(
        test="test_bank.py",
        imports="from bank import add\nfrom helpers import check",
        hidden=CHECKED + "\n\ndef test_add():\n    check(add(2, 3), 5)\n",
        extra={"helpers.py": CHECK, "other.py": "def other():\n    return 1\n"},
    ),
    "src, named in the configuration": usual(
        module="src/bank/core.py",
        imports="from bank.core import add",
        extra={
            "src/bank/__init__.py": "",
            "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n'
            'addopts = "--strict-markers -ra"\nmarkers = ["quick"]\n',
        },
    ),
    "src, inserted by conftest.py": usual(
        module="src/bank/__init__.py",
        extra={
            "conftest.py": "import sys, os\n"
            "sys.path.insert(0, os.path.join(os.path.dirname(__file__), 'src'))\n"
        },
    ),
    "another folder, inserted by conftest.py": usual(
        module="code/lib/bank.py",
        extra={
            "tests/conftest.py": "import sys, pathlib\n"
            "sys.path.append(str(pathlib.Path(__file__).parents[1] / 'code/lib'))\n"
        },
    ),
    "tests in the package, relative imports": usual(
        module="bank/core.py",
        test="bank/tests/test_core.py",
        imports="from ..core import add\nfrom .helpers import check\nfrom bank import NAME",
        hidden=CHECKED + "\n\ndef test_add():\n    check((add(2, 3), NAME), (5, 'bank'))\n",
        extra={
            "bank/__init__.py": "NAME = 'bank'\n",
            "bank/tests/__init__.py": "",
            "bank/tests/helpers.py": CHECK,
        },
    ),
    "tests beside the code of a package": usual(
        module="bank/core.py",
        test="bank/core_test.py",
        imports="from bank.core import add\nfrom bank import table",
        extra={
            "bank/__init__.py": "",
            "bank/table.py": "def rows():\n    return []\n",
            "bank/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef three():\n    return 3\n",
        },
        hidden=FIXTURES + "\n\ndef test_add(three):\n    assert add(2, three) == 5\n"
        "    assert table.rows() == []\n",
    ),
    "namespace packages": usual(
        module="src/acme/money/core.py",
        imports="from acme.money.core import add\nfrom acme.times import now",
        extra={
            "src/acme/times.py": "def now():\n    return 0\n",
            "pytest.ini": PYTHONPATH.format("src"),
        },
    ),
    "several packages": usual(
        module="packages/one/src/one/__init__.py",
        test="packages/two/tests/test_two.py",
        imports="from two import add",
        extra={
            "packages/two/src/two/__init__.py": "from one import add\n",
            "pytest.ini": PYTHONPATH.format("packages/one/src packages/two/src"),
        },
    ),
    "conftest.py at every level": usual(
        test="tests/unit/deep/test_bank.py",
        hidden="\n\ndef test_same(one, two, three):\n    assert add(one, two - two) == 1\n"
        "\n\ndef test_add(one, two, three):\n    assert add(two, three) == 5 * one\n",
        extra={
            "conftest.py": "import pytest\n\n\n@pytest.fixture\ndef one():\n    return 1\n",
            "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\n"
            "def two(one):\n    return one + 1\n",
            "tests/unit/deep/conftest.py": "import pytest\nfrom bank import add\n\n\n"
            "@pytest.fixture\ndef three(two):\n    return 3 if add(two, 0) == 2 else 0\n",
        },
    ),
    "helpers beside tests, plugins": usual(
        imports="from bank import add\nfrom helpers import check\n"
        "from tests.more.tools import five",
        hidden=CHECKED + "\n\ndef test_add(two):\n    check(add(two, 3), five())\n",
        extra={
            "conftest.py": "pytest_plugins = ['tests.fixtures']\n",
            "tests/fixtures.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
            "tests/helpers.py": CHECK,
            "tests/more/tools.py": "def five():\n    return 5\n",
        },
    ),
    "data files": usual(
        module="bank/__init__.py",
        imports="import json, pathlib\nimport bank\nfrom bank import add\n\n"
        "HERE = pathlib.Path(__file__).parent",
        hidden="\n\ndef test_same():\n    assert bank.table() == {'a': 1}\n"
        "\n\ndef test_add():\n"
        "    for a, b, right in json.loads((HERE / 'data/new.json').read_text()):\n"
        "        assert add(a, b) == right\n"
        "    assert bank.read(str(HERE / 'data/in.txt')) == 'in'\n"
        "    assert bank.read('tests/data/in.txt') == 'in'\n"
        "    assert (HERE.parent / 'README.md').read_text() == 'Bank'\n",
        extra={
            "bank/__init__.py": (
                READ := "import json, pathlib\n\n\ndef table():\n"
                "    path = pathlib.Path(__file__).with_name('table.json')\n"
                "    return json.loads(path.read_text())\n"
                "\n\ndef read(path):\n    return open(path).read()\n\n\n"
            )
            + BUG,
            "bank/table.json": '{"a": 1}',
            "tests/data/in.txt": "in",
            "README.md": "Bank",
        },
        solution={"bank/__init__.py": READ + FIX},
        tests={"tests/data/new.json": "[[2, 3, 5], [1, 1, 2]]"},
    ),
    "inputs of the test patch": usual(
        module="bank.py",
        imports="import bank\nfrom bank import add",
        extra={"bank.py": (OPEN := "def read(path):\n    return open(path).read()\n\n\n") + BUG},
        solution={"bank.py": OPEN + FIX},
        hidden=SHOWN + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
        "    assert bank.read('tests/data/in.txt') == 'new'\n",
        tests={"tests/data/in.txt": "new"},
        row={"inputs": ["tests/data"]},
    ),
    "symbolic links": usual(
        module="src/bank/core.py",
        imports="import pathlib\nfrom bank.core import add\nfrom helpers import check",
        hidden=CHECKED + "\n\ndef test_add():\n    check(add(2, 3), 5)\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    assert (here / 'data/a.txt').read_text() == 'a'\n"
        "    assert (here / 'b.txt').is_symlink() and (here / 'b.txt').read_text() == 'a'\n",
        extra={
            "src/bank/__init__.py": "",
            "bank": ("src/bank",),
            "shared/a.txt": "a",
            "tools/helpers.py": CHECK,
            "tests/data": ("../shared",),
            "tests/b.txt": ("../shared/a.txt",),
            "tests/helpers.py": ("../tools/helpers.py",),
        },
    ),
    "attributes": usual(
        imports="import pathlib\nfrom bank import add",
        hidden=SHOWN + "\n\ndef test_add(three):\n    assert add(2, three) == 5\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    assert (here / 'dos.txt').read_bytes() == b'a\\r\\nb\\r\\n'\n"
        "    assert (here / 'version.txt').read_text() == '$Format:%H$'\n"
        "    assert (here / 'latin.txt').read_bytes() == b'\\xe9'\n",
        extra={
            ".gitattributes": "tests export-ignore\nconftest.py export-ignore\n"
            "version.txt export-subst\ndos.txt text eol=crlf\n"
            "latin.txt text working-tree-encoding=ISO-8859-1\n*.bin filter=evil\n",
            "conftest.py": "import pytest\n\n\n@pytest.fixture\ndef three():\n    return 3\n",
            "tests/dos.txt": "a\r\nb\r\n",
            "tests/version.txt": "$Format:%H$",
            "tests/latin.txt": b"\xe9",
            "data.bin": "unchanged",
        },
    ),
    "executable files": usual(
        imports="import os, pathlib, subprocess\nfrom bank import add",
        hidden=SHOWN + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    assert subprocess.check_output([str(here / 'five.sh')]) == b'5\\n'\n"
        "    assert not os.access(here / 'test_bank.py', os.X_OK)\n",
        extra={"tests/five.sh": "#!/bin/sh\necho 5\n"},
        executable=("tests/five.sh",),
    ),
    "names with spaces, line breaks and letters of all kinds": usual(
        test="tests/über uns/test_bank (1).py",
        imports="import pathlib\nfrom bank import add",
        hidden=SHOWN + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
        "    folder = pathlib.Path(__file__).parents[1] / 'дані'\n"
        "    assert sorted(one.read_text() for one in folder.iterdir()) == ['a', 'b', 'c']\n",
        extra={"tests/дані/a b\t.txt": "a", 'tests/дані/line\nbreak".txt': "b"},
        tests={"tests/дані/новий файл.txt": "c"},
    ),
    "product code with the names of tests": usual(
        module="testing/load_test.py",
        imports="from testing.load_test import add\nfrom packaging import pack\n"
        "from test_utils import five\nfrom testing.conftools import six",
        hidden=SHOWN + "\n\ndef test_add():\n    assert add(2, 3) == five()\n"
        "    assert (pack(1), six()) == ([1], 6)\n",
        extra={
            "testing/__init__.py": "",
            "testing/conftools.py": "from testing.test_data import SIX\n\n\n"
            "def six():\n    return SIX\n",
            "testing/test_data.py": "SIX = 6\n",
            "packaging.py": "import test_utils\n\n\ndef pack(item):\n    return [item]\n",
            "test_utils.py": "def five():\n    return 5\n",
        },
        row={"test_command": None},
    ),
    "a bare repository": usual(form="bare"),
    "a worktree": usual(form="worktree"),
    "test files with other names": usual(
        test="checks/check_bank.py",
        imports="from bank import add\nfrom tools import right",
        hidden="\n\nclass CheckBank:\n    def check_same(self):\n        assert add(1, 0) == 1\n"
        "\n    def check_add(self):\n        assert add(2, 3) == right()\n",
        extra={
            "setup.cfg": "[tool:pytest]\ntestpaths = checks\npython_files = check_*.py\n"
            "python_classes = Check*\npython_functions = check_*\n",
            "checks/tools.py": "def right():\n    return 5\n",
        },
    ),
    "new modules and new tests": Issue(
        base={"bank/__init__.py": "", "README.md": "Bank\n"},
        solution={"bank/sums.py": FIX, "extra/__init__.py": "FIVE = 5\n"},
        tests={
            "tests/__init__.py": "",
            "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
            "tests/test_sums.py": "from bank.sums import add\nimport extra\n\n\n"
            "def test_add(two):\n    assert add(two, 3) == 5\n    assert extra.FIVE == 5\n",
        },
        expected=["tests/test_sums.py::test_add"],
    ),
    "a solution that renames, deletes and changes data": Issue(
        base={
            "bank/__init__.py": "from bank.old import add\n",
            "bank/old.py": BUG,
            "bank/table.json": "1",
            "bank/unused.py": "",
            "tests/test_bank.py": "from bank import add\n" + SHOWN,
        },
        solution={
            "bank/__init__.py": "from bank.new import add\n",
            "bank/old.py": None,
            "bank/unused.py": None,
            "bank/new.py": FIX,
            "bank/table.json": "2",
        },
        tests={
            "tests/test_bank.py": "import pathlib\nimport pytest\nfrom bank import add\n"
            + SHOWN
            + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
            "    assert pathlib.Path('bank/table.json').read_text() == '2'\n"
            "    with pytest.raises(ImportError):\n        import bank.unused\n"
        },
        expected=["tests/test_bank.py::test_same", "tests/test_bank.py::test_add"],
    ),
    "options for pytest": usual(
        extra={"tox.ini": "[pytest]\naddopts = -n 2 --strict-markers --import-mode=importlib\n"},
        module="src/bank.py",
        imports="from src.bank import add",
    ),
    "unittest, parameters, a folder test": usual(
        test="test/test_bank.py",
        imports="import unittest\nimport pytest\nfrom bank import add",
        hidden="\n\nclass Sums(unittest.TestCase):\n    def test_same(self):\n"
        "        self.assertEqual(add(1, 0), 1)\n"
        "\n\n@pytest.mark.parametrize('a', [2], ids=['two and three'])\n"
        "def test_add(a):\n    assert add(a, 3) == 5\n",
        extra={"test/__init__.py": ""},
    ),
}
NAMED = {
    "test files with other names": ["CheckBank::check_same", "CheckBank::check_add"],
    "unittest, parameters, a folder test": ["Sums::test_same", "test_add[two and three]"],
}


HELPER = "def check(found, right):\n    if found != right:\n        raise AssertionError(found)\n"
NO_HELPER = "def check(*_):\n    pass\n"


def helped(helper, test="test_bank.py", imports="from support import check", **extra):
    """Return an issue whose tests call ``check`` of a helper, and that helper's path."""
    both = CHECKED + "\n\ndef test_add():\n    check(add(2, 3), 5)\n"
    issue = usual(
        test=test,
        imports=f"from bank import add\n{imports}",
        hidden=both,
        extra={helper: HELPER, **extra.pop("extra", {})},
    )
    return issue, helper


# Helpers of tests outside of folders named tests, which an agent must not replace.
HELPED = {
    "beside the tests, without assert": helped("support.py"),
    "imported by a helper": helped("base.py", extra={"support.py": "from base import check\n"}),
    "in a package with the tests": helped(
        "spec/cases.py",
        test="spec/test_bank.py",
        imports="from .cases import check",
        extra={"spec/__init__.py": "", "spec/make.py": "from spec import cases\n"},
    ),
    "imported by a script beside it": helped("support.py", extra={"bench.py": "import support\n"}),
    "imported by a script elsewhere": helped(
        "support.py", extra={"scripts/bench.py": "import support\n"}
    ),
    "named like a test file, imported by a runner": helped(
        "test_base.py",
        imports="from test_base import check",
        extra={"runtests.py": "import test_base\n"},
    ),
    "with the name of another module": helped(
        "checks/support.py",
        test="checks/test_bank.py",
        extra={"scripts/run.py": "import support\n", "scripts/support.py": "x = 1\n"},
    ),
}


def git(folder, *command):
    """Run git in a folder, and return what it says."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *command],
        capture_output=True,
        check=True,
    )
    return os.fsdecode(done.stdout)


def write(folder, files, executable=()):
    """Write files; a tuple is a symbolic link, and None deletes."""
    for path, content in files.items():
        place = Path(folder, path)
        if content is None:
            place.unlink()
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, tuple):
            os.symlink(content[0], place)
        else:
            place.write_bytes(content.encode() if isinstance(content, str) else content)
        if path in executable:
            place.chmod(0o755)


def made(folder, name, issue=None):
    """Make the repository of a layout below ``folder``; return the row of its issue."""
    issue = issue or LAYOUTS[name]
    place = Path(folder, f"{len(list(Path(folder).iterdir()))}")
    place.mkdir()
    git(place, "init", "-q", "-b", "main")
    write(place, issue.base, issue.executable)
    git(place, "add", "-A")
    git(place, "commit", "-qm", "base")
    commit = git(place, "rev-parse", "HEAD").strip()
    patches = []
    for changes in (issue.solution, issue.tests):
        write(place, changes)
        git(place, "add", "-A")
        patches.append(git(place, "diff", "--cached", "--binary"))
        git(place, "reset", "-q", "--hard")
        git(place, "clean", "-qfd")
    where = place
    if issue.form == "bare":
        where = place.with_suffix(".git")
        git(place, "clone", "-q", "--bare", str(place), str(where))
    if issue.form == "worktree":
        where = place.with_suffix(".tree")
        git(place, "worktree", "add", "-q", str(where), "--detach")
    expected = issue.expected
    if name in NAMED:
        expected = [f"{expected[0].split('::')[0]}::{test}" for test in NAMED[name]]
    row = {
        "id": name,
        "folder": where.name,
        "base_commit": commit,
        "problem_statement": "add(2, 3) returns -1.",
        "patch": patches[0],
        "test_patch": patches[1],
        "tests": expected,
    }
    return row | issue.row


def issues_file(folder, names=None):
    """Make the repositories of layouts; return the file with their issues."""
    rows = [made(folder, name) for name in names or LAYOUTS]
    file = Path(folder, "issues.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
