# ruff: noqa: E501 - programs for sandboxes
"""Readable paths below folders that sandboxes have of their own: seen, and never changed.

Run as root and, by ``test_ordinary_user.py``, as an ordinary user.
"""

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import pytest
from sandboxed import everybodys_python, needed, with_pool

from primerl.sandbox import SandboxPool, SandboxUnavailable

needed()

PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run")
NAME = "mit Leerzeichen ä-"
LOOK = """
import json, os
print(json.dumps([{place: os.listdir(place) for place in PLACES}, {path: open(path + "/file").read() for path in PATHS}]))
"""
CHANGE = """
import ctypes, os
libc = ctypes.CDLL(None)
def checked(result):
    if result < 0: raise OSError("refused")
def exchange(path, other):
    os.makedirs(other, exist_ok=True)
    checked(libc.renameat2(-100, path.encode(), -100, other.encode(), 2))
for path in PATHS:
    leading = os.path.dirname(os.path.dirname(path))
    for what, work in {
        "rename": lambda: os.rename(leading, leading + "-moved"),
        "exchange": lambda: exchange(leading, os.path.dirname(leading) + "/other"),
        "remove": lambda: os.rmdir(leading),
        "remove the path": lambda: os.rmdir(path),
        "rename the path": lambda: os.rename(path, path + "-moved"),
        "write": lambda: open(path + "/file", "a"),
        "write in it": lambda: open(path + "/new", "w"),
        "write beside it": lambda: open(os.path.dirname(path) + "/new", "w"),
        "write on the way": lambda: os.mkdir(leading + "/new"),
        "remove a file": lambda: os.unlink(path + "/file"),
        "modes": lambda: os.chmod(leading, 0o777),
        "unmount": lambda: checked(libc.umount2(path.encode(), 2)),
        "go up": lambda: os.stat(path + "/../../secret"),
    }.items():
        try:
            work()
            print("PWNED", what, path)
        except OSError:
            pass
    assert open(path + "/file").read() == "content"
print("ended")
"""


def writable_places():
    return [place for place in PLACES if os.access(place, os.W_OK)]


@pytest.fixture(autouse=True)
def _readable():
    """What a test makes, the user of its sandboxes can read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def folders():
    """A folder two levels below each place, with a file in it and a secret above."""
    made = [Path(tempfile.mkdtemp(prefix=NAME, dir=place)) for place in writable_places()]
    for folder in made:
        folder.chmod(0o755)
        (folder / "secret").write_text("secret", encoding="utf-8")
        (folder / "inner" / "packages").mkdir(parents=True)
        (folder / "inner" / "packages" / "file").write_text("content", encoding="utf-8")
    yield [str(folder / "inner" / "packages") for folder in made]
    for folder in made:
        shutil.rmtree(folder)


def looked(stdout, paths):
    """Check what a sandbox saw: the paths' files, and of the places what leads there."""
    seen, contents = json.loads(stdout)
    assert contents == dict.fromkeys(paths, "content")
    leading = {str(Path(path).parents[1]) for path in paths}
    for place, names in seen.items():
        assert {f"{place}/{name}" for name in names} == {
            path for path in leading if os.path.dirname(path) == place
        }


def program(text, paths):
    return f"PLACES = {writable_places()!r}\nPATHS = {paths!r}\n{text}"


def test_readable_folders_in_places_are_seen_and_nothing_else(folders):
    async def run():
        async with SandboxPool(python=everybodys_python(), readable=folders, concurrency=1) as pool:
            return await pool.run(program(LOOK, folders)), await pool.run(program(CHANGE, folders))

    seen, changed = asyncio.run(run())
    assert seen.ok, seen
    looked(seen.stdout, folders)
    assert (changed.stdout, changed.stderr) == (b"ended\n", b"")
    for path in folders:
        assert os.listdir(path) == ["file"]


def test_readable_folders_are_in_sessions_and_their_roots_but_in_no_snapshot(folders, tmp_path):
    async def run(pool):
        root = await pool.prepare_root(tmp_path)
        done = []
        for chosen in (None, root):
            async with pool.session(root=chosen) as session:
                done.append(await session.run(program(LOOK, folders)))
                await session.write("/tmp/kept", b"kept")
                snapshot = await session.snapshot()
            async with pool.session(snapshot=snapshot) as again:
                done.append(await again.run(["cat", "/tmp/kept"]))
            with tarfile.open(fileobj=io.BytesIO(snapshot.archive)) as archive:
                assert archive.getnames() == ["sandbox", "tmp", "tmp/kept"]
        return done

    for seen, kept in zip(
        *[iter(with_pool(run, readable=folders, concurrency=1))] * 2, strict=True
    ):
        looked(seen.stdout, folders)
        assert kept.stdout == b"kept"


