"""swe-folder on repositories as people have them: checkouts, layouts, patches and the check."""

import asyncio
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import attrs
import pytest
from sandboxed import needed, with_pool
from swe_layouts import (
    BUG,
    CHECK,
    FIX,
    HELPED,
    HELPER,
    LAYOUTS,
    NO_HELPER,
    Issue,
    git,
    issues_file,
    made,
    usual,
    write,
)

pytest.importorskip("verifiers")
pytest.importorskip("swe_folder", reason="pip install --no-deps -e recipes/environments/swe-folder")
needed()

from swe_folder import __main__ as command
from swe_folder import checking, grading, layouts, repositories, tasks
from swe_folder.git import committed, names
from swe_folder.issues import read
from swe_folder.patches import without_steering

from primerl.sandbox import Executable, SymbolicLink

PACKAGES = str(Path(pytest.__file__).parents[1])


def repository(folder, files, executable=()):
    """Commit files to a new repository, and return the commit."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    write(folder, files, executable)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    return git(folder, "rev-parse", "HEAD").strip()


# ---- checkouts ----


def test_a_commit_is_read_as_git_checks_it_out(tmp_path):
    files = {
        ".gitattributes": "secret.txt export-ignore\ndos.txt text eol=crlf\nid.txt ident\n",
        "secret.txt": "s",
        "dos.txt": "a\nb\n",
        "id.txt": "$Id$",
        "run": "#!/bin/sh\n",
        "link": ("run",),
        "out": ("/etc/passwd",),
        "дні й\n.txt": "x",
    }
    commit = repository(tmp_path / "a", files, ["run"])
    found = committed(str(tmp_path / "a"), commit[:10])
    assert found.pop("id.txt").startswith(b"$Id: ")
    assert found == {
        ".gitattributes": files[".gitattributes"].encode(),
        "secret.txt": b"s",
        "dos.txt": b"a\r\nb\r\n",
        "run": Executable(b"#!/bin/sh\n"),
        "link": SymbolicLink("run"),
        "out": SymbolicLink("/etc/passwd"),
        "дні й\n.txt": b"x",
    }


def test_no_program_of_a_repository_runs(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    commit = repository(folder, {".gitattributes": "*.py filter=evil diff=evil\n", "a.py": "1\n"})
    program = tmp_path / "evil"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    program.chmod(0o755)
    for name in ("filter.evil.smudge", "filter.evil.clean", "filter.evil.process"):
        git(folder, "config", name, str(program))
    for name in ("core.fsmonitor", "core.sshCommand", "diff.evil.textconv", "core.pager"):
        git(folder, "config", name, str(program))
    git(folder, "config", "filter.evil.required", "true")
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        (folder / ".git/hooks" / hook).write_text(program.read_text())
        (folder / ".git/hooks" / hook).chmod(0o755)
    # Not even the user's own programs: a run may not depend on them.
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.gitconfig").write_text(f'[filter "evil"]\nsmudge = {program}\n')
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    patch = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-1\n+2\n"
    assert committed(str(folder), commit)["a.py"] == b"1\n"
    assert committed(str(folder), commit, patch)["a.py"] == b"2\n"
    assert names(patch) == [("a.py", "a.py")]
    assert not (tmp_path / "ran").exists()


def test_patches_are_applied_by_git(tmp_path):
    commit = repository(tmp_path / "a", {"a": "1\n2\n3\n", "b": "b\n", "t/c": "c\n"}, ["b"])
    where = str(tmp_path / "a")
    patch = (
        "diff --git a/a b/new name\nsimilarity index 100%\nrename from a\nrename to new name\n"
        "diff --git a/b b/b\nold mode 100755\nnew mode 100644\n"
        "diff --git a/t/c b/t/c\ndeleted file mode 100644\n--- a/t/c\n+++ /dev/null\n"
        "@@ -1 +0,0 @@\n-c\n"
        "diff --git a/t b/t\nnew file mode 120000\n--- /dev/null\n+++ b/t\n"
        "@@ -0,0 +1 @@\n+b\n\\ No newline at end of file"
    )
    assert committed(where, commit, patch) == {
        "b": b"b\n",
        "new name": b"1\n2\n3\n",
        "t": SymbolicLink("b"),
    }
    for bad in ("--- a/z\n+++ b/z\n@@ -1 +1 @@\n-q\n+r\n", "nothing", patch.replace("t/c", "../c")):
        with pytest.raises(ValueError, match="the patch does not apply: "):
            committed(where, commit, bad)


def test_what_cannot_be_read_is_named(tmp_path):
    commit = repository(tmp_path / "a", {"a": "1"})
    with pytest.raises(ValueError, match=r"a at 123456: git finds no such commit"):
        committed(str(tmp_path / "a"), "123456")
    with pytest.raises(ValueError, match="does not begin with '-'"):
        committed(str(tmp_path / "a"), "--help")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    large = repository(tmp_path / "large", {"data/model.bin": pointer})
    with pytest.raises(ValueError, match=r"the Git LFS pointer data/model\.bin instead of a file"):
        committed(str(tmp_path / "large"), large)
    inside = tmp_path / "outer"
    repository(inside, {"a": "1"})
    git(
        inside,
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "add",
        "-q",
        str(tmp_path / "a"),
        "x/s",
    )
    git(inside, "commit", "-qm", "with a submodule")
    with pytest.raises(ValueError, match=r"has submodules, which are not supported: x/s; commit"):
        committed(str(inside), "HEAD")
    (tmp_path / "outer/plain").mkdir()  # a folder in a repository is not one itself
    with pytest.raises(ValueError, match="not a git repository"):
        committed(str(inside / "plain"), commit)


# ---- layouts ----


def layout_of(name, folder):
    [issue] = read(issues_file(folder, [name]))
    return issue, grading.source(issue, (PACKAGES,))


LAYOUT_CASES = {
    "src, named in the configuration": (
        ("bank",),
        ("src",),
        {"pyproject.toml", "tests/test_bank.py"},
    ),
    "another folder, inserted by conftest.py": (
        ("bank",),
        ("code/lib",),
        {"tests/conftest.py", "tests/test_bank.py"},
    ),
    "tests in the package, relative imports": (
        ("bank",),
        (),
        {f"bank/tests/{name}.py" for name in ("__init__", "helpers", "test_core")},
    ),
    "several packages": (
        ("one", "two"),
        ("packages/one/src", "packages/two/src"),
        {"pytest.ini", "packages/two/tests/test_two.py"},
    ),
    "a module, its test beside it, with a helper": (
        ("bank", "other"),
        (),
        {"helpers.py", "test_bank.py"},
    ),
    "product code with the names of tests": (
        ("packaging", "test_utils", "testing"),
        (),
        {"tests/test_bank.py"},
    ),
    "test files with other names": (
        ("bank",),
        (),
        {"setup.cfg", "checks/check_bank.py", "checks/tools.py"},
    ),
}


@pytest.mark.parametrize("name", LAYOUT_CASES)
def test_layouts(tmp_path, name):
    modules, paths, material = LAYOUT_CASES[name]
    _, source = layout_of(name, tmp_path)
    assert source.layout.material == material
    # A folder that is on the way to modules is a namespace package of its own.
    assert {*source.layout.modules} - {"src", "packages", "code"} == {*modules}
    assert source.layout.paths == paths


def test_what_the_reference_patch_changes_is_no_test_by_its_name(tmp_path):
    """The same names are test material or product, depending on what the repository does."""
    row = made(tmp_path, "", usual(extra={"bank_test.py": "def test_one():\n    pass\n"}))
    row["patch"] = "--- a/bank_test.py\n+++ b/bank_test.py\n@@ -1,2 +1 @@\n-def test_one():\n"
    row["patch"] += "-    pass\n+x = 1\n"
    file = tmp_path / "issues.jsonl"
    file.write_text(json.dumps(row) + "\n")
    [changed] = read(file)
    assert "bank_test.py" not in grading.source(changed, ()).layout.material
    assert "bank_test.py" in grading.source(attrs.evolve(changed, patch=""), ()).layout.material


def test_the_sandboxes_get_what_is_theirs(tmp_path):
    _, source = layout_of("a solution that renames, deletes and changes data", tmp_path)
    layout = source.layout
    agents = source.base | {
        "bank/table.json": b"3",
        "tests/test_bank.py": b"agent's",
        "conftest.py": b"agent's",
        "bank/new.py": b"agent's",
        "bank/data/pytest.ini": b"agent's",
    }
    suite = repositories.suite(layout, changed=agents, tests=source.tests)
    assert suite == {
        "tests/test_bank.py": source.tests["tests/test_bank.py"],
        "bank/table.json": b"3",  # the reference patch changes it: it is no test's own
    }
    code = repositories.code_under_test(layout, base=source.base, changed=agents)
    assert code["bank/new.py"] == b"agent's"
    assert code["tests/test_bank.py"] == source.base["tests/test_bank.py"]  # not the hidden tests
    assert not {"conftest.py", "bank/data/pytest.ini"} & {*code}
    # An agent that links a data file to a test, or puts a folder in its place, changes nothing.
    for odd in ({"bank/table.json": SymbolicLink("../tests/test_bank.py")}, {"bank": b""}):
        found = repositories.suite(layout, changed=odd, tests=source.tests)
        assert found == {"tests/test_bank.py": source.tests["tests/test_bank.py"]}


def test_packages_stay_packages():
    base = {
        "bank/__init__.py": b"",
        "bank/test_a.py": b"",
        "bank/a.py": b"",
        "tests/test_b.py": b"",
    }
    found = layouts.layout(base, tests=base, solved=base, expected=["bank/test_a.py"])
    agents = {
        "bank/json.py": b"",
        "tests/__init__.py": b"",
        "__init__.py": b"",
        "re/__init__.py": b"",
    }
    made = repositories.with_own_tests(found, base=base, changed=agents, tests=base)
    assert {*made} == {"bank/json.py", "bank/__init__.py", "bank/test_a.py", "tests/test_b.py"}


@pytest.mark.parametrize("name", HELPED)
def test_helpers_of_tests_are_not_the_agents(tmp_path, name):
    issue, helper = HELPED[name]
    file = tmp_path / "issues.jsonl"
    file.write_text(json.dumps(made(tmp_path, "", issue)) + "\n")
    [found] = read(file)
    source = grading.source(found, (PACKAGES,))
    assert helper in source.layout.material
    assert "bank.py" not in source.layout.material
    assert "bank" in source.layout.modules
    # Nor can a new package replace the helper where both are in one sandbox.
    package = f"{helper.removesuffix('.py')}/__init__.py"
    agents = source.base | {helper: NO_HELPER.encode(), package: NO_HELPER.encode()}
    made_files = repositories.with_own_tests(
        source.layout, base=source.base, changed=agents, tests=source.tests
    )
    assert made_files[helper] == HELPER.encode()
    assert package not in made_files


@pytest.mark.parametrize(
    ("files", "name", "options"),
    [
        # The changed module relies on it, or a package does.
        (
            {"bank.py": BUG + "import rates\n", "test_bank.py": "import bank, rates\n"},
            "rates.py",
            {},
        ),
        ({"app/__init__.py": "import rates\n", "test_bank.py": "import rates\n"}, "rates.py", {}),
        # It is in the package under test.
        (
            {
                "bank/__init__.py": "",
                "bank/core.py": BUG,
                "bank/test_core.py": "from bank import x\n",
            }
            | {"bank/x.py": ""},
            "bank/x.py",
            {},
        ),
        # A test file is named after it.
        ({"test_bank.py": "import rates\n", "test_rates.py": "import rates\n"}, "rates.py", {}),
        # Another module that the tests import relies on it.
        (
            {"tools/fees.py": "import rates\n", "test_bank.py": "import rates, tools.fees\n"},
            "rates.py",
            {},
        ),
        # The issue says so.
        ({"test_bank.py": "import rates\n"}, "rates.py", {"modules": ["bank", "rates"]}),
        # No test imports it.
        ({"test_bank.py": "import bank\n"}, "rates.py", {}),
        # It does not stand beside the tests.
        ({"tests/test_bank.py": "import rates\n"}, "rates.py", {}),
    ],
)
def test_modules_that_tests_import_are_the_agents_if_the_product_needs_them(files, name, options):
    base = {"bank.py": BUG, "rates.py": "", **files}
    base = {path: text.encode() for path, text in base.items()}
    [changed] = [path for path in ("bank/core.py", "bank.py") if path in base][:1]
    solved = base | {changed: base[changed] + b"# solved\n"}
    [expected] = [path for path in base if path.endswith(("test_bank.py", "test_core.py"))]
    found = layouts.layout(base, tests=base, solved=solved, expected=[expected], **options)
    assert name not in found.material
    assert changed not in found.material


def test_the_solution_decides_what_the_product_needs():
    base = {"bank.py": b"", "rates.py": b"", "test_bank.py": b"import bank, rates\n"}
    for solution, expected in ((b"import rates\n", False), (b"x = 1\n", True)):
        solved = base | {"bank.py": solution}
        found = layouts.layout(base, tests=base, solved=solved, expected=["test_bank.py"])
        assert ("rates.py" in found.material) == expected


# ---- patches ----

CHANGE = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-q\n+r\n"
NEW = "--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+r\n"
GIT_NEW = "diff --git a/{0} b/{0}\nnew file mode 100644\nindex 0000000..1111111\n" + NEW
RENAME = "diff --git a/{0} b/{1}\nsimilarity index 100%\nrename from {0}\nrename to {1}\n"
MODE = "diff --git a/{0} b/{0}\nold mode 100644\nnew mode 100755\n"
OCTAL = 'diff --git "a/t\\303\\274r.py" "b/t\\303\\274r.py"\n'
OCTAL += '--- "a/t\\303\\274r.py"\n+++ "b/t\\303\\274r.py"\n@@ -1 +1 @@\n-q\n+r\n'


@pytest.mark.parametrize(
    "part",
    [
        NEW.format("conftest.py"),
        NEW.format("./conftest.py"),
        NEW.format("tests/../conftest.py"),
        NEW.format("pkg/Conftest.py"),
        GIT_NEW.format("pytest.ini"),
        GIT_NEW.format("a b/conftest.py"),
        CHANGE.format("tests/test_a.py"),
        CHANGE.format("setup.cfg") + NEW.format("evil.pth"),
        RENAME.format("conftest.py", "renamed.py"),
        RENAME.format("renamed.py", "conftest.py"),
        RENAME.format("tests/test_a.py", "moved.py").replace("rename", "copy"),
        MODE.format("tests/test_a.py"),
        NEW.format("json.py"),
        GIT_NEW.format("evil-1.0.dist-info/entry_points.txt"),
        GIT_NEW.format("src/Evil.egg-info/entry_points.txt"),
        GIT_NEW.format("pytest/__init__.py"),
        'diff --git "a/\\143onftest.py" "b/\\143onftest.py"\n' + NEW.format("conftest.py"),
        "diff --git a/x.py b/x.py\n" + NEW.format("conftest.py"),
        CHANGE.format("bank.py").replace("b/bank.py", "b/conftest.py"),
        "diff --git a/tests b/tests\nnew file mode 120000\n" + NEW.format("tests"),
    ],
)
def test_no_form_of_a_patch_changes_the_tests(part):
    kept = CHANGE.format("bank.py")
    layout = layouts.by_names(["bank.py", "tests/test_a.py"], ["tests/test_a.py"])
    for patch in (part, kept + part, part + kept, OCTAL + part + kept):
        try:
            found = without_steering(patch, layout)
        except ValueError:
            continue  # the whole patch is refused, and earns nothing
        changed = {name for pair in names(found) for name in pair} if found else set()
        assert changed <= {"bank.py", "tür.py", "x.py"}, found


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (OCTAL, "tür.py"),
        (GIT_NEW.format("a b.py"), "a b.py"),
        (CHANGE.format("src/über uns.py\t"), "src/über uns.py"),
        (CHANGE.format("testing/load_test.py"), "testing/load_test.py"),
        (CHANGE.format("packaging.py"), "packaging.py"),
        (MODE.format("run.sh"), "run.sh"),
        (RENAME.format("old.py", "new.py"), "new.py"),
        (CHANGE.format("bank.py").replace("-q", "--- /dev/null"), "bank.py"),
        (CHANGE.format("bank.py").replace("+r", "+++ b/conftest.py\t"), "bank.py"),
        (CHANGE.format("bank.py").replace("\n+r", "\r\n+r\r"), "bank.py"),
    ],
)
def test_honest_changes_are_kept(part, name):
    there = ["bank.py", "testing/load_test.py", "packaging.py", "tests/test_a.py"]
    layout = layouts.by_names(there, ["tests/test_a.py"])
    patch = NEW.format("conftest.py") + part + GIT_NEW.format("tests/conftest.py")
    found = without_steering(patch, layout)
    assert found == part
    assert [new for _, new in names(found)] == [name]


class Container:
    """A folder of this machine in place of a container; its /tmp is a folder, too."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def _here(self, text):
        return text.replace("/tmp/.", f"{self.folder}/.")

    async def run(self, argv, env):
        done = subprocess.run(
            [self._here(word) for word in argv], capture_output=True, check=False, text=True
        )
        return types.SimpleNamespace(
            exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr
        )

    async def read(self, path, max_bytes=None):
        return Path(self._here(path)).read_bytes()[:max_bytes]

    async def write(self, path, content):
        Path(self._here(path)).write_bytes(content)


