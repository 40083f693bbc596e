"""An evaluation's folder: what was played stays, whatever ends the process."""

import json
import os
import subprocess
import sys

import pytest

from primerl import track


def test_plays_are_there_as_soon_as_they_are_added(tmp_path):
    with track.EvaluationLog(tmp_path / "run", args={"model": "m"}) as log:
        log.add({"task": "a", "reward": 1.0})
        assert track.read_evaluation(tmp_path / "run") == [{"task": "a", "reward": 1.0}]
        log.finish({"reward": 1.0})
    assert json.loads((tmp_path / "run/args.json").read_text()) == {"model": "m"}
    assert json.loads((tmp_path / "run/summary.json").read_text()) == {"reward": 1.0}


def test_numbers_that_json_lacks_are_null_in_the_summary(tmp_path):
    with track.EvaluationLog(tmp_path / "run") as log:
        log.finish({"scores": {"e": {"mean": 1.0, "low": float("-inf"), "high": float("inf")}}})
    found = json.loads((tmp_path / "run/summary.json").read_text(), parse_constant=pytest.fail)
    assert found == {"scores": {"e": {"mean": 1.0, "low": None, "high": None}}}


def test_numbers_that_json_lacks_are_null_in_a_record(tmp_path):
    with track.EvaluationLog(tmp_path / "run") as log:
        log.add({"task": "a", "metrics": {"x": [float("nan"), 1.0]}})
        assert log.records == [{"task": "a", "metrics": {"x": [None, 1.0]}}]
    assert track.read_evaluation(tmp_path / "run") == log.records


def test_an_evaluation_that_goes_on_has_what_was_played(tmp_path):
    with track.EvaluationLog(tmp_path / "run", args={"model": "m", "samples": 1}) as log:
        log.add({"task": "a"})
    with track.EvaluationLog(
        tmp_path / "run", args={"model": "m", "samples": 2}, fixed=["model"]
    ) as log:
        assert log.records == [{"task": "a"}]
        log.add({"task": "b"})
        assert log.records == [{"task": "a"}, {"task": "b"}]
    assert track.read_evaluation(tmp_path / "run") == [{"task": "a"}, {"task": "b"}]
    assert json.loads((tmp_path / "run/args.json").read_text())["samples"] == 2


def test_a_line_that_a_killed_process_left_is_written_anew(tmp_path):
    with track.EvaluationLog(tmp_path / "run") as log:
        log.add({"task": "a"})
    with (tmp_path / "run/rollouts.jsonl").open("a") as file:
        file.write('{"task": "b", "rew')
    with track.EvaluationLog(tmp_path / "run") as log:
        assert log.records == [{"task": "a"}]
        log.add({"task": "b"})
    assert track.read_evaluation(tmp_path / "run") == [{"task": "a"}, {"task": "b"}]


def test_other_fixed_arguments_are_refused_and_nothing_changes(tmp_path):
    with track.EvaluationLog(tmp_path / "run", args={"model": "m"}) as log:
        log.add({"task": "a"})
    with pytest.raises(
        ValueError, match="was started with model='m', and is resumed with model='n'"
    ):
        track.EvaluationLog(tmp_path / "run", args={"model": "n"}, fixed=["model"])
    assert track.read_evaluation(tmp_path / "run") == [{"task": "a"}]


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="is not empty, and does not contain an evaluation"):
        track.EvaluationLog(tmp_path)


def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path):
    with track.EvaluationLog(tmp_path / "run") as log:
        log.add({"task": "a"})
    path = tmp_path / "run/rollouts.jsonl"
    for broken in ("not json\n", '["no mapping"]\n', "[" * 100_000 + "\n"):
        path.write_text('{"task": "a"}\n' + broken)
        with (
            pytest.raises(ValueError, match="line 2, is not a record"),
            track.EvaluationLog(path.parent),
        ):
            pass
        assert path.read_text() == '{"task": "a"}\n' + broken
        with pytest.raises(ValueError, match="line 2, is not a record"):
            track.read_evaluation(path.parent)


def test_two_processes_do_not_write_one_evaluation(tmp_path):
    command = "from primerl import track\nwith track.EvaluationLog('run'): pass"
    with track.EvaluationLog(tmp_path / "run"):
        done = subprocess.run(
            [sys.executable, "-c", command],
            cwd=tmp_path,
            env=os.environ,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
    assert "is in use: another process writes" in done.stderr


def test_an_error_says_how_to_continue(tmp_path):
    def interrupted():
        with track.EvaluationLog(tmp_path / "run") as log:
            log.add({"task": "a"})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupt:
        interrupted()
    (note,) = interrupt.value.__notes__
    assert f"--resume {tmp_path / 'run'}" in note


def test_what_is_no_evaluation_has_no_plays(tmp_path):
    with pytest.raises(ValueError, match="does not contain an evaluation"):
        track.read_evaluation(tmp_path)


def test_by_default_it_is_the_next_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = track.EvaluationLog(name="evaluate")
    second = track.EvaluationLog(name="evaluate")
    assert [str(one.folder) for one in (first, second)] == [
        "runs/evaluate-001",
        "runs/evaluate-002",
    ]
