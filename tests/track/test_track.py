import importlib.util
import io
import json
import logging
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import rich.console
import torch
from conftest import make_group, make_sample

from primerl import advantage, testing, track
from primerl._common import progress
from primerl._common.engine_usage import EngineUsage
from primerl.types import Group, Outcome, Rollout, Sample


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(folder, *, steps=2, decode=lambda ids: f"{len(ids)} tokens", **settings):
    with track.Run(folder, decode=decode, **settings) as run:
        for step in range(steps):
            groups = [make_group([0.0, 1.0], version=0, task_id=f"t{step}")]
            run.log(
                step,
                groups=groups,
                samples=advantage.assign(groups, advantage.centered),
                totals={
                    "rollout_tokens": 100 * (step + 1),
                    "trainer_wait_s": 0.0,
                    "rollout_wait_s": 0.5 * step,
                },
                metrics={
                    **({"mismatch_kl": 0.05, "mismatch_tokens": 10} if step == 0 else {}),
                    "grad_norm": np.float32(2.0),
                    "broken": float("nan"),
                },
            )
        run.finish(eval_before=0.25, eval_after=0.75)
    return run


def test_a_run_writes_its_summary(tmp_path):
    record(tmp_path / "run", args={"lr": 0.1})

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.pop("wall_s") > 0
    assert summary == {
        "eval_before": 0.25,
        "eval_after": 0.75,
        "steps": 2,
        "staleness_max": 1,
        "mismatch_kl_mean": 0.05,
        "finished": True,
    }
    assert json.loads((tmp_path / "run" / "args.json").read_text()) == {"lr": 0.1}


def test_supervised_steps_have_no_metrics_of_rollouts(tmp_path):
    with track.Run(tmp_path) as run:
        line = run.log(0, metrics={"loss": 2.5, "tokens": 100})
        run.finish()

    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written == line
    assert written["loss"] == 2.5
    assert written["train_tokens_per_s"] == pytest.approx(100 / written["step_s"])
    assert "reward" not in written
    assert "staleness_max" not in written
    assert run.report() == f"run folder    {tmp_path}"
    assert (tmp_path / "report.html").is_file()


def test_what_does_not_apply_is_null(tmp_path):
    with track.Run(tmp_path) as run:
        pass

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary | {"wall_s": 0} == {
        "eval_before": None,
        "eval_after": None,
        "steps": None,
        "wall_s": 0,
        "staleness_max": None,
        "mismatch_kl_mean": None,
        "finished": False,
    }
    assert "- -> -" in run.report()


def test_a_line_of_metrics_for_each_step(tmp_path):
    record(tmp_path)

    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first["step"], second["step"]) == (0, 1)
    assert first["reward"] == 0.5
    assert first["tokens"] == 14
    assert first["trained_tokens"] == 8
    assert first["reward_std"] == 0.5
    assert first["completion_tokens_mean"] == first["completion_tokens_max"] == 4
    assert first["truncated"] == 0.0
    assert 0 <= time.time() - first["time"] < 600
    assert (first["staleness_max"], second["staleness_max"]) == (0, 1)
    assert second["staleness_mean"] == 1.0
    assert first["mismatch_kl"] == 0.05
    assert second["mismatch_kl"] is None
    assert first["grad_norm"] == 2.0
    assert first["broken"] is None
    for name in ("train_tokens_per_s", "rollout_tokens_per_s"):
        assert first[name] > 0
    assert second["rollout_wait_s"] == 0.5
    assert second["trainer_wait_s"] == 0.0


def test_evaluation_is_apart_from_the_seconds_of_a_step(tmp_path):
    groups = [make_group([0.0, 1.0], version=0)]
    samples = advantage.assign(groups, advantage.centered)
    with track.Run(tmp_path) as run:
        before = time.perf_counter()
        run.log(0, groups, samples, totals={"evaluation_wait_s": 7.0})
        time.sleep(0.3)
        run.log(1, groups, samples, totals={"evaluation_wait_s": 7.25})
        elapsed = time.perf_counter() - before

    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first["evaluation_s"], second["evaluation_s"]) == (7.0, 0.25)
    assert 0.05 <= second["step_s"] <= elapsed - 0.25 + 1e-3


def test_every_trained_rollout_is_written_with_its_text_and_arrays(tmp_path):
    record(tmp_path, steps=1)

    bad, good = track.read_rollouts(tmp_path)
    assert (bad["reward"], good["reward"]) == (0.0, 1.0)
    assert (good["prompt"], good["completion"]) == ("3 tokens", "4 tokens")
    assert good["task_id"] == "t0"
    assert (good["tokens"], good["trained"]) == (7, 4)
    arrays = good["arrays"]
    assert arrays["advantages"].tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0.5]
    assert arrays["loss_mask"].tolist() == [False] * 3 + [True] * 4
    sample = make_sample()
    for name in ("token_ids", "behavior_logprobs", "versions"):
        expected = getattr(sample, name)
        assert arrays[name].dtype == expected.dtype
        np.testing.assert_array_equal(arrays[name], expected)


def test_samples_without_a_trained_token_are_passed_over(tmp_path):
    rollout = Rollout(samples=[make_sample(completion=0), make_sample()], reward=1.0)
    groups = [Group(task_id="t", rollouts=[rollout])]
    with track.Run(tmp_path) as run:
        run.log(0, groups=groups, samples=advantage.assign(groups, lambda group: [1.0]))

    assert len(lines(tmp_path / "rollouts.jsonl")) == 1