def test_containers_get_the_agents_code_and_their_own_tests(tmp_path, monkeypatch):
    files = {"bänk.py": BUG, "tests/test_a.py": "old\n", "types.py": "q\n", "data": b"\0\xff"}
    commit = repository(tmp_path / "origin", files)
    places = [tmp_path / "agent", tmp_path / "fresh"]
    for place in places:
        git(tmp_path, "clone", "-q", str(tmp_path / "origin"), str(place))
    changes = {"bänk.py": FIX, "tests/test_a.py": "agent's\n", "types.py": "r\n", "data": b"\0\1"}
    write(places[0], {**changes, "conftest.py": "", "json.py": "", "new module.py": "1"})
    [agent, fresh] = [Container(tmp_path / name) for name in ("one", "two")]

    class Opened:
        async def __aenter__(self):
            return fresh

        async def __aexit__(self, *error):
            places[:] = places[1:]

    async def moved(argv, env):  # the fresh container has the same folder
        return await Container.run(
            fresh,
            [word.replace(str(tmp_path / "agent"), str(tmp_path / "fresh")) for word in argv],
            env,
        )

    fresh.run = moved
    monkeypatch.setattr(tasks, "fresh", lambda runtime, timeout_s: Opened())
    row = {
        "instance_id": "a__b-1",
        "repo": "a/b",
        "base_commit": commit,
        "patch": "",
        "test_patch": CHANGE.format("tests/test_a.py").replace("-q", "-old").replace("+r", "+new"),
        "problem_statement": "It is broken.",
        "FAIL_TO_PASS": ["tests/test_a.py::test_one"],
        "PASS_TO_PASS": [],
        "test_command": ["echo", "PASSED tests/test_a.py::test_one"],
    }
    (tmp_path / "bench.jsonl").write_text(json.dumps(row) + "\n")
    options = tasks.Options(issues=[str(tmp_path / "bench.jsonl")], id="swe-folder")
    [task] = tasks.SweFolder(options).load()
    data = task.data.model_copy(update={"place": str(tmp_path / "agent")})
    task = tasks.Resolve(data, task.config)
    passed, why = asyncio.run(task.graded(agent))
    assert passed, why
    found = {
        path.relative_to(tmp_path / "fresh").as_posix(): path.read_bytes()
        for path in (tmp_path / "fresh").rglob("*")
        if path.is_file() and ".git" not in path.parts
    }
    assert found == {
        "bänk.py": FIX.encode(),
        "tests/test_a.py": b"new\n",
        "types.py": b"r\n",
        "data": b"\0\1",
        "new module.py": b"1",
    }


