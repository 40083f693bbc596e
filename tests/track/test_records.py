"""Records that are written beside training: full and slow disks, killed processes, sampling."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import make_group, make_sample
from report_pages import embedded

from primerl import advantage, track
from primerl.track import record_writer, rollout_records
from primerl.track.group_index import read_index
from primerl.track.record_file import RecordFile
from primerl.track.rollout_files import RolloutFiles
from primerl.types import Group, Rollout


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def log(run, steps, *, groups=2):
    """Log steps of groups of two rollouts of 7 tokens; return their alarms."""
    alarms = []
    for step in steps:
        taken = [make_group([0.0, 1.0], version=step, task_id=f"{step}.{n}") for n in range(groups)]
        samples = advantage.assign(taken, advantage.centered)
        alarms.append(run.log(step, taken, samples)["alarm"])
    return alarms


def settled(run):
    """Wait until all steps are written, or known not to be."""
    return run.state()


# ---- files that are deleted, moved or replaced while the run writes them ----


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "rollouts.jsonl", "rollouts.bin", "tokens.jsonl"]
)
def test_a_file_that_was_deleted_is_written_anew_with_all_records(tmp_path, caplog, name):
    folder = tmp_path / "run"
    with track.Run(folder, decode=str) as run:
        log(run, [0])
        settled(run)
        (folder / name).unlink()
        assert log(run, [1]) == [None]
        state = settled(run)
        log(run, [2])

    assert f"{folder / name} was deleted or moved; it is written anew" in caplog.text
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [0, 1, 2]
    read = list(track.read_rollouts(folder))
    assert [record["step"] for record in read] == [0] * 4 + [1] * 4 + [2] * 4
    assert len(lines(folder / "tokens.jsonl")) == 7
    assert not list(folder.glob("*.restored"))
    (folder / "summary.json").unlink()
    with track.Run(folder, state=state) as run:
        log(run, [2])
    assert len(list(track.read_rollouts(folder))) == 12


def test_the_folder_may_be_deleted_and_stays_locked(tmp_path):
    folder = tmp_path / "run"
    with track.Run(folder) as run:
        log(run, [0])
        settled(run)
        shutil.rmtree(folder)
        log(run, [1])
        state = settled(run)
        with pytest.raises(ValueError, match="is in use"), track.Run(folder, state=state):
            pass

        shutil.rmtree(folder)

    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [0, 1]
    assert len(list(track.read_rollouts(folder))) == 8
    assert (folder / "report.html").exists()


def test_another_file_in_place_of_a_deleted_one_is_an_alarm_and_stays(tmp_path, caplog):
    folder = tmp_path / "run"
    with track.Run(folder) as run:
        log(run, [0])
        settled(run)
        (folder / "rollouts.jsonl").unlink()
        (folder / "rollouts.jsonl").write_text("mine")
        log(run, [1])
        settled(run)
        (alarm,) = log(run, [2])
        settled(run)
        assert "another file took the place of the run's, which was deleted" in alarm
        assert str(folder / "rollouts.jsonl") in alarm
        (folder / "rollouts.jsonl").rename(folder / "mine")
        log(run, [3])

    assert "training continues without them" in caplog.text
    assert (folder / "mine").read_text() == "mine"
    assert [record["step"] for record in track.read_rollouts(folder)] == [0] * 4 + [3] * 4
    assert run.summary["records_lost"] == 8


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "rollouts.jsonl", "rollouts.bin", "rollouts.index"]
)
def test_a_file_that_is_cut_is_an_alarm_and_later_records_are_whole(tmp_path, name, share):
    folder = tmp_path / "run"
    with track.Run(folder) as run:
        log(run, [0])
        settled(run)
        before = (folder / name).stat().st_size
        size = int(share * before)
        os.truncate(folder / name, size)
        log(run, [1])
        settled(run)
        (alarm,) = log(run, [2])
        settled(run)
        assert f"another program cut it to {size} of {before} bytes" in alarm
        assert str(folder / name) in alarm
        assert log(run, [3]) == [None]
        state = settled(run)

    def steps(path):
        read = []
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                read.append(json.loads(line)["step"])
        return read

    assert run.summary["records_lost"] == 4, "of step 1"
    assert {2, 3} <= set(steps(folder / "metrics.jsonl"))
    assert {2, 3} <= set(steps(folder / "rollouts.jsonl"))
    with RolloutFiles(folder) as files:
        entries = files.groups()[-4:]
        for entry in entries:
            for line in files.lines(int(entry["offset"]), int(entry["bytes"])):
                assert files.record(line)["arrays"]["versions"].size == 7
    (folder / "summary.json").unlink()
    with track.Run(folder, state=state) as run:
        log(run, [4])
    if name in ("rollouts.jsonl", "rollouts.bin"):
        with pytest.raises(
            ValueError, match=r"rollouts.jsonl, at byte \d+, is not a record of a ro"
        ):
            list(track.read_rollouts(folder))
    else:
        assert (folder / "report.html").exists()


@pytest.mark.parametrize("change", ["cut", "deleted"])
def test_arrays_that_are_lost_between_two_runs_are_an_alarm_and_not_mixed_with_others(
    tmp_path, change
):
    folder = tmp_path / "run"
    with track.Run(folder) as run:
        log(run, [0])
        state = settled(run)
    (folder / "summary.json").unlink()
    arrays = folder / "rollouts.bin"
    before = arrays.stat().st_size
    if change == "cut":
        os.truncate(arrays, before // 4)
    else:
        arrays.unlink()
    with track.Run(folder, state=state) as run:
        log(run, [1])
        settled(run)
        (alarm,) = log(run, [2])
        settled(run)
        assert f"another program cut it to {arrays_left(change, before)} of {before}" in alarm
        assert log(run, [3]) == [None]

    assert arrays.stat().st_size > 2 * before
    with pytest.raises(ValueError, match=r"rollouts.jsonl, at byte \d+, is not a record of a ro"):
        list(track.read_rollouts(folder))


def arrays_left(change, before):
    return before // 4 if change == "cut" else 0


# ---- full disks ----


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 KiB, and a context in which it is full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")

    @contextlib.contextmanager
    def full():
        filler = disk / "filler"
        with filler.open("wb", 0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 512)
        yield
        filler.unlink()

    yield disk, full
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_disk_is_an_alarm_and_training_goes_on(small_disk, caplog, capsys):
    disk, full = small_disk
    folder = disk / "run"
    with track.Run(folder, decode=str) as run:
        log(run, range(3))
        settled(run)
        with full():
            log(run, range(3, 4), groups=20)
            settled(run)
            (alarm,) = log(run, range(4, 5), groups=20)
            settled(run)
        log(run, range(5, 7))
        settled(run)
        (late,) = log(run, range(7, 8))
        run.finish()

    why = f"records cannot be written to {folder}: [Errno 28] No space left on device: '{folder}/"
    assert alarm.startswith(why)
    assert late is None
    assert caplog.text.count("training continues without them") == 1
    assert caplog.text.count(f"records are written to {folder} again") == 1
    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(8))
    lost = sum(line.get("records_lost", 0) for line in metrics)
    summary = json.loads((folder / "summary.json").read_text())
    records = list(track.read_rollouts(folder))
    assert summary["finished"]
    assert summary["records_lost"] == lost == 3 * 4 + 2 * 40 + 3 * 4 - len(records) > 0
    assert {0, 1, 2, 5, 6, 7} <= {record["step"] for record in records}
    assert embedded(folder / "report.html")["run-0"]["recorded"] == len(records)
    assert capsys.readouterr().err == ""


def test_a_run_that_ends_while_the_disk_is_full_says_so_and_is_no_error(small_disk, capsys):
    disk, full = small_disk
    run = track.Run(disk / "run").__enter__()
    log(run, range(2))
    state = settled(run)
    with full():
        log(run, range(2, 4), groups=30)
        run.finish()
        run.__exit__(None, None, None)

    assert f"{disk / 'run'} has no report: [Errno 28]" in capsys.readouterr().err
    with track.Run(disk / "run", state=state) as again:
        log(again, range(2, 4))
    assert [line["step"] for line in lines(disk / "run/metrics.jsonl")] == [0, 1, 2, 3]


def test_a_run_that_is_resumed_while_the_disk_is_full_trains_on(small_disk):
    disk, full = small_disk
    folder = disk / "run"
    with track.Run(folder, args={"lr": 1}) as run:
        log(run, range(2))
        state = settled(run)
        log(run, range(2, 3))
    before = (folder / "metrics.jsonl").read_bytes()

    with track.Run(folder, args={"lr": 2}, state=state) as again:
        with full():
            log(again, range(2, 4))
            settled(again)
            (alarm,) = log(again, range(4, 5))
            settled(again)
        log(again, range(5, 6))

    assert alarm.startswith(f"records cannot be written to {folder}: [Errno 28]")
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == list(range(6))
    kept = b"".join(path.read_bytes() for path in sorted(folder.glob("before*/metrics.jsonl")))
    assert before.endswith(kept)
    assert json.loads(kept)["step"] == 2
    assert json.loads((folder / "args.json").read_text()) == {"lr": 2}


@contextlib.contextmanager
def files_of_at_most(size):
    """Let no file of this process grow beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_state_that_is_taken_while_the_disk_is_full_can_be_resumed(tmp_path):
    folder = tmp_path / "run"
    with track.Run(folder) as run:
        log(run, range(2))
        settled(run)
        with files_of_at_most((folder / "metrics.jsonl").stat().st_size + 10):
            log(run, range(2, 4))
            state = json.loads(json.dumps(run.state()))
        log(run, range(4, 5))
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == list(range(5))

    with track.Run(folder, state=state) as again:
        log(again, range(4, 5))

    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [0, 1, 4]
    kept = lines(folder / "before-resume-001" / "metrics.jsonl")
    assert [line["step"] for line in kept] == [2, 3, 4]


