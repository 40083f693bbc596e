"""The environment swe-folder: a repository of one's own, and rows of SWE-bench."""

import asyncio
import io
import json
import subprocess
import tarfile
import types
from pathlib import Path

import pytest
from sandboxed import needed

pytest.importorskip("verifiers")
pytest.importorskip("bugfix", reason="pip install --no-deps -e recipes/environments/bugfix")
pytest.importorskip("swe_folder", reason="pip install --no-deps -e recipes/environments/swe-folder")
needed()

from bugfix.expert import Expert
from swe_folder import agent, repositories, tasks
from swe_folder.issues import read
from swe_folder.tasks import verdict, without_steering

from primerl import rollout
from primerl.types import SamplingParams

PACKAGES = str(Path(pytest.__file__).parents[1])
BANK = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
SHOWN = "import bank\n\n\ndef test_double():\n    assert bank.double(2) == 4\n"
HIDDEN = "\n\ndef test_add():\n    assert bank.add(2, 3) == 5\n    assert bank.add(-1, 1) == 0\n"
TESTS = ["tests/test_bank.py::test_double", "tests/test_bank.py::test_add"]
FIX = ("edit", {"path": "bank.py", "old": "return a - b", "new": "return a + b"})


def write(path, content):
    return ("edit", {"path": path, "old": "", "new": content})


AGENTS = {
    "fixes": ([FIX], 1.0),
    "does nothing": ([], 0.0),
    "breaks another": (
        [FIX, ("edit", {"path": "bank.py", "old": "2 * a", "new": "3 * a"})],
        0.0,
    ),
    "edits tests": (
        [
            write("tests/test_bank.py", "def test_double(): pass\ndef test_add(): pass\n"),
            write("test_bank.py", "def test_add(): pass\n"),
        ],
        0.0,
    ),
    "plants files": (
        [
            write("conftest.py", "import os; os._exit(0)\n"),
            write("tests/conftest.py", "import os; os._exit(0)\n"),
            write("sitecustomize.py", "import os; os._exit(0)\n"),
            write("pytest.py", "main = lambda *a, **k: 0\n"),
            write("json.py", "dumps = loads = lambda *a, **k: {}\n"),
            write("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '--co'\n"),
        ],
        0.0,
    ),
    "exits early": ([write("bank.py", "import os\nos._exit(0)\n")], 0.0),
    "prints a report": (
        [write("bank.py", "print('PASSED tests/test_bank.py::test_add')\n" + BANK)],
        0.0,
    ),
    "removes everything": ([("bash", {"command": "rm -rf * .git"})], 0.0),
    "fixes, and links hard": ([FIX, ("bash", {"command": "ln bank.py a.py"})], 1.0),
    "fixes, with a file in the tests' place": (
        [FIX, ("bash", {"command": "rm -r tests && touch tests"})],
        1.0,
    ),
    "puts a file in the tests' place": ([("bash", {"command": "rm -r tests && touch tests"})], 0.0),
    "links out of the folder": ([("bash", {"command": "ln -sf /etc/passwd bank.py"})], 0.0),
}