# ---- grading and the check ----


def findings(file, **options):
    chosen = checking.Options(packages=(PACKAGES,), concurrency=2, timeout_s=90, **options)

    async def run():
        return [one async for one in checking.check([file], chosen, progress=lambda text: None)]

    return asyncio.run(run())


@pytest.mark.thorough
def test_the_check_names_bad_issues(tmp_path, capsys):
    rows = [
        made(
            tmp_path,
            "",
            usual(
                test="bank/tests/test_a.py",
                module="bank/core.py",
                imports="from ..core import add",
                extra={"bank/__init__.py": "", "bank/tests/__init__.py": ""},
            ),
        ),
        made(tmp_path, "", usual(solution={"bank.py": BUG + "# more\n"})),
        made(
            tmp_path,
            "",
            usual(hidden="\n\ndef test_same():\n    add\n\n\ndef test_add():\n    add\n"),
        ),
    ]
    rows = [row | {"id": name} for row, name in zip(rows, ("good", "wrong", "easy"), strict=True)]
    file = tmp_path / "issues.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "out").mkdir()
    written = tmp_path / "out/good.jsonl"
    arguments = ["check", str(tmp_path), "--packages", PACKAGES, "--concurrency", "2"]
    assert command.main([*arguments, "--no-cheats", "--write", str(written)]) == 1
    said = capsys.readouterr().out
    assert verdicts(said) == {"good": "good", "wrong": "BAD", "easy": "BAD"}
    assert "1 of 3 issues are good, 2 bad" in said
    assert "the reference patch does not pass: not passed: tests/test_bank.py::test_add" in said
    assert "the expected tests pass without any patch" in said
    [issue] = read(written)
    assert issue.id == "good"