def test_a_run_that_is_killed_leaves_a_summary(tmp_path):
    """From the moment that it has its folder."""
    with track.Run(tmp_path):
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["error"] == "the run has not ended, or its process was killed"
        assert summary["finished"] is False
    assert "error" not in json.loads((tmp_path / "summary.json").read_text())


def test_a_run_that_fails_keeps_what_it_has_and_says_why(tmp_path):
    with pytest.raises(ZeroDivisionError), track.Run(tmp_path):
        raise ZeroDivisionError("half way")

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["error"] == "ZeroDivisionError: half way"


def contents(folder):
    """Every file of a folder, by its path in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "name", ["args.json", "metrics.jsonl", "rollouts.jsonl", "summary.json", "final", "checkpoints"]
)
def test_a_new_run_refuses_a_folder_that_holds_what_it_would_write(tmp_path, name):
    (tmp_path / name).write_text("another's")

    with pytest.raises(ValueError, match=f"holds a run already .{name}"):
        track.Run(tmp_path)
    assert contents(tmp_path) == {name: b"another's"}


def test_a_link_does_not_lead_a_new_run_to_another_file(tmp_path):
    (tmp_path / "mine").write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="holds a run already"):
        track.Run(run)
    (run / "summary.json").unlink()
    with track.Run(run):
        (run / "summary.partial").symlink_to(tmp_path / "mine")
        (run / "summary.json").unlink()

    assert (tmp_path / "mine").read_text() == "kept"
    assert "eval_before" in json.loads((run / "summary.json").read_text())


def test_other_files_in_a_run_s_folder_are_left_alone(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server.log").write_text("kept")

    record(tmp_path)

    assert contents(tmp_path)["logs/server.log"] == b"kept"


def test_a_file_is_no_folder_of_a_run(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ValueError, match="file is not a folder"):
        track.Run(tmp_path / "file")


def test_of_two_runs_that_want_a_folder_one_gets_it(tmp_path):
    first, second = track.Run(tmp_path / "run"), track.Run(tmp_path / "run")
    with first:
        with pytest.raises(ValueError, match="holds a run already"):
            second.__enter__()
        log(first, range(2))

    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 2


def test_the_records_of_a_state_survive_a_power_failure(tmp_path, monkeypatch):
    """A checkpoint that has the state is on the disk, too, and must not be ahead of them."""
    on_disk = {}

    def sync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        on_disk[path] = os.stat(descriptor).st_size

    with track.Run(tmp_path, decode=str) as run:
        log(run, range(3))
        monkeypatch.setattr(os, "fsync", sync)
        run.state()
        names = ("metrics.jsonl", "rollouts.jsonl", "tokens.jsonl")
        sizes = {str(tmp_path / name): (tmp_path / name).stat().st_size for name in names}

    assert all(sizes.values())
    assert on_disk.items() >= sizes.items()
    assert str(tmp_path) in on_disk  # where their names are


def test_a_run_that_another_process_writes_is_not_resumed(tmp_path):
    with track.Run(tmp_path) as run:
        log(run, range(2))
        again = track.Run(tmp_path, state=run.state())
        with pytest.raises(ValueError, match="is in use: another process writes"):
            again.__enter__()
        log(run, range(2, 3))
    with track.Run(tmp_path, state=run.state()) as again:
        log(again, range(3, 4))

    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]


def log(run, steps):
    for step in steps:
        groups = [make_group([0.0, 1.0], version=0, task_id=f"t{step}")]
        samples = advantage.assign(groups, advantage.centered)
        totals = {"rollout_tokens": 100 * (step + 1), "trainer_wait_s": 1.0 * step}
        mismatch = {"mismatch_kl": 0.01 * step, "mismatch_tokens": 10}
        run.log(step, groups, samples, totals=totals, metrics=mismatch)


def test_a_run_goes_on_in_its_folder_from_a_state(tmp_path):
    """What came after the state was taken is set aside, half a line too."""
    with track.Run(tmp_path / "whole") as whole:
        log(whole, range(5))
    with track.Run(tmp_path / "run") as run:
        run.summary["eval_before"] = 0.5
        log(run, range(3))
        state = json.loads(json.dumps(run.state()))
        log(run, range(3, 4))
    with (tmp_path / "run" / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 4, "ta')

    before = contents(tmp_path / "run")

    with track.Run(tmp_path / "run", state=state) as again:
        assert contents(tmp_path / "run") == before
        log(again, range(3, 5))

    after = contents(tmp_path / "run")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        kept = before[name].removesuffix(after[f"before-resume-001/{name}"])
        assert len(kept) < len(before[name])
        assert after[name].startswith(kept)
    for name in ("args.json", "summary.json"):
        assert after[f"before-resume-001/{name}"] == before[name]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["wall_s"] > state["wall_s"]
    assert summary == whole.summary | {"eval_before": 0.5, "wall_s": summary["wall_s"]}
    assert again.staleness == whole.staleness
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        ours, theirs = (lines(tmp_path / folder / name) for folder in ("run", "whole"))
        timed = {"time", "arrays", *(key for key in theirs[0] if key.endswith("_s"))}
        assert [{k: v for k, v in line.items() if k not in timed} for line in ours] == [
            {k: v for k, v in line.items() if k not in timed} for line in theirs
        ]
    ours, theirs = (list(track.read_rollouts(tmp_path / name)) for name in ("run", "whole"))
    for one, other in zip(ours, theirs, strict=True):
        for name, array in one["arrays"].items():
            np.testing.assert_array_equal(array, other["arrays"][name])
    waits = [line["trainer_wait_s"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert waits == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_a_resumed_run_that_fails_before_its_first_step_changes_nothing(tmp_path):
    state = earlier(record(tmp_path, steps=3).state()) | {"steps": 2}
    before = contents(tmp_path)

    with pytest.raises(RuntimeError), track.Run(tmp_path, state=state):
        raise RuntimeError("the checkpoint is of another model")

    assert contents(tmp_path) == before


def test_each_resume_keeps_what_it_cuts_off(tmp_path):
    with track.Run(tmp_path) as run:
        log(run, range(1))
        state = run.state()
        log(run, range(1, 3))
    for _ in range(2):
        with track.Run(tmp_path, state=state) as run:
            log(run, range(1, 3))

    for folder in ("before-resume-001", "before-resume-002"):
        assert [line["step"] for line in lines(tmp_path / folder / "metrics.jsonl")] == [1, 2]


def earlier(state):
    """The state as earlier versions returned it."""
    return {name: value for name, value in state.items() if name != "ends"}


def state_of(folder, *, args, steps=3):
    with track.Run(folder, args=args) as run:
        log(run, range(steps))
    return run.state()


SEED = {"seed": 0, "lr": 0.1}


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"seed": 3}, {}, "was started with seed=0, and is resumed with seed=3; .* keeps its seed"),
        ({}, {"name": "another"}, "is a run of the script .*, but this script is another"),
        ({}, {"steps": 2}, "is resumed after step 3, but only 2 steps are planned"),
        (
            {},
            {"fixed": ["model"]},
            "is not a run of this script: the argument model is missing either in",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path, change, settings, message):
    state = state_of(tmp_path, args=SEED)
    before = contents(tmp_path)

    with pytest.raises(ValueError, match=message):
        track.Run(tmp_path, args=SEED | change, **{"fixed": ["seed"], "state": state} | settings)

    assert contents(tmp_path) == before


def test_what_may_change_does_and_is_recorded(tmp_path):
    state = state_of(tmp_path, args=SEED)

    changed = SEED | {"lr": 0.2}
    with track.Run(tmp_path, args=changed, state=state, fixed=["seed"]) as run:
        log(run, range(3, 4))

    assert json.loads((tmp_path / "args.json").read_text()) == changed
    assert json.loads((tmp_path / "before-resume-001" / "args.json").read_text()) == SEED


def test_a_finished_run_says_so_and_goes_on_only_to_more_steps(tmp_path):
    """Its last checkpoint may be of an earlier step: what it trained since is not done again."""
    state = earlier(record(tmp_path, steps=3).state()) | {"steps": 2}
    before = contents(tmp_path)

    with pytest.raises(ValueError, match="is finished: it took its 3 steps, and 3 are planned"):
        track.Run(tmp_path, state=state, steps=3)
    assert contents(tmp_path) == before

    with track.Run(tmp_path, state=state, steps=4) as run:
        log(run, range(2, 3))
        run.state()  # waits for what is written beside training
        assert json.loads((tmp_path / "summary.json").read_text())["error"].startswith("the run")
    assert not json.loads((tmp_path / "summary.json").read_text())["finished"]


FOREIGN = {
    "metrics.jsonl, line 1, is not a record of a run": '{"loss": 1}\n',
    "metrics.jsonl, line 1, is not a record": "not JSON\n",
    "metrics.jsonl, line 1, is no": "[" * 100_000 + "\n",
    "metrics.jsonl, line 1": '{"step": "0"}\n',
    "metrics.jsonl has lines of 1 steps, but the run's state has 3": '{"step": 0}\n',
}


@pytest.mark.parametrize("message", FOREIGN)
def test_a_folder_of_other_records_is_refused_and_nothing_changes(tmp_path, message):
    state = earlier(state_of(tmp_path / "run", args=SEED))
    (tmp_path / "run" / "metrics.jsonl").write_text(FOREIGN[message])
    before = contents(tmp_path / "run")

    with pytest.raises(ValueError, match=message):
        track.Run(tmp_path / "run", args=SEED, state=state)

    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 0}\n', "metrics.jsonl has 12 bytes, but the run's state has [0-9]{3,}: it is n"),
        ("x" * 9999, "metrics.jsonl has no line that ends at byte [0-9]{3,}, as the run's state"),
    ],
)
def test_a_file_that_does_not_end_where_the_state_says_is_refused(tmp_path, text, message):
    state = state_of(tmp_path, args=SEED)
    (tmp_path / "metrics.jsonl").write_text(text)
    before = contents(tmp_path)

    with pytest.raises(ValueError, match=message):
        track.Run(tmp_path, args=SEED, state=state)
    with pytest.raises(ValueError, match="state has 'x' as the end of metrics.jsonl, expected a n"):
        track.Run(tmp_path, args=SEED, state=state | {"ends": {"metrics.jsonl": "x"}})

    assert contents(tmp_path) == before


def test_a_state_without_its_files_is_refused(tmp_path):
    state = record(tmp_path / "run").state()

    with pytest.raises(ValueError, match="metrics.jsonl is missing; the run's state has 2 steps"):
        track.Run(tmp_path / "elsewhere", state=state)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ValueError, match="state has no steps"):
        track.Run(tmp_path / "run", state={})


def test_an_alarm_is_printed(capsys):
    view = track.LiveView("test", steps=2)
    view(0, {"loss": 1.0, "alarm": "mismatch_kl has risen"})
    view(1, {"loss": 1.0, "alarm": None})
    view.close()

    assert capsys.readouterr().out.count("mismatch_kl has risen") == 1


def test_no_project_is_no_sink_of_weights_and_biases():
    assert track.wandb_sink(None)(0, {"loss": 1.0}) is None


def test_by_default_a_run_gets_the_next_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["recipes/demo.py"])
    for _ in range(2):
        with track.Run():
            pass

    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["demo-001", "demo-002"]


def test_sinks_are_functions(tmp_path):
    seen = []

    record(tmp_path, sinks=[lambda step, metrics: seen.append((step, metrics["reward"]))])

    assert seen == [(0, 0.5), (1, 0.5)]


def test_the_first_evaluation_is_before_and_the_last_one_after(tmp_path):
    def play(*rewards):
        return make_group(rewards).rollouts

    with track.Run(tmp_path) as run:
        run.log_evaluation(0, [])
        run.log_evaluation(1, play(0.0, 0.5))
        run.log_evaluation(3, play(0.5, 0.5))
        run.log_evaluation(4, play(1.0, 0.5))
        run.finish()
    assert [line["step"] for line in lines(tmp_path / "evaluations.jsonl")] == [1, 3, 4]

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["eval_before"], summary["eval_after"]) == (0.25, 0.75)


def outcomes(*rewards, versions=(0, 0)):
    """Outcomes of held-out rollouts of two trained tokens; a reward of None is a failure."""
    sample = Sample(
        token_ids=[1, 2, 3],
        loss_mask=[False, True, True],
        behavior_logprobs=[0.0, -1.0, -1.0],
        versions=[-1, *versions],
    )
    return [
        Outcome(
            task={"id": str(number)},
            index=0,
            seconds=1.0,
            rollout=None if reward is None else Rollout(samples=[sample], reward=reward),
            error="TimeoutError" if reward is None else None,
        )
        for number, reward in enumerate(rewards)
    ]


def test_an_evaluation_has_its_own_step_also_if_later_steps_were_logged_before(tmp_path):
    seen = []
    with track.Run(
        tmp_path, sinks=[lambda step, line: seen.append((step, "evaluation" in line))]
    ) as run:
        for step in range(3):
            run.log(step, [], [])
        run.log_evaluation(1, outcomes(1.0, 0.5, None, versions=(1, 3)))
        run.log(3, [], [])

    (line,) = lines(tmp_path / "evaluations.jsonl")
    assert line.pop("time") > 0
    assert line == {
        "step": 1,
        "evaluation": 0.5,
        "evaluation_rollouts": 3,
        "evaluation_failed": 1,
        "evaluation_first_version": 1,
        "evaluation_last_version": 3,
    }
    assert seen == [(0, False), (1, False), (2, False), (1, True), (3, False)]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]


def test_a_resumed_run_has_each_evaluation_once(tmp_path):
    """An evaluation that was logged after the checkpoint moves away; its repetition is logged."""
    with track.Run(tmp_path) as run:
        run.log_evaluation(0, outcomes(0.25))
        run.log(0, [], [])
        state = json.loads(json.dumps(run.state()))
        run.log(1, [], [])
        run.log_evaluation(1, outcomes(0.5))
    with track.Run(tmp_path, state=state) as again:
        again.log_evaluation(1, outcomes(0.75, versions=(1, 1)))
        again.log(1, [], [])
        again.finish()

    assert [
        (line["step"], line["evaluation"]) for line in lines(tmp_path / "evaluations.jsonl")
    ] == [
        (0, 0.25),
        (1, 0.75),
    ]
    moved = lines(tmp_path / "before-resume-001" / "evaluations.jsonl")
    assert [line["evaluation"] for line in moved] == [0.5]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["eval_before"], summary["eval_after"]) == (0.25, 0.75)


@pytest.mark.parametrize("known", [True, False], ids=["ends", "steps"])
def test_a_run_of_an_earlier_version_whose_metrics_had_the_evaluations_is_resumed(tmp_path, known):
    with track.Run(tmp_path) as run:
        run.log(0, [], [], metrics={"evaluation": 0.25})
        state = json.loads(json.dumps(run.state()))
    (tmp_path / "evaluations.jsonl").unlink()
    del state["ends"]["evaluations.jsonl"]
    if not known:
        del state["ends"]
    with track.Run(tmp_path, state=state) as again:
        again.log_evaluation(1, outcomes(0.5))

    assert len(lines(tmp_path / "evaluations.jsonl")) == 1
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_a_lasting_mismatch_is_an_alarm_of_the_run_also_of_one_that_is_resumed(tmp_path):
    with track.Run(tmp_path / "run") as run:
        alarms = [run.log(step, [], [], metrics={"mismatch_kl": 0.5})["alarm"] for step in (0, 1)]
        state = json.loads(json.dumps(run.state()))
    with track.Run(tmp_path / "run", state=state) as again:
        alarms.append(again.log(2, [], [], metrics={"mismatch_kl": 0.5})["alarm"])

    assert alarms[:2] == [None, None]
    assert alarms[2].startswith("mismatch_kl is 0.5, above 0.1")


def test_the_run_of_other_ranks_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with track.IdleRun() as run:
        run.log_evaluation(0, make_group().rollouts)
        run.log(0, [make_group()], [], totals={}, metrics={"loss": 1.0})
        run.finish(score=1.0)

    assert run.folder is run.final_folder is run.state() is None
    assert run.report() == ""
    assert not list(tmp_path.iterdir())


def test_the_report_has_the_outcome_the_staleness_table_and_the_folder(tmp_path):
    run = record(tmp_path / "run")

    report = run.report()

    assert "0.2500 -> 0.7500" in report
    assert "staleness 0    50.00% of 16 tokens" in report
    assert "staleness 1    50.00% of 16 tokens" in report
    assert "5.0e-02" in report
    assert str(tmp_path / "run") in report


def test_the_live_view_prints_a_line_off_a_terminal(tmp_path, capsys):
    record(tmp_path, sinks=[track.LiveView("a run", steps=2)])

    out = capsys.readouterr().out
    assert "step 1/2  reward 0.500" in out
    assert "step 2/2" in out
    assert "0:00 elapsed, 0:00 left" in out


def test_the_live_view_prints_each_new_phase_until_the_first_step(capsys, monkeypatch):
    from primerl._common.progress import report
    from primerl.track import live

    view = track.LiveView("a run", steps=2)
    report("loading the model", "m")
    report("evaluating", "3/32 rollouts")
    report("evaluating", "9/32 rollouts")
    view(0, {"reward": 0.5})
    report("saving", "step 1")
    monkeypatch.setattr(live, "QUIET_S", -1.0)
    report("rollouts", "1/8 groups")
    view.close()
    report("rollouts", "2/8 groups")

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ", 1)[1] for line in lines if "step 1/2" not in line] == [
        "loading the model: m",
        "evaluating: 3/32 rollouts",
        "rollouts: 1/8 groups",
    ]
    assert len(lines) == 4


def test_progress_is_shown_by_the_newest_view(capsys):
    from primerl._common.progress import report

    track.LiveView("of a run that failed before it began", steps=2)
    view = track.LiveView("a run", steps=2)
    report("loading the model", "m")
    view.close()

    assert capsys.readouterr().out.count("loading the model") == 1


def test_on_a_terminal_what_is_done_is_below_the_table():
    import io

    from rich.console import Console

    from primerl._common.progress import report

    screen = io.StringIO()
    view = track.LiveView("a run", steps=2, console=Console(file=screen, force_terminal=True))
    report("starting the engine")
    assert "starting the engine" in screen.getvalue()
    view(0, {"reward": 0.5})
    report("rollouts", "1/8 groups")
    assert screen.getvalue().rindex("rollouts: 1/8") > screen.getvalue().rindex("reward")
    before = len(screen.getvalue())
    view.close()

    assert "rollouts: 1/8" not in screen.getvalue()[before:]


def test_a_reply_of_each_step_is_below_its_line(tmp_path, capsys):
    record(tmp_path, sinks=[track.LiveView("a run", steps=2)], decode=lambda ids: f"[bold]{ids}\n")

    lines = capsys.readouterr().out.splitlines()
    (first, *_) = [place for place, line in enumerate(lines) if line.startswith("step 1/2")]
    taken = next(track.read_rollouts(tmp_path))
    ids, begin = taken["arrays"]["token_ids"].tolist(), taken["arrays"]["loss_mask"].argmax()
    assert lines[first + 1] == f"prompt  [bold]{ids[:begin]}\\n"
    assert lines[first + 2] == f"reply, reward {taken['reward']:.3g}  [bold]{ids[begin:]}\\n"


def test_without_decode_no_reply_is_shown(tmp_path, capsys):
    record(tmp_path, sinks=[track.LiveView("a run", steps=2)], decode=None)

    assert "reply" not in capsys.readouterr().out


@pytest.mark.parametrize("letter", ["a", "東"])
def test_a_long_prompt_and_reply_are_cut_to_the_terminal(letter):
    import io

    from rich.cells import cell_len
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, color_system=None)
    view = track.LiveView("a run", steps=2, console=console)
    view.show_reply(letter * 500 + "?", "!" + letter * 500, 0.5)
    view(0, {"reward": 0.5})
    view.close()

    shown = [line.rstrip() for line in screen.getvalue().splitlines()]
    (prompt, *_) = [line for line in shown if line.startswith("prompt")]
    (reply, *_) = [line for line in shown if line.startswith("reply")]
    assert prompt.startswith(f"prompt  …{letter}")
    assert prompt.endswith(f"{letter}?")
    assert reply.startswith(f"reply, reward 0.5  !{letter}")
    assert reply.removesuffix("…").rstrip().endswith(letter)
    assert reply.endswith("…")
    assert all(57 <= cell_len(line) <= 60 for line in (prompt, reply))


def test_what_could_steer_a_terminal_is_made_visible():
    from primerl.track.live import visible

    assert visible("\x1b[31m\r\n\t\u202e\ud800 [b]é東") == "\\x1b[31m\\r\\n\\t\\u202e\\ud800 [b]é東"


def test_a_script_that_fails_before_its_run_closes_the_view():
    from rich.console import Console

    screen = io.StringIO()

    @track.interruptible()
    def main():
        track.LiveView("a run", steps=2, console=Console(file=screen, force_terminal=True))
        progress.report("loading the model")
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        main()
    assert "loading the model" in screen.getvalue()
    assert screen.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again
    assert not logging.getLogger(progress.NAME).handlers


def test_the_time_left_is_that_of_the_last_steps(capsys):
    view = track.LiveView("a run", steps=1000)
    for step in range(30):
        view(step, {"step_s": 100.0 if step < 20 else 2.0})
    view.close()

    assert capsys.readouterr().out.splitlines()[-1].endswith("elapsed, 32:20 left")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (7384, "2:03:04")]
)
def test_durations(seconds, text):
    from primerl.track.live import duration

    assert duration(seconds) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_the_live_view_shows_an_evaluation_of_an_earlier_step(terminal):
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100)
    view = track.LiveView("a run", steps=5, console=console)
    view(2, {"step": 2, "reward": 0.5})
    view(1, {"step": 1, "evaluation": 0.625})
    before = screen.getvalue()
    view(3, {"step": 3, "reward": 0.5})
    view.close()

    if terminal:  # in the next step's table
        assert "0.625" in screen.getvalue().removeprefix(before)
    else:
        assert before.splitlines()[-1] == "evaluation of version 1  0.625"


def test_the_live_view_draws_a_table_with_curves_on_a_terminal(tmp_path):
    import io

    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)

    record(tmp_path, sinks=[track.LiveView("a run", steps=2, console=console)])

    drawn = screen.getvalue()
    assert "a run  step 2/2" in drawn
    assert "staleness_max" in drawn
    assert "▁█" in drawn


def test_sparkline_by_hand():
    from primerl.track.live import sparkline

    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 3.5, 7.0]) == "▁▅█"
    assert len(sparkline(list(map(math.sin, range(1000))), width=40)) == 40


WANDB_RUN = """
import json, sys
import wandb
from primerl import track