def test_a_write_that_was_cut_off_is_undone(tmp_path):
    file = RecordFile(tmp_path / "records", new=True)
    file.append(b"first\n")
    with files_of_at_most(10), pytest.raises(OSError, match="records") as failed:
        file.append(b"too long for it\n")

    assert failed.value.errno == errno.EFBIG
    assert (tmp_path / "records").read_bytes() == b"first\n"
    assert file.end == 6
    file.append(b"second\n")
    file.undo(6)
    file.append(b"third\n")
    file.close()
    assert (tmp_path / "records").read_bytes() == b"first\nthird\n"


# ---- slow disks, and errors that are not of the disk ----


@pytest.fixture
def stuck(monkeypatch):
    """Rollouts are not written before this event."""
    event = threading.Event()
    write = rollout_records.RolloutRecords.write

    def late(self, recorded):
        assert event.wait(60)
        write(self, recorded)

    monkeypatch.setattr(rollout_records.RolloutRecords, "write", late)
    yield event
    event.set()


def test_a_slow_disk_costs_rollouts_but_no_time_and_no_metrics(tmp_path, stuck, monkeypatch):
    monkeypatch.setattr(record_writer, "PENDING_TOKENS", 3 * 28)  # three steps
    monkeypatch.setattr(record_writer, "PATIENCE_S", 0.01)
    with track.Run(tmp_path) as run:
        began = time.monotonic()
        alarms = log(run, range(6))
        assert time.monotonic() - began < 10
        stuck.set()
        settled(run)
        alarms += log(run, range(6, 8))

    assert alarms[:4] == [None] * 4
    slow = f"{tmp_path} is written too slowly: rollouts are not recorded"
    assert alarms[4:] == [slow, slow, slow, None]
    metrics = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(8))
    assert [line.get("records_lost") for line in metrics] == [None] * 4 + [4, 4, 4, None]
    recorded = [record["step"] for record in track.read_rollouts(tmp_path)]
    assert sorted(set(recorded)) == [0, 1, 2, 6, 7]
    assert json.loads((tmp_path / "summary.json").read_text())["records_lost"] == 12