def test_the_check_names_issues_that_cannot_be_graded(tmp_path, capsys):
    row = made(tmp_path, "", usual())
    rows = [
        row | {"id": "old", "base_commit": "abc"},
        row | {"id": "patch", "patch": row["test_patch"].replace("assert", "asserts")},
        row | {"id": "tests", "tests": "tests/test_bank.py"},
        {"instance_id": "x__y-1", "repo": "x/y", "base_commit": "a", "patch": "", "test_patch": "",
         "problem_statement": "", "FAIL_TO_PASS": ["t::t"], "PASS_TO_PASS": []},
        {"id": "x"},
    ]  # fmt: skip
    file = tmp_path / "issues.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main(["check", str(file), "--packages", PACKAGES]) == 1
    said = capsys.readouterr().out
    assert "0 of 5 issues are good, 4 bad, 1 not checked" in said
    assert "at abc: git finds no such commit" in said
    assert "patch: the patch does not apply: error: patch failed: tests/test_bank.py" in said
    assert "'tests' must be a list of strings, not 'tests/test_bank.py'" in said
    assert f"{file}:5: folder, base_commit, problem_statement, patch is missing" in said


def verdicts(said):
    lines = [line.split() for line in said.splitlines()[1:-2] if not line.startswith(" ")]
    return {words[0]: words[-1] for words in lines}