def git(folder, *command):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *command],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def issues(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swe")
    bank = folder / "bank"
    (bank / "tests").mkdir(parents=True)
    git(bank, "init", "-q")
    (bank / "bank.py").write_text(BANK)
    (bank / "tests/test_bank.py").write_text(SHOWN)
    git(bank, "add", "-A")
    git(bank, "commit", "-qm", "base")
    commit = git(bank, "rev-parse", "HEAD").strip()
    (bank / "bank.py").write_text(BANK.replace("a - b", "a + b"))
    patch = git(bank, "diff")
    git(bank, "checkout", "-q", ".")
    (bank / "tests/test_bank.py").write_text(SHOWN + HIDDEN)
    test_patch = git(bank, "diff")
    row = {
        "id": "bank-1",
        "folder": "bank",
        "base_commit": commit,
        "problem_statement": "add(2, 3) returns -1.",
        "patch": patch,
        "test_patch": test_patch,
        "tests": TESTS,
    }
    file = folder / "issues.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return file


def play(issues, engines, **task):
    config = {
        "taskset": {"issues": [str(issues)], "task": {"packages": [PACKAGES], **task}},
        "sandbox": {"readable": [PACKAGES], "concurrency": 4},
    }
    environment = rollout.verifiers("swe-folder", tokenizer=None, config=config)

    async def run():
        gate = asyncio.Semaphore(2)
        task = next(iter(environment.tasks))

        async def one(engine):
            async with gate:
                return await environment(task, engine, SamplingParams(max_tokens=1))

        try:
            return await asyncio.gather(*map(one, engines), return_exceptions=True)
        finally:
            await environment.aclose()

    return asyncio.run(run())


# Each isolated grading is two sandboxes and a pytest: all agents are tried only where it is cheap.
FEW = ("fixes", "edits tests", "links out of the folder", "fixes, and links hard")
FEW += ("fixes, with a file in the tests' place", "puts a file in the tests' place")


@pytest.mark.thorough
@pytest.mark.parametrize(("grading", "names"), [("isolated", FEW), ("command", tuple(AGENTS))])
def test_agents_get_what_they_earn(issues, grading, names):
    played = play(issues, [Expert(AGENTS[name][0]) for name in names], grading=grading)
    rewards = [getattr(one, "reward", one) for one in played]
    expected = {name: AGENTS[name][1] for name in names}
    assert dict(zip(names, rewards, strict=True)) == expected


@pytest.mark.slow
def test_all_agents_in_isolation(issues):
    # python -m pytest tests/recipes/test_swe_folder.py -m slow
    test_agents_get_what_they_earn(issues, "isolated", tuple(AGENTS))


@pytest.mark.thorough
def test_verifiers_own_checks_pass(issues, tmp_path):
    from verifiers.v1.cli.validate import run_validate
    from verifiers.v1.configs.cli.validate import ValidateConfig

    config = ValidateConfig.model_validate(
        {
            "taskset": {
                "id": "swe-folder",
                "issues": [str(issues)],
                "task": {"packages": [PACKAGES]},
            },
            "runtime": {"type": "subprocess"},
            "rich": False,
            "output_dir": str(tmp_path),
        }
    )
    [row] = asyncio.run(run_validate(config))
    assert row["reason"] == "valid", row


BENCH = {
    "instance_id": "Psf__requests-1",
    "repo": "psf/requests",
    "base_commit": "abc",
    "patch": "",
    "test_patch": "",
    "problem_statement": "It is broken.",
    "FAIL_TO_PASS": '["tests/test_a.py::test_one"]',
    "PASS_TO_PASS": ["tests/test_a.py::test_two", "tests/test_b.py::test_three"],
}


def test_rows_of_swe_bench(tmp_path):
    file = tmp_path / "bench.jsonl"
    file.write_text(json.dumps(BENCH) + "\n")
    [issue] = read(file)
    assert issue.image == "swebench/sweb.eval.x86_64.psf_1776_requests-1:latest"
    assert issue.expected[0] == "tests/test_a.py::test_one"
    assert len(issue.expected) == 3
    assert issue.test_command[-2:] == ("tests/test_a.py", "tests/test_b.py")
    assert (issue.workdir, issue.folder) == ("/testbed", None)


def test_images_are_refused_without_an_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(agent.shutil, "which", lambda name: None)
    file = tmp_path / "bench.jsonl"
    file.write_text(json.dumps(BENCH) + "\n")
    [played] = play(file, [Expert([])])
    assert isinstance(played, RuntimeError)
    assert "needs the image swebench/" in str(played)
    assert "neither docker nor podman" in str(played)
    monkeypatch.setattr(agent.shutil, "which", lambda name: name == "podman" or None)
    data = types.SimpleNamespace(id="x", image="an/image", workdir="/testbed")
    assert agent.container(data).type == "podman"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1]", "expected a JSON object"),
        ("{", "not valid JSON"),
        ('{"id": "x"}', "folder, base_commit, problem_statement, patch is missing"),
        ('{"instance_id": "x"}', "repo, base_commit"),
        (
            '{"id": "x", "folder": ".", "base_commit": "", "problem_statement": "", "patch": ""}',
            "is not a git repository",
        ),
    ],
)
def test_malformed_rows_are_named(tmp_path, row, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(row + "\n")
    with pytest.raises(ValueError, match=message) as raised:
        list(read(file))
    assert str(raised.value).startswith(f"{file}:1: ")


def test_what_is_graded():
    base = {"bank.py": b"1", "tests/test_bank.py": b"1", "setup.cfg": b"1", "json.py": b"1"}
    changed = {
        "bank.py": b"2",
        "new/module.py": b"2",
        "tests/test_bank.py": b"2",
        "tests/helper.py": b"2",
        "setup.cfg": b"2",
        "conftest.py": b"2",
        "json.py": b"2",
        "os.py": b"2",
        "pytest/__init__.py": b"2",
        "a.pth": b"2",
    }
    tests = {**base, "tests/test_bank.py": b"3", "data.txt": b"3"}
    assert repositories.graded(base, changed, tests) == {
        "bank.py": b"2",
        "new/module.py": b"2",
        "json.py": b"2",
        "tests/test_bank.py": b"3",
        "setup.cfg": b"1",
        "data.txt": b"3",
    }


def test_what_is_graded_where_files_and_folders_collide():
    base = {"bank.py": b"1", "tests/test_bank.py": b"1", "setup.cfg": b"1"}
    changed = {
        "bank.py": b"2",
        "tests": b"2",  # a file in a folder's place
        "setup.cfg/more": b"2",  # and a folder in a file's
        "data": b"2",
        "new/a": b"2",
        "new": b"2",  # an archive may have both
    }
    tests = {**base, "data/hidden.txt": b"3"}
    assert repositories.graded(base, changed, tests) == {
        "bank.py": b"2",
        "new/a": b"2",
        "tests/test_bank.py": b"1",
        "setup.cfg": b"1",
        "data/hidden.txt": b"3",
    }


def archive(*members, **linked):
    """Files of one byte, then hard links to them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as opened:
        for name in members:
            about = tarfile.TarInfo(name)
            about.size = 1
            opened.addfile(about, io.BytesIO(b"x"))
        for name, original in linked.items():
            about = tarfile.TarInfo(name)
            about.type, about.linkname = tarfile.LNKTYPE, original
            opened.addfile(about)
    return buffer.getvalue()


def test_hard_links_are_files(monkeypatch):
    linked = archive(".", "./a", "../b", c="./a", d="../b", e="/etc/passwd", f="c")
    assert repositories.unpacked(linked) == {"a": b"x", "c": b"x", "f": b"x"}
    monkeypatch.setattr(repositories, "MOST_BYTES", 2)
    with pytest.raises(ValueError, match="more than 2 bytes"):
        repositories.unpacked(linked)


def test_files_that_cannot_be_put_again_are_no_error(issues, monkeypatch):
    """No folder holds such a name, but an archive may, which a process put in the place of ours."""

    async def forged(runtime):
        return repositories.unpacked(archive("bank.py", "x" * 300))

    monkeypatch.setattr(tasks, "taken", forged)
    [played] = play(issues, [Expert([])], grading="command")
    assert played.reward == 0.0


def test_archives_and_patches():
    files = {"a/b.py": b"x\n", "c": b"#!/bin/sh\n"}
    assert repositories.unpacked(repositories.packed(files)) == files
    for broken in (b"nothing", repositories.packed({"a": b"x" * 5000})[:2000]):
        with pytest.raises(ValueError, match="archive"):
            repositories.unpacked(broken)
    outside = repositories.packed({"../a": b"x", "/etc/a": b"x", "ok": b"x"})
    assert repositories.unpacked(outside) == {"ok": b"x"}
    with pytest.raises(ValueError, match="does not apply"):
        repositories.patched(files, "diff --git a/z b/z\n--- a/z\n+++ b/z\n@@ -1 +1 @@\n-q\n+r\n")
    part = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-q\n+r\n"
    both = part.format("bank.py") + part.format("tests/test_a.py") + part.format("conftest.py")
    assert without_steering(both) == part.format("bank.py")


def test_verdicts_need_every_expected_test():
    def done(stdout, exit_code=0):
        return types.SimpleNamespace(stdout=stdout, stderr="", exit_code=exit_code)

    assert verdict(done("PASSED a::b\nPASSED a::c[x y]\n"), ["a::b", "a::c[x y]"])[0]
    assert not verdict(done("PASSED a::b\n"), ["a::b", "a::c"])[0]
    assert not verdict(done("PASSED a::b\nFAILED a::b - no\n"), ["a::b"])[0]
    assert not verdict(done(""), ["a::b"])[0]
    assert verdict(done(""), [])[0]
    assert not verdict(done("PASSED a::b", exit_code=1), [])[0]
