"""Folders of publications that only one transport at a time writes to."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest
from publishing import Replicas
from waiting import until

from primerl import testing, track, weights
from primerl._common import folder_owner
from primerl._common.folder_owner import OWNER, FolderOwner

OTHER_PROCESS = """
import pathlib, sys
from primerl._common.folder_owner import FolderOwner
owner = FolderOwner(pathlib.Path(sys.argv[1]))
owner.hold()
print("owned", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path):
    """A process that owns ``tmp_path``."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"owned\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def owned_elsewhere(folder):
    """Write the file of an owner on another host."""
    owner = {"token": "t", "host": "node7", "kernel": "k", "pid": 1, "started": "2"}
    (folder / OWNER).write_text(json.dumps(owner))


def test_two_transports_on_one_folder(tmp_path):
    servers = Replicas()
    model = testing.tiny_model("llama")
    with weights.Disk(model, servers, folder=tmp_path) as first:
        with pytest.raises(RuntimeError, match="is in use by another transport of this process"):
            weights.Disk(model, servers, folder=tmp_path)
        assert first.publish(1).version == 1
    second = weights.Disk(model, servers, folder=tmp_path)
    assert second.publish(2).version == 2
    with pytest.raises(RuntimeError, match="is in use by another transport"):
        first.publish(3)
    servers.close()


def test_a_folder_of_another_run_is_refused_until_its_process_ends(tmp_path, other_process, caplog):
    names = rf"is in use by another run \(process {other_process.pid} on "
    with pytest.raises(RuntimeError, match=names):
        weights.Disk(testing.tiny_model("llama"), Replicas(), folder=tmp_path)
    with pytest.raises(ValueError, match="--weights-folder: .*" + names):
        track.require_shared_folder(tmp_path, flag="--weights-folder")

    other_process.kill()
    other_process.wait()
    track.require_shared_folder(tmp_path, flag="--weights-folder")
    weights.Disk(testing.tiny_model("llama"), Replicas(), folder=tmp_path)
    assert f"belonged to process {other_process.pid} on" in caplog.text


def test_an_owner_that_ends_leaves_no_file(tmp_path, other_process):
    other_process.stdin.close()
    assert other_process.wait(30.0) == 0

    assert not (tmp_path / OWNER).exists()


def test_a_later_process_of_the_same_number_is_not_the_owner(tmp_path):
    earlier = FolderOwner(tmp_path)
    earlier.hold()
    owner = json.loads((tmp_path / OWNER).read_text())
    (tmp_path / OWNER).write_text(json.dumps(owner | {"token": "t", "started": "1"}))

    FolderOwner(tmp_path).hold()


def test_an_owner_on_another_host_that_changes_its_file_is_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_owner, "SILENT_S", 30.0)
    owned_elsewhere(tmp_path)
    beat = threading.Timer(0.3, os.utime, args=(tmp_path / OWNER,))
    beat.start()

    with pytest.raises(RuntimeError, match=r"another run \(process 1 on node7\)"):
        FolderOwner(tmp_path).hold()
    beat.join()


def test_an_owner_on_another_host_that_is_silent_has_ended(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folder_owner, "SILENT_S", 0.2)
    owned_elsewhere(tmp_path)
    own = FolderOwner(tmp_path)

    own.hold()
    assert "this takes up to 0 s, to see whether it lives" in caplog.text
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
    own.release()


def test_an_owner_shows_that_it_is_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_owner, "BEAT_S", 0.01)
    own = FolderOwner(tmp_path)
    own.hold()
    before = (tmp_path / OWNER).stat().st_mtime_ns
    until(lambda: (tmp_path / OWNER).stat().st_mtime_ns != before)
    own.release()


def test_a_run_that_was_stopped_while_another_took_over_publishes_nothing(tmp_path, monkeypatch):
    servers = Replicas()
    transport = weights.Disk(testing.tiny_model("llama"), servers, folder=tmp_path)
    transport.publish(1)
    owned_elsewhere(tmp_path)
    monkeypatch.setattr(folder_owner, "_is_alive", lambda owner, path: True)

    with pytest.raises(RuntimeError, match=r"another run \(process 1 on node7\)"):
        transport.publish(2)
    assert not list(tmp_path.glob("*2.json"))
    servers.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """As on a file system that is mounted read-only, which root can't write to either."""

    def read_only(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{path}.partial")

    monkeypatch.setattr(folder_owner, "whole_or_nothing", read_only)
    with pytest.raises(OSError, match=r"folder can't be written \(Read-only .*choose") as error:
        weights.Disk(testing.tiny_model("llama"), Replicas(), folder=tmp_path / "w")
    assert error.value.filename == str(tmp_path / "w")
    assert error.value.errno == errno.EROFS


def test_a_damaged_file_is_no_owner(tmp_path):
    (tmp_path / OWNER).write_bytes(b"{")

    own = FolderOwner(tmp_path)
    own.hold()
    own.release()
