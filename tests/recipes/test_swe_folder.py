"""The environment swe-folder: a repository of one's own, and rows of SWE-bench."""

import asyncio
import contextlib
import io
import itertools
import json
import re
import tarfile
import types
from pathlib import Path, PurePosixPath

import pytest
from growth import assert_linear, repeated
from hypothesis import given
from hypothesis import strategies as st
from sandboxed import needed
from swe_layouts import git

pytest.importorskip("verifiers")
pytest.importorskip("bugfix", reason="pip install --no-deps -e recipes/environments/bugfix")
pytest.importorskip("swe_folder", reason="pip install --no-deps -e recipes/environments/swe-folder")
needed()

from bugfix.expert import Expert
from swe_folder import repositories, tasks
from swe_folder.grading import verdict
from swe_folder.issues import read
from swe_folder.layouts import by_names, layout
from swe_folder.patches import without_steering

from primerl import rollout
from primerl.sandbox import Executable, SandboxError, SymbolicLink, archives
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


@pytest.fixture
def bench(tmp_path):
    """A row of SWE-bench, whose image is an archive with the repository, beside the file."""
    bank = tmp_path / "image" / "testbed"
    (bank / "tests").mkdir(parents=True)
    git(bank, "init", "-q")
    (bank / "bank.py").write_text(BANK)
    (bank / "tests/test_bank.py").write_text(SHOWN)
    git(bank, "add", "-A")
    git(bank, "commit", "-qm", "base")
    commit = git(bank, "rev-parse", "HEAD").strip()
    (bank / "tests/test_bank.py").write_text(SHOWN + HIDDEN)
    test_patch = git(bank, "diff")
    git(bank, "checkout", "-q", ".")
    with tarfile.open(tmp_path / "bank.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "image", arcname=".")
    row = BENCH | {
        "base_commit": commit,
        "test_patch": test_patch,
        "image": "./bank.tar.gz",
        "FAIL_TO_PASS": TESTS,
        "PASS_TO_PASS": [],
        "test_command": [
            *("env", f"PYTHONPATH=.:{PACKAGES}", "python3", "-m", "pytest", "-rA"),
            *("-p", "no:cacheprovider", "tests/test_bank.py"),
        ],
    }
    file = tmp_path / "bench.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return file


def test_issues_are_resolved_in_sandboxes_with_their_image(bench):
    expert, cheat = (Expert([*calls]) for calls in ([FIX], [write("tests/test_bank.py", "")]))
    solved, failed = play(bench, [expert, cheat])

    assert (solved.reward, failed.reward) == (1.0, 0.0)


def test_an_image_that_cannot_be_had_is_an_error_that_names_it(bench, monkeypatch):
    (bench.parent / "bank.tar.gz").write_bytes(b"no archive")
    [played] = play(bench, [Expert([])])

    assert isinstance(played, SandboxError)
    assert re.search(r"the image /.*bank.tar.gz can't be unpacked: .*no valid header", str(played))

    monkeypatch.setenv("PATH", str(bench.parent))
    bench.write_text(json.dumps(BENCH) + "\n")
    [played] = play(bench, [Expert([])])
    assert isinstance(played, SandboxError)
    assert "sweb.eval.x86_64.psf_1776_requests-1:latest can't be pulled" in str(played)


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


def graded(base, changed, tests):
    found = layout(base, tests=tests, solved=base, expected=["tests/test_bank.py"])
    return repositories.with_own_tests(found, base=base, changed=changed, tests=tests)


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
    assert graded(base, changed, tests) == {
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
        "tests": SymbolicLink("new"),  # a link in a folder's place
        "setup.cfg/more": b"2",  # and a folder in a file's
        "data": b"2",
        "new/a": b"2",
        "new": SymbolicLink("tests"),  # an archive may have both
    }
    tests = {**base, "data/hidden.txt": b"3"}
    assert graded(base, changed, tests) == {
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


def header(kind, size, name=b"x"):
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    fields = [name.ljust(100, b"\0"), bytes(24), field, bytes(12), b" " * 8, kind, bytes(100)]
    content = b"".join([*fields, b"ustar\00000"]).ljust(512, b"\0")
    return content.replace(b" " * 8, b"%06o\0 " % sum(content), 1)


def extended(records, kind=b"x"):
    return header(kind, len(records)) + records + bytes(-len(records) % 512)


FORGED = {
    "no valid header": header(b"0", 0)[:-1] + b"x",
    "cut off": header(b"0", 1),
    "header has the number": header(b"0", b"\xff" * 10 + b"\xfe\0"),  # its own header again
    "extended header is malformed": extended(b"9 path=a\n9 comment\n"),
    "extended header has the number": extended(b"1" * 512),
    "sparse file": extended(b"22 GNU.sparse.major=1\n") + header(b"0", 0),
    "a sparse file": header(b"S", 0),
    "the member at byte 512 is cut off": header(b"0", b"\x80" + b"\xff" * 11),
    "has the number '-1'": extended(b"11 size=-1\n") + header(b"0", 0),
    "a zero byte": extended(b"12 path=a\0b\n") + header(b"0", 0),
    "a name is too long": extended(b"65550 path=" + b"x" * 65538 + b"\n") + header(b"0", 0),
    "extended header at byte 512 has 65537 bytes": extended(b"x" * 65537, b"L"),
    "extended header at byte 512 has 1048577 bytes": extended(b"x" * 1048577, b"g"),
    "more than 200000 headers and records": extended(b"4 =\n" * 200_000),
    "is empty": b"",
}


@pytest.mark.parametrize("reason", FORGED)
def test_forged_archives_are_refused(reason):
    with pytest.raises(ValueError, match=f"not a valid archive: .*{reason}"):
        repositories.unpacked(FORGED[reason])


@pytest.mark.parametrize("part", [b"1", b" ", b"5 aa\n", b"6 a=b\n", b"7 a=bc", b"\0", b"="])
def test_extended_headers_take_linear_time(part):
    records = repeated(b"", part, b"9 path=a\n")

    def unpack(content):
        with contextlib.suppress(ValueError):
            repositories.unpacked(extended(content) + header(b"0", 0))

    assert_linear(unpack, records)


@pytest.mark.parametrize(
    "part", ["PASSED a", "PASSED ", " - ", "diff --git a/", "diff --git a/b b/c\n", "a", " ", "\n"]
)
def test_outcomes_and_patches_take_linear_time(part):
    def judge(text):
        done = types.SimpleNamespace(stdout=text, stderr="", exit_code=0)
        verdict(done, ["a::b"])

    assert_linear(judge, repeated("PASSED a", part, "\0"))

    def filtered(text):
        with contextlib.suppress(ValueError):
            without_steering(text)

    assert_linear(filtered, repeated("diff --git a/", part, "\0"))


def test_deep_paths_take_linear_time():
    found = by_names(["a/tests/test_a.py"], ["a/tests/test_a.py"])

    def grade(path):
        changed = {f"{path}x": b"", path: b"", f"{path}/y": b""}
        repositories.with_own_tests(found, base={}, changed=changed, tests={"a/a": b""})
        repositories.suite(found, changed=changed, tests={"a/a": b""})

    assert_linear(grade, repeated("a", "/a", ""))


NAMES = st.lists(st.sampled_from(["a", "b", "a-b", "x" * 120, "é"]), min_size=1, max_size=4)


@given(
    st.dictionaries(NAMES.map("/".join), st.binary(max_size=600), min_size=1, max_size=5),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_archives_of_all_formats_are_read(files, form):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, pax_headers={"comment": "é"}) as made:
        for path, content in files.items():
            about = tarfile.TarInfo(path)
            about.size = len(content)
            about.mtime = 0.5 if form == tarfile.PAX_FORMAT else 0
            with contextlib.suppress(ValueError):  # a name that does not fit the format
                made.addfile(about, io.BytesIO(content))
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as made:
        expected = {one.name: made.extractfile(one).read() for one in made}
    assert repositories.unpacked(buffer.getvalue()) == expected


@given(st.sets(NAMES.map("/".join)), st.sets(NAMES.map("/".join)))
def test_conflicting_paths_are_found(paths, places):
    above = {path: {str(one) for one in PurePosixPath(path).parents} for path in paths | places}
    folders = set(itertools.chain.from_iterable(above.values()))
    assert repositories.folders_among(paths | places) == folders & (paths | places)
    found = repositories.paths_below(paths, places)
    assert found & paths == {path for path in paths if above[path] & places}


def test_files_that_cannot_be_put_again_are_no_error(issues, monkeypatch):
    """No folder holds such a name, but an archive may, which a process put in the place of ours."""

    async def forged(runtime):
        return repositories.unpacked(archive("bank.py", "x" * 300))

    monkeypatch.setattr(tasks, "taken", forged)
    [played] = play(issues, [Expert([])], grading="command")
    assert played.reward == 0.0


def test_archives_keep_links_and_modes():
    files = {"a/b.py": b"x\n", "c": Executable(b"#!/bin/sh\n"), "дні\n": SymbolicLink("a/b c")}
    assert repositories.unpacked(repositories.packed(files)) == files
    for broken in (b"nothing", repositories.packed({"a": b"x" * 5000})[:2000]):
        with pytest.raises(ValueError, match="archive"):
            repositories.unpacked(broken)
    outside = repositories.packed({"../a": b"x", "/etc/a": b"x", "ok": b"x"})
    assert repositories.unpacked(outside) == {"ok": b"x"}


def test_verdicts_need_every_expected_test():
    def done(stdout, exit_code=0):
        return types.SimpleNamespace(stdout=stdout, stderr="", exit_code=exit_code)

    assert verdict(done("PASSED a::b\nPASSED a::c[x y]\n"), ["a::b", "a::c[x y]"])[0]
    assert not verdict(done("PASSED a::b\n"), ["a::b", "a::c"])[0]
    assert not verdict(done("PASSED a::b\nFAILED a::b - no\n"), ["a::b"])[0]
    assert not verdict(done("PASSED a::b\nERROR a - ImportError\n"), ["a::b"])[0]
    assert not verdict(done(""), ["a::b"])[0]
    assert verdict(done(""), [])[0]
    assert not verdict(done("PASSED a::b", exit_code=1), [])[0]


def test_records_of_an_archive_that_nobody_needs_are_dropped():
    """They would be copied for each further member, in quadratic time."""
    records = b"9 abc=xy\n" + b"10 path=x\n" + b"20 GNU.sparse.x=123\n"
    assert archives._records(records, archives._Steps()) == {"path": "x", "GNU.sparse.": "123"}


def test_what_is_not_a_file_is_left_out():
    """Devices, pipes, folders, and links to what is not in the archive."""
    names = {b"1": b"hard", b"3": b"character", b"4": b"block", b"5": b"folder", b"6": b"pipe"}
    forged = b"".join(header(kind, 0, name) for kind, name in names.items())
    twice = header(b"0", 1, b"same") + b"a".ljust(512, b"\0")
    twice += header(b"0", 1, b"same") + b"b".ljust(512, b"\0")
    assert repositories.unpacked(forged + twice) == {"same": b"b"}


@pytest.mark.parametrize("names", [["a/" * 600 + "deep"], [f"a/{k}" for k in range(20_001)]])
def test_archive_with_too_long_or_too_many_names(names):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(ValueError, match="more than 20000 members, or a name longer than 1024"):
        repositories.unpacked(buffer.getvalue())