def test_files_and_links_in_places(folders):
    """A link is the folder it leads to: a sandbox could otherwise put another one there."""
    folder = Path(folders[0])
    link = folder.parents[1].with_name(f"{folder.parents[1].name}-link")
    file = folder.parents[1].with_name(f"{folder.parents[1].name}-file")
    link.symlink_to(folder)
    file.write_text("a file", encoding="utf-8")

    async def run(pool):
        return await pool.run(["sh", "-c", f"cat '{link}/file' '{file}'; rm -rf /tmp/* '{link}'"])

    try:
        done = with_pool(run, readable=[f"{link}/", f"/{file}"], concurrency=1)
    finally:
        link.unlink()
        file.unlink()
    assert done.stdout == b"contenta file"
    assert b"busy" in done.stderr
    assert (folder / "file").exists()


def test_interpreter_below_tmp():
    """An interpreter of that place's own, as one that was copied or unpacked there."""
    library = sysconfig.get_path("stdlib")
    with tempfile.TemporaryDirectory(prefix=NAME, dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        python = Path(folder, "bin", f"python3.{sys.version_info.minor}")
        python.parent.mkdir()
        shutil.copy(os.path.realpath(getattr(sys, "_base_executable", sys.executable)), python)
        Path(folder, "lib").mkdir()
        Path(folder, "lib", Path(library).name).symlink_to(library)
        where = [str(python), "-I", "-c", "import os; print(os.__file__)"]
        started = subprocess.run(where, capture_output=True, encoding="utf-8")
        if started.returncode or not started.stdout.startswith(folder):
            pytest.skip(f"this interpreter can't be copied: {started.stderr or started.stdout}")

        async def run(pool):
            code = "import os, sys, decimal; print(os.__file__, sys.prefix)"
            return await pool.run(code), await pool.run(where)

        forked, started = with_pool(run, python=str(python), readable=[library], concurrency=1)
    assert forked.stdout.decode().startswith(folder), forked
    assert started.stdout.decode().startswith(folder), started


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user's sandboxes belong to that user")
@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_folder_that_only_root_can_read_is_refused(tier, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    pool = SandboxPool(tier=tier, python=everybodys_python(), readable=[str(closed)])

    async def enter():
        async with pool:
            pass

    with pytest.raises(
        SandboxUnavailable, match=rf"can't read {closed}: .*chmod -R o\+rX {closed}"
    ):
        asyncio.run(enter())


@pytest.mark.skipif(os.getuid() == 0, reason="sandboxes of root's belong to other users")
def test_folder_that_only_its_owner_can_read(tmp_path):
    """Its sandboxes belong to that owner, even if the owner has subordinate users."""
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed" / "file").write_text("read")

    async def run(pool):
        assert pool.isolation.user == f"user {os.getuid()}"
        return await pool.run(["cat", f"{tmp_path}/closed/file"])

    readable = [str(tmp_path / "closed")]
    result = with_pool(run, python=everybodys_python(), readable=readable, concurrency=1)
    assert result.stdout == b"read", result


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_a_private_umask_changes_nothing(tier, folders):
    before = os.umask(0o077)
    try:

        async def run():
            async with SandboxPool(
                tier=tier, python=everybodys_python(), readable=folders, concurrency=1
            ) as pool:
                return await pool.run(["cat", f"{folders[0]}/file"])

        done = asyncio.run(run())
    except SandboxUnavailable as error:
        if "Landlock" not in str(error):
            raise
        pytest.skip(str(error))
    finally:
        os.umask(before)
    assert done.stdout == b"content", done


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_a_temporary_folder_that_other_users_cannot_enter_is_none(tier, tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(closed))

    async def run():
        async with SandboxPool(tier=tier, python=everybodys_python(), concurrency=1) as pool:
            return await pool.run(["pwd"])

    try:
        done = asyncio.run(run())
    except SandboxUnavailable as error:
        if "Permission denied" in str(error):
            raise
        pytest.skip(str(error))
    assert done.stdout.endswith(b"\n"), done