sink = track.wandb_sink(project="primerl-test", MODE, dir=sys.argv[1])
sink(0, {"reward": 0.5, "staleness_max": 1, "grad_norm": None})
sink(1, {"reward": 0.25})
sink(1, {"step": 1, "time": 0.0, "evaluation": 0.5})
sink(0, {"step": 0, "time": 0.0, "evaluation": 0.75})
print(json.dumps(dict(wandb.run.summary) | {"rows": wandb.run.step}))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ['mode="offline"', "group=None"])
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_weights_and_biases_offline(tmp_path, mode):
    """By argument, or because there is no API key."""
    outside = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    done = subprocess.run(  # wandb's own process ends with the one that started it
        [sys.executable, "-c", WANDB_RUN.replace("MODE", mode), str(tmp_path)],
        env={**outside, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "WANDB_SILENT": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=120,
    )

    logged = json.loads(done.stdout.splitlines()[-1])
    assert logged["reward"] == 0.25
    assert logged["staleness_max"] == 1
    assert "grad_norm" not in logged
    assert (logged["evaluation"], logged["evaluation_step"]) == (0.75, 0)
    assert logged["rows"] == 4
    assert ("logs offline" in done.stderr) == ("offline" not in mode)
    assert list(tmp_path.glob("wandb/offline-run-*"))


class NoKeyError(Exception):
    pass


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package; ``keys`` are those that it would find."""
    begun, logged, keys, axes = [], [], [], []

    def init(**arguments):
        begun.append(arguments)
        if not keys and arguments.get("mode") != "offline":
            raise NoKeyError("No API key configured")
        return SimpleNamespace(
            log=lambda numbers, **when: logged.append((numbers, when)),
            define_metric=lambda name, step_metric=None: axes.append((name, step_metric)),
        )

    errors = SimpleNamespace(UsageError=NoKeyError)
    module = SimpleNamespace(
        init=init, errors=errors, begun=begun, logged=logged, keys=keys, axes=axes
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_weights_and_biases_get_arguments_and_numbers(wandb):
    wandb.keys.append("key")
    track.wandb_sink("project", {"lr": 0.1}, group="g")(3, {"reward": 0.5, "grad_norm": None})

    assert wandb.begun == [{"project": "project", "config": {"lr": 0.1}, "group": "g"}]
    assert wandb.logged == [({"reward": 0.5, "step": 3}, {})]


def test_each_evaluation_is_a_row_of_its_own_in_weights_and_biases(wandb):
    """With ``step=1``, W&B would drop it, because step 3 was logged; uncommitted, merge both."""
    wandb.keys.append("key")
    sink = track.wandb_sink("project")
    sink(3, {"step": 3, "reward": 0.5, "evaluation_s": 2.0})
    sink(1, {"step": 1, "time": 7.0, "evaluation": 0.25, "evaluation_failed": 0})
    sink(2, {"step": 2, "time": 8.0, "evaluation": 0.5, "evaluation_failed": 1})

    assert wandb.axes == [
        ("step", None),
        ("*", "step"),
        ("evaluation", "evaluation_step"),
        ("evaluation_failed", "evaluation_step"),
    ]
    assert wandb.logged == [
        ({"step": 3, "reward": 0.5, "evaluation_s": 2.0}, {}),
        ({"evaluation": 0.25, "evaluation_failed": 0, "evaluation_step": 1}, {}),
        ({"evaluation": 0.5, "evaluation_failed": 1, "evaluation_step": 2}, {}),
    ]


def test_weights_and_biases_log_offline_without_a_key(wandb, caplog):
    track.wandb_sink("project")

    assert wandb.begun == [{"project": "project"}, {"project": "project", "mode": "offline"}]
    assert "logs offline, into ./wandb, for `wandb sync`: No API key configured" in caplog.text
    with pytest.raises(NoKeyError):
        track.wandb_sink("project", mode="online")


def test_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX")
    sink = track.tensorboard_sink(tmp_path / "events")
    for step in (1, 0):  # evaluations, in the order in which they ended
        sink(step, {"step": step, "time": 7.0, "evaluation": 0.25 * step})

    record(tmp_path / "run", sinks=[sink])

    (path,) = (tmp_path / "events").iterdir()
    found = {}
    with path.open("rb") as file:
        while header := file.read(8):
            file.read(4)  # the checksum of the length
            event = tensorboard.proto.event_pb2.Event()
            event.ParseFromString(file.read(int.from_bytes(header, "little")))
            file.read(4)
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert found["reward"] == [(0, 0.5), (1, 0.5)]
    assert found["mismatch_kl"] == [(0, pytest.approx(0.05))]
    assert found["evaluation"] == [(1, 0.25), (0, 0.0)]
    assert not {"alarm", "step", "time"} & set(found)


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    sink = track.trackio_sink("primerl-test", {"lr": 0.1}, name="first", auto_log_cpu=False)

    record(tmp_path / "run", sinks=[sink])

    command = [sys.executable, "-m", "trackio.cli", "get", "metric", "--json", "--project"]
    command += ["primerl-test", "--run", "first", "--metric", "reward"]
    said = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    points = [(point["step"], point["value"]) for point in json.loads(said)["values"]]
    assert points == [(0, 0.5), (1, 0.5)]


@pytest.mark.parametrize("sink", [track.tensorboard_sink, track.trackio_sink])
def test_a_sink_for_no_place_does_nothing(sink):
    assert sink(None)(0, {"loss": 1.0}) is None


def test_words_are_distinct_and_short():
    words = testing.words()

    assert len(words) == len(set(words)) > 5000
    assert {len(word) for word in words} == {3, 4, 5}
    assert all(word.isascii() and word.islower() for word in words)


def test_metrics_of_any_kind_are_recorded_and_end_no_run(tmp_path):
    """NaN in lists and mappings, arrays, and other objects, also in the summary and in sinks."""
    nan = float("nan")
    metrics = {
        "nested": {"a": nan, 2: [1.0, (float("inf"),)]},
        "array": np.array([[1.0, nan]]),
        "tensor": torch.tensor([0.5]),
        "path": tmp_path,
        "loss": [nan],
    }
    seen = []
    view = track.LiveView("x", steps=1, console=rich.console.Console(file=io.StringIO()))
    with track.Run(tmp_path, sinks=[view, lambda step, line: seen.append(line)]) as run:
        run.summary["mine"] = {(1, 2): nan, "array": np.arange(2)}
        run.log(0, metrics=metrics)
        state = run.state()
        run.finish(last=[nan])

    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["nested"] == {"a": None, "2": [1.0, [None]]}
    assert (line["array"], line["tensor"]) == ([[1.0, None]], 0.5)
    assert (line["path"], line["loss"]) == (str(tmp_path), [None])
    assert seen == [line]
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["mine"] == {"(1, 2)": None, "array": [0, 1]}
    assert summary["last"] == [None]
    assert json.loads(json.dumps(state, allow_nan=False))["summary"]["mine"] == summary["mine"]
    assert (tmp_path / "report.html").exists()


def test_means_of_numbers_whose_sum_is_too_large(tmp_path):
    """Metrics of 1.7e308, twice; and rewards as large as a rollout may have."""
    rollouts = [
        Rollout(samples=[make_sample()], reward=reward, metrics={"huge": 1.7e308})
        for reward in (1e38, -1e38)
    ]
    groups = [Group(task_id="t", rollouts=rollouts)]
    samples = advantage.assign(groups, advantage.centered)
    view = track.LiveView("x", steps=1, console=rich.console.Console(file=io.StringIO()))
    with track.Run(tmp_path, sinks=[view]) as run:
        line = run.log(0, groups, samples)
        run.log_evaluation(0, rollouts)

    assert line["rollout/huge"] == 1.7e308
    assert (line["reward"], line["reward_std"]) == (0.0, 1e38)
    assert run.summary["eval_before"] == 0.0


def test_a_curve_of_numbers_whose_difference_is_too_large():
    from primerl.track.live import sparkline

    assert sparkline([-1.7e308, 0.0, 1.7e308]) == "▁▅█"


def test_environments_and_dropped_groups_are_recorded_by_name(tmp_path):
    groups = [
        attrs.evolve(make_group([0.0, 1.0]), environment="sums"),
        attrs.evolve(make_group([3.0, 5.0]), environment="words"),
    ]
    samples = advantage.assign(groups, advantage.centered)
    with track.Run(tmp_path) as run:
        first = run.log(0, groups, samples, totals={"dropped_by": {"stale": 2}})
        second = run.log(1, groups, samples, totals={"dropped_by": {"stale": 2, "failed": 1}})

    assert (first["reward/sums"], first["reward/words"]) == (0.5, 4.0)
    assert first["dropped/stale"] == 2
    assert (second["dropped/stale"], second["dropped/failed"]) == (0, 1)
    written = lines(tmp_path / "rollouts.jsonl")
    assert {line["environment"] for line in written} == {"sums", "words"}


def engine_totals(**totals):
    zeros = attrs.asdict(EngineUsage())
    return {"engine": zeros | totals, "servers": {}}


def test_the_usage_of_engines_is_recorded_as_rates_of_the_step(tmp_path, capsys):
    early = engine_totals(seconds=10.0, generated_tokens=1000.0, kv_use_s=2.0)
    late = engine_totals(
        seconds=14.0,
        generated_tokens=1400.0,
        prompt_tokens=900.0,
        queried_tokens=800.0,
        cached_tokens=600.0,
        external_tokens=100.0,
        running_s=32.0,
        waiting_s=2.0,
        kv_use_s=4.0,
        preemptions=3.0,
    )
    with track.Run(tmp_path, sinks=[track.LiveView("a run", steps=4)]) as run:
        run.log(0, [], totals=early)
        second = run.log(1, [], totals=late)
        third = run.log(2, [], totals=late)
        state = run.state()
    with track.Run(tmp_path, state=state) as run:
        fourth = run.log(3, [], totals=late)

    assert {name: value for name, value in second.items() if name.startswith("engine_")} == {
        "engine_cache_hits": 0.75,
        "engine_external_hits": 0.125,
        "engine_prefill_tokens_per_s": 50.0,
        "engine_decode_tokens_per_s": 100.0,
        "engine_running": 8.0,
        "engine_waiting": 0.5,
        "engine_kv_use": 0.5,
        "engine_preemptions": 3.0,
    }
    for line in (third, fourth):
        assert not [name for name in line if name.startswith("engine_")], "no reading meanwhile"
    printed = capsys.readouterr().out
    assert "engine_decode_tokens_per_s 100  engine_cache_hits 75.0%  engine_waiting 0.5" in printed
    assert "engine_kv_use 50.0%" in printed


def test_the_live_view_has_rows_of_engines_only_if_they_were_read():
    view = track.LiveView("a run", steps=2, console=rich.console.Console(file=io.StringIO()))
    names = list(view.table(0, {"reward": 1.0}).columns[0].cells)
    assert "rollout_tokens_per_s" in names
    assert not [name for name in names if name.startswith("engine_")]
    view(0, {"engine_waiting": 2.0})
    assert "engine_waiting" in list(view.table(1, {}).columns[0].cells)
    view.close()


def test_metrics_and_ends_of_rollouts_are_curves_also_of_a_run_that_is_resumed(tmp_path):
    def groups(*rollouts):
        samples = [make_sample()]
        made = [
            Rollout(samples=samples, reward=0.0, stop=stop, metrics=metrics)
            for stop, metrics in rollouts
        ]
        return [Group(task_id="t", rollouts=made)]

    steps = [
        groups(("stop", {"turns": 2}), ("max_turns", {"turns": 5, "tool_calls": 4})),
        groups(("stop", {"turns": float("nan")}), ("stop", {"turns": 3.0})),
    ]
    with track.Run(tmp_path, name="agents") as run:
        run.log(0, steps[0], advantage.assign(steps[0], advantage.centered))
        state = json.loads(json.dumps(run.state()))
    with track.Run(tmp_path, name="agents", state=state) as run:
        run.log(1, steps[1], advantage.assign(steps[1], advantage.centered))

    shown = [
        {name: line[name] for name in line if name.startswith(("rollout/", "stop/"))}
        for line in lines(tmp_path / "metrics.jsonl")
    ]
    assert shown == [
        {"rollout/turns": 3.5, "rollout/tool_calls": 4.0, "stop/stop": 0.5, "stop/max_turns": 0.5},
        {"rollout/turns": 3.0, "stop/stop": 1.0, "stop/max_turns": 0.0},
    ]


def test_a_mismatch_that_is_not_finite_is_left_out(tmp_path):
    with track.Run(tmp_path / "run") as run:
        for step, (mean, tokens) in enumerate([(0.05, 10), (float("nan"), 3), (0.05, 2)]):
            metrics = {"mismatch_kl": mean, "mismatch_tokens": tokens}
            line = run.log(step, [], [], metrics=metrics)
            assert (line["mismatch_kl"] is None) == (step == 1)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["mismatch_kl_mean"] == pytest.approx(0.05)


def test_the_lowest_step_is_before_and_the_highest_after_in_whatever_order_they_end(tmp_path):
    with track.Run(tmp_path) as run:
        run.log_evaluation(np.int64(10), outcomes(1.0, 0.5))
        assert (run.summary["eval_before"], run.summary["eval_after"]) == (0.75, None)
        run.log_evaluation(0, outcomes(0.0, 0.5))
        run.log_evaluation(5, outcomes(0.5))
        assert (run.summary["eval_before"], run.summary["eval_after"]) == (0.25, 0.75)
        assert run.summary["eval_steps"] == [0, 10]
        with pytest.raises(TypeError):
            run.log_evaluation(None, outcomes(0.5))


def test_a_sink_that_cannot_be_closed_hides_no_error_and_leaves_no_sink_open(tmp_path, capsys):
    closed = []

    class Sink:
        def __init__(self, fails):
            self.fails = fails

        def __call__(self, step, metrics):
            pass

        def close(self):
            if self.fails:
                raise RuntimeError("no connection")
            closed.append(self)

    with (
        pytest.raises(KeyError, match="the run's own"),
        track.Run(tmp_path / "a", sinks=[Sink(True), Sink(False)]),
    ):
        raise KeyError("the run's own")
    with (
        pytest.raises(RuntimeError, match="no connection"),
        track.Run(tmp_path / "b", sinks=[Sink(True), Sink(False)]) as run,
    ):
        run.finish()
    assert len(closed) == 2
    assert capsys.readouterr().err.count("a sink could not be closed") == 2