def test_a_state_does_not_wait_for_ever_and_is_of_what_is_written(tmp_path, stuck, monkeypatch):
    with track.Run(tmp_path) as run:
        stuck.set()
        log(run, range(2))
        sizes = {name: (tmp_path / name).stat().st_size for name in settled(run)["ends"]}
        stuck.clear()
        log(run, range(2, 3))
        with monkeypatch.context() as patch:
            patch.setattr(record_writer, "DRAIN_S", 0.2)
            state = run.state()
        stuck.set()

    assert state["ends"] == sizes
    assert state["steps"] == 3
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


def test_an_error_of_decode_ends_the_run_and_is_its_own(tmp_path):
    def decode(ids):
        raise LookupError("no such token")

    def record(name, error=None):
        with track.Run(tmp_path / name, decode=decode) as run:
            log(run, range(1))
            if error is not None:
                raise error

    with pytest.raises(LookupError, match="no such token"):
        record("at its end")
    with pytest.raises(ZeroDivisionError):
        record("failed", ZeroDivisionError())
    with track.Run(tmp_path / "at a state", decode=decode) as run:
        log(run, range(1))
        with pytest.raises(LookupError, match="no such token"):
            run.state()

    for name in ("at its end", "failed", "at a state"):
        assert len(lines(tmp_path / name / "metrics.jsonl")) == 1