@pytest.mark.thorough
def test_the_check_tries_cheats(tmp_path):
    """Tests that ask the tested code whether it is right are named."""
    honest = made(tmp_path, "a module, its test beside it, with a helper")
    fooled = usual(
        imports="from bank import add, same",
        extra={"bank.py": (same := "def same(a, b):\n    return a == b\n\n\n") + BUG},
        solution={"bank.py": same + FIX},
        hidden="\n\ndef test_same():\n    assert same(add(1, 0), 1)\n"
        "\n\ndef test_add():\n    assert same(add(2, 3), 5)\n",
    )
    file = tmp_path / "issues.jsonl"
    rows = [honest, made(tmp_path, "fooled", fooled)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    good, bad = findings(file)
    assert good.good
    assert len(good.cheats) == 6
    assert [name for name, passes in bad.cheats.items() if passes] == [
        "returns objects that equal everything"
    ]
    assert bad.reasons == ("an agent that returns objects that equal everything passes",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "nowhere"], "nowhere does not exist"),
        (["check", "."], "has no file of issues"),
        (["check", "empty.jsonl"], "there are no issues in empty.jsonl"),
        (["check", "bytes.jsonl"], "bytes.jsonl: not UTF-8"),
        (["check", "empty.jsonl", "--packages", "nowhere"], "--packages nowhere: there is no such"),
    ],
)
def test_errors_of_users_are_told_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    if "." not in arguments:
        (tmp_path / "empty.jsonl").write_text("\n")
        (tmp_path / "bytes.jsonl").write_bytes(b"\xff\n")
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("swe_folder: ")
    assert said.count("\n") == 1