# ---- killed processes ----

KILLED = """
import json, sys
from primerl import advantage, track
from primerl.types import Group, Rollout, Sample
ids, mask = list(range(300)), [place > 9 for place in range(300)]
with track.Run(sys.argv[1], decode=str, name="killed") as run:
    for step in range(100_000):
        versions = [step if trained else -1 for trained in mask]
        fields = {"token_ids": ids, "loss_mask": mask, "behavior_logprobs": [0.0] * 300}
        rollouts = [Rollout(samples=[Sample(versions=versions, **fields)], reward=0.0)] * 2
        groups = [Group(task_id=f"{step}", rollouts=rollouts)]
        run.log(step, groups, advantage.assign(groups, advantage.centered))
        if step % 10 == 9:
            print(json.dumps(run.state()), flush=True)
"""


def test_a_run_that_is_killed_is_resumed_from_a_state_and_nothing_is_missing(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        states = [json.loads(process.stdout.readline() or "0") for _ in range(3)]
        process.send_signal(signal.SIGKILL)
    assert len(lines(folder / "metrics.jsonl")) >= 30
    track.write_report([folder])
    list(track.read_rollouts(folder))

    with track.Run(folder, decode=str, name="killed", state=states[1]) as run:
        log(run, range(20, 22), groups=1)

    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == list(range(22))
    recorded = [record["step"] for record in track.read_rollouts(folder)]
    assert recorded == [step for step in range(22) for _ in range(2)]
    assert embedded(folder / "report.html")["run-0"]["recorded"] == 44
    kept = lines(folder / "before-resume-001" / "rollouts.jsonl")
    assert kept[0]["step"] == 20


def test_a_run_that_was_cut_off_anywhere_has_a_report(tmp_path):
    with track.Run(tmp_path, decode=str) as run:
        log(run, range(2))
    whole = {name: (tmp_path / name).read_bytes() for name in ("rollouts.jsonl", "rollouts.index")}

    for name, content in whole.items():
        for size in range(0, len(content), 1 if len(content) < 500 else 97):
            (tmp_path / name).write_bytes(content[:size])
            run = embedded(track.write_report([tmp_path]))["run-0"]
            records = list(track.read_rollouts(tmp_path))
            assert len(run["rollouts"]["step"]) == run["recorded"] <= len(records) <= 8
        (tmp_path / name).write_bytes(content)


def test_damaged_arrays_name_their_line(tmp_path):
    with track.Run(tmp_path) as run:
        log(run, range(1))
    place = lines(tmp_path / "rollouts.jsonl")[1]["arrays"]
    blocks = bytearray((tmp_path / "rollouts.bin").read_bytes())
    blocks[place["offset"] + place["bytes"] // 2] ^= 1
    (tmp_path / "rollouts.bin").write_bytes(blocks)

    begin = (tmp_path / "rollouts.jsonl").read_bytes().index(b"\n") + 1
    where = f"{tmp_path / 'rollouts.jsonl'}, at byte {begin}, is not a record of a rollout"
    with pytest.raises(ValueError, match=where):
        list(track.read_rollouts(tmp_path))
    with pytest.raises(ValueError, match=where):
        track.write_report([tmp_path])
    with pytest.raises(ValueError, match="holds no run"):
        list(track.read_rollouts(tmp_path / "none"))


# ---- cost of a long history ----


def test_resuming_reads_no_history(tmp_path):
    with track.Run(tmp_path) as run:
        log(run, range(3))
        state = run.state()
    for name, end in state["ends"].items():
        if end:
            (tmp_path / name).write_bytes(b"?" * (end - 1) + b"\n")

    with track.Run(tmp_path, state=state) as run:
        log(run, range(3, 4))
        ends = settled(run)["ends"]
        assert all(ends[name] > end for name, end in state["ends"].items() if end)


def test_a_report_reads_only_what_it_shows(tmp_path, monkeypatch):
    counts = []
    read = RolloutFiles._read

    def counted(self, name, offset, length):
        counts[-1] += 1
        return read(self, name, offset, length)

    monkeypatch.setattr(RolloutFiles, "_read", counted)
    for steps in (10, 20):
        counts.append(0)
        with track.Run(tmp_path / f"{steps}") as run:
            log(run, range(steps))
        counts[-1] = 0
        track.write_report([tmp_path / f"{steps}"], max_rollouts=10)
        index = read_index(tmp_path / f"{steps}" / "rollouts.index")
        assert index["rollouts"].tolist() == [2] * 2 * steps

    # Five groups of two sequences, of each group's lines, and of each line and its arrays.
    assert counts == [5 + 2 * 10] * 2


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    """Its arrays are in JSON, and its state has no ends."""
    with track.Run(tmp_path) as run:
        log(run, range(2))
        state = {name: value for name, value in run.state().items() if name != "ends"}
    records = list(track.read_rollouts(tmp_path))
    with (tmp_path / "rollouts.jsonl").open("w") as file:
        for record in records:
            arrays = {name: array.tolist() for name, array in record.pop("arrays").items()}
            del record["tokens"], record["trained"]
            file.write(json.dumps(record | arrays) + "\n")
    for name in ("rollouts.bin", "rollouts.index", "tokens.jsonl"):
        (tmp_path / name).unlink()

    for _ in range(2):  # the second time, from the state of the earlier version again
        with track.Run(tmp_path, state=state) as run:
            log(run, range(2, 4))

    found = list(track.read_rollouts(tmp_path))
    assert [record["step"] for record in found] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    for record in found:
        ids = make_sample().token_ids
        np.testing.assert_array_equal(record["arrays"]["token_ids"], ids)
    page = embedded(tmp_path / "report.html")
    assert page["run-0"]["recorded"] == 16
    shown = [one["sequences"][0]["versions"][-1] for one in page["run-0-chunk-0"]]
    assert shown == [record["step"] for record in found]


# ---- choosing ----


def test_of_a_large_step_groups_are_recorded_at_even_intervals(tmp_path):
    with track.Run(tmp_path, record_tokens=28) as run:  # of 8 groups of 14 tokens
        log(run, range(3), groups=8)

    tasks = [record["task_id"] for record in track.read_rollouts(tmp_path)]
    assert tasks == [f"{step}.{n}" for step in range(3) for n in (3, 7) for _ in range(2)]
    with pytest.raises(ValueError, match="record_tokens is -1; expected"):
        track.Run(tmp_path / "other", record_tokens=-1)


def test_a_tenth_of_the_groups_is_recorded_exactly(tmp_path):
    """Ten tenths do not add up to 1."""
    with track.Run(tmp_path, record_rollouts=0.1) as run:
        log(run, range(10), groups=10)

    tasks = [record["task_id"] for record in track.read_rollouts(tmp_path)]
    assert tasks == [f"{step}.9" for step in range(10) for _ in range(2)]


def test_the_middle_of_a_long_text_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_records, "MAX_TEXT_TOKENS", 4)
    sample = make_sample(prompt=4, completion=1005)
    groups = [Group(task_id="t", rollouts=[Rollout(samples=[sample], reward=0.0)])]
    with track.Run(tmp_path, decode=str) as run:
        run.log(0, groups, advantage.assign(groups, lambda group: [1.0]))

    ids = sample.token_ids.tolist()
    (record,) = lines(tmp_path / "rollouts.jsonl")
    assert record["prompt"] == str(ids[:4])
    note = "\n[... 1,001 tokens are left out of the text ...]\n"
    assert record["completion"] == str(ids[4:6]) + note + str(ids[-2:])
    (whole,) = track.read_rollouts(tmp_path)
    assert whole["arrays"]["token_ids"].tolist() == ids