ACCOUNT = """class Account:
    def __init__(self): self.total = 0
    def deposit(self, x): self.total {} x
    def close(self): {}
"""
CLOSES = """import pytest, bank
@pytest.fixture
def account():
    one = bank.Account()
    yield one
    one.close()
    assert one.closed and one.total == 5

def test_first():
    assert bank.Account().total == 0
def test_add(account):
    account.deposit(5)
def test_other():
    assert not "a failing test that is not expected"
"""
INTERRUPT = "raise KeyboardInterrupt"


@pytest.mark.parametrize("grading_mode", ["isolated", "command"])
def test_a_session_that_was_cut_short_earns_nothing(tmp_path, grading_mode):
    name = "tests/test_bank.py"
    issue = Issue(
        base={
            "bank.py": ACCOUNT.format("-=", "pass"),
            name: "import bank\n",
            "pytest.ini": "[pytest]\naddopts = -p no:randomly\n",
        },
        solution={"bank.py": ACCOUNT.format("+=", "self.closed = True")},
        tests={name: CLOSES},
        expected=[f"{name}::test_first", f"{name}::test_add"],
    )
    file = tmp_path / "issues.jsonl"
    rows = [made(tmp_path, "", issue)]
    rows.append(rows[0] | {"id": "interrupted later", "tests": [f"{name}::test_first"]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both, first = read(file)
    source = grading.source(both, (PACKAGES,))
    evil = source.base | {"bank.py": ACCOUNT.format("-=", INTERRUPT).encode()}

    async def run(pool):
        options = {"grading": grading_mode, "packages": [PACKAGES], "timeout_s": 90}
        attempts = [(both, source.solved), (both, evil), (first, evil)]
        return [await grading.graded(pool, *one, **options) for one in attempts]

    [honest, cheat, later] = with_pool(run, readable=[PACKAGES], concurrency=1, warm=0)
    assert honest == (True, "")  # although another test fails
    assert not cheat[0]
    assert not later[0]
    assert "cut short" in later[1]


def test_the_check_names_helpers_that_an_agent_may_change(tmp_path):
    """A helper in the package under test can't be told from the code under test by imports."""
    issue = usual(
        module="bank/core.py",
        test="bank/test_core.py",
        imports="from bank.core import add\nfrom bank.support import check",
        hidden="\n\ndef test_same():\n    check(add(1, 0), 1)\n"
        "\n\ndef test_add():\n    check(add(2, 3), 5)\n",
        extra={"bank/__init__.py": "", "bank/support.py": HELPER},
    )
    file = tmp_path / "issues.jsonl"
    file.write_text(json.dumps(made(tmp_path, "", issue)) + "\n")
    [finding] = findings(file)
    assert finding.reference
    assert finding.empty is False
    assert (
        "the tests rely on bank/support.py, which an agent may change: if it is a helper of the "
        "tests, move it to a folder tests"
    ) in finding.reasons


DOCTEST = 'def add(a, b):\n    """Add.\n\n    >>> add(2, 3)\n    5\n    """\n    return a {} b\n'
PLUGIN = "import pytest\n\n\n@pytest.fixture\ndef one():\n    return 1\n"


def test_the_check_says_which_grading_works(tmp_path):
    fixtures = usual(
        module="bank/core.py",
        imports="from bank.core import add",
        hidden="\n\ndef test_same(one):\n    assert add(one, 0) == 1\n"
        "\n\ndef test_add():\n    assert add(2, 3) == 5\n",
        extra={
            "bank/__init__.py": "",
            "bank/plugin.py": PLUGIN,
            "conftest.py": "pytest_plugins = ['bank.plugin']\n",
        },
    )
    program = usual(
        module="bank/__main__.py",
        imports="import subprocess, sys\n\n\ndef add(a, b):\n"
        "    command = [sys.executable, '-m', 'bank', str(a), str(b)]\n"
        "    return int(subprocess.check_output(command))",
        solution={"bank/__main__.py": "import sys\nprint(sum(map(int, sys.argv[1:])))\n"},
        extra={"bank/__main__.py": "import sys\nprint(sys.argv[1])\n", "bank/__init__.py": ""},
    )
    doctest = Issue(
        base={
            "bank.py": DOCTEST.format("-"),
            "pytest.ini": "[pytest]\naddopts=--doctest-modules\n",
        },
        solution={"bank.py": DOCTEST.format("+")},
        tests={"README.md": "x\n"},
        expected=["bank.py::bank.add"],
    )
    rows = [made(tmp_path, "", issue) for issue in (fixtures, program, doctest)]
    file = tmp_path / "issues.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [one.reasons for one in findings(file, with_cheats=False)]
    for reasons in found[:2]:
        assert reasons[0].startswith("the reference patch passes with grading=command: the tests")
        assert reasons[1].startswith("the reference patch does not pass: ")
    assert found[2][0].startswith(
        "expected tests are in bank.py, which the reference patch changes"
    )
    assert "move the tests (doctests?) to a file of their own" in found[2][0]


TAKEOVER = """import sys, types
class Evil(types.ModuleType):
    def check(self, found, right): pass
for name in ("helpers", "tests", "more"):
    sys.modules[f"bank.{name}"] = globals()[name] = Evil(f"bank.{name}")
    setattr(Evil, name, sys.modules[f"bank.{name}"])
"""


def test_a_package_does_not_replace_the_helpers_inside_it(tmp_path):
    hidden = "\n\ndef test_same():\n    helpers.check(add(1, 0), 1)\n"
    hidden += "\n\ndef test_add():\n    more.check(add(2, 3), 5)\n    helpers.check(add(2, 3), 5)\n"
    issue = usual(
        module="bank/core.py",
        test="bank/test_core.py",
        imports="from bank.core import add\nfrom bank import helpers\nfrom bank.tests import more",
        hidden=hidden,
        extra={"bank/__init__.py": "", "bank/helpers.py": CHECK, "bank/tests/more.py": CHECK}
        | {"bank/tests/test_more.py": "def test_more():\n    pass\n"},
    )
    file = tmp_path / "issues.jsonl"
    file.write_text(json.dumps(made(tmp_path, "", issue)) + "\n")
    [read_issue] = read(file)
    source = grading.source(read_issue, (PACKAGES,))
    assert {"bank/helpers.py", "bank/tests/more.py"} < source.layout.material
    evil = source.base | {"bank/__init__.py": TAKEOVER.encode()}

    async def run(pool):
        common = {"grading": "isolated", "packages": [PACKAGES], "timeout_s": 90}
        attempts = [source.solved, evil]
        return [await grading.graded(pool, read_issue, one, **common) for one in attempts]

    async def run_out_of_time(pool):
        options = {"grading": "isolated", "packages": [PACKAGES], "timeout_s": 0.05}
        return await grading.graded(pool, read_issue, source.solved, **options)

    late, why = with_pool(run_out_of_time, readable=[PACKAGES], concurrency=1, warm=0)
    assert not late
    assert why.startswith("the tests were ended by their limit of timeout; not passed: bank/test")
    [honest, cheat] = with_pool(run, readable=[PACKAGES], concurrency=1, warm=0)
    assert honest == (True, "")
    assert not cheat[0]


def test_helpers_of_tests_come_before_modules_of_the_same_name(tmp_path):
    issue = usual(
        module="src/bank.py",
        imports="from bank import add\nfrom utils import check",
        extra={
            "src/utils.py": "",
            "tests/utils.py": CHECK,
            "pytest.ini": "[pytest]\npythonpath = src\n",
        },
    )
    file = tmp_path / "issues.jsonl"
    file.write_text(json.dumps(made(tmp_path, "", issue)) + "\n")
    [read_issue] = read(file)
    assert {*grading.source(read_issue, ()).layout.modules} == {"bank", "src"}


@pytest.fixture(scope="module")
def all_issues(tmp_path_factory):
    return issues_file(tmp_path_factory.mktemp("layouts"))


@pytest.mark.thorough
def test_the_reference_passes_in_every_other_layout_and_no_patch_fails(tmp_path):
    names = [*LAYOUTS][::2]
    found = findings(issues_file(tmp_path, names), with_cheats=False)
    assert [(one.name, one.reasons) for one in found] == [(name, ()) for name in names]


@pytest.mark.slow  # all layouts, with the reference and without a patch as well
@pytest.mark.parametrize("grading", ["isolated", "command"])
def test_no_cheat_passes_in_any_layout(all_issues, grading):
    found = findings(all_issues, grading=grading)
    assert [(one.name, one.reasons) for one in found] == [(name, ()) for name in LAYOUTS]


@pytest.mark.slow
def test_plain_pytest_agrees_on_clones(all_issues, tmp_path):
    """The layouts are honest: plain pytest passes on a clone with both patches."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for number, issue in enumerate(read(all_issues)):
        place = tmp_path / str(number)
        git(tmp_path, "clone", "-q", issue.folder, str(place))
        for patch in (issue.patch, issue.test_patch):
            subprocess.run(
                ["git", "-C", place, "apply", "--index", "-"], input=patch.encode(), check=True
            )
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *issue.files],
            cwd=place,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (issue.id, done.stdout)
