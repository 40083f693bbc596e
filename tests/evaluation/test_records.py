"""Scores of rollouts, by hand; what failed counts, and what was repeated counts once."""

import io
import json

import attrs
import numpy as np
import pytest

from primerl import data, evaluation
from primerl.types import NOT_SAMPLED, Outcome, Rollout, Sample


def record(task, index=0, reward=1.0, *, environment="e", stop="stop", **fields):
    values = {"tokens": 10, "seconds": 2.0, "error": None} | fields
    if values["error"] is not None:
        reward = stop = None
    return evaluation.Record(
        environment=environment, task=task, index=index, reward=reward, stop=stop, **values
    )


def test_scores_by_hand():
    rollouts = [
        record("a", 0, 1.0, tokens=4, metrics={"turns": 2.0}),
        record("a", 1, 0.0, tokens=8, stop="length", metrics={"turns": 4.0, "rare": 1.0}),
        record("b", 0, 0.5, tokens=12, stop="context"),
        record("b", 1, error="KeyError", message="no such room", tokens=0),
    ]
    found = evaluation.scores(rollouts)["e"]
    assert (found.tasks, found.rollouts) == (2, 4)
    assert found.reward.mean == pytest.approx((0.5 + 0.25) / 2)
    assert found.reward == evaluation.share_interval(np.array([0.5, 0.25]))
    assert {k: interval.mean for k, interval in found.pass_at.items()} == {1: 0.25, 2: 0.5}
    assert found.pass_at[1] == evaluation.share_interval(np.array([0.5, 0.0]))
    assert found.tokens == 8
    assert found.seconds == 2
    assert found.truncated == pytest.approx(2 / 3)
    assert found.stops == {"stop": 1, "length": 1, "context": 1}
    assert found.errors == {"KeyError": 1}
    assert found.metrics == {"turns": 3.0, "rare": 1.0}
    lower = evaluation.scores(rollouts, passing_reward=0.5)["e"]
    assert {k: interval.mean for k, interval in lower.pass_at.items()} == {1: 0.5, 2: 1.0}


def test_environments_are_scored_apart_and_in_order():
    rollouts = [record("a", environment="two"), record("a", reward=0.0, environment="one")]
    found = evaluation.scores(rollouts)
    assert list(found) == ["two", "one"]
    assert [one.reward.mean for one in found.values()] == [1.0, 0.0]


def test_pass_at_k_goes_to_the_plays_that_every_task_has():
    rollouts = [record("a", index) for index in range(6)] + [
        record("b", index) for index in range(5)
    ]
    assert list(evaluation.scores(rollouts)["e"].pass_at) == [1, 2, 4, 5]


def test_rewards_beyond_zero_and_one_have_the_other_interval():
    rollouts = [record("a", reward=-1.0), record("b", reward=3.0), record("c", reward=1.0)]
    found = evaluation.scores(rollouts)["e"]
    assert found.reward == evaluation.mean_interval(np.array([-1.0, 3.0, 1.0]))


def test_rewards_of_stated_bounds_leave_room_where_all_are_equal():
    rollouts = [record(f"t{n}", reward=-1.0) for n in range(9)]
    assert evaluation.scores(rollouts)["e"].reward.high == float("inf")
    found = evaluation.scores(rollouts, bounds=(-1.0, 1.0))["e"].reward
    assert found == evaluation.share_interval(np.full(9, -1.0), bounds=(-1.0, 1.0))
    found = evaluation.compare_records(rollouts, rollouts, bounds=(-1.0, 1.0))["e"]
    assert -2 < found.low < 0 < found.high < 2
    with pytest.raises(ValueError, match="not all between 0 and 1"):
        evaluation.scores(rollouts, bounds=(0.0, 1.0))
    with pytest.raises(ValueError, match="not all between 0 and 1"):
        evaluation.compare_records(rollouts, rollouts, bounds=(0.0, 1.0))


def test_means_between_0_and_1_do_not_hide_rewards_that_are_not():
    """Each task has the rewards 2 and -1, so bounds of 0 and 1 would be wrong."""
    rollouts = [
        record(f"t{n}", index, reward=r) for n in range(3) for index, r in enumerate((2, -1))
    ]
    assert evaluation.scores(rollouts)["e"].reward.high == float("inf")
    assert evaluation.compare_records(rollouts, rollouts)["e"].high == float("inf")


def test_results_with_other_numbers_of_samples_and_other_tasks_are_compared_by_task():
    first = [record("a", n, reward=float(n == 0)) for n in range(4)] + [record("b", reward=1.0)]
    second = [record("a", reward=1.0), record("b", 0, reward=0.0), record("b", 1, reward=1.0)]
    found = evaluation.compare_records(first, [*second, record("c", reward=0.0)])["e"]
    assert (found.tasks, found.difference) == (2, pytest.approx((0.75 - 0.5) / 2))
    interval = evaluation.difference_interval(np.array([0.75, -0.5]))
    assert (found.low, found.high) == (interval.low, interval.high)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_by_its_task(reward):
    rollouts = [record("fine", reward=1.0), record("broken", 3, reward=reward)]
    with pytest.raises(ValueError, match="rollout 3 of task 'broken' is"):
        evaluation.scores(rollouts)
    with pytest.raises(ValueError, match="rollout 3 of task 'broken' is"):
        evaluation.compare_records(rollouts, rollouts)


def test_of_a_play_that_was_repeated_the_last_one_counts():
    rollouts = [record("a", error="KeyError"), record("b"), record("a", reward=1.0)]
    found = evaluation.scores(rollouts)["e"]
    assert (found.rollouts, found.errors, found.reward.mean) == (2, {}, 1.0)
    before = [record("a", reward=0.0), record("b", reward=0.0)]
    assert evaluation.compare_records(before, rollouts)["e"].difference == 1.0


def test_scores_of_nothing_are_refused():
    with pytest.raises(ValueError, match="no rollouts"):
        evaluation.scores([])


def test_a_comparison_pairs_the_tasks_that_both_have():
    first = [record(f"t{n}", reward=0.25) for n in range(10)] + [record("only here", reward=0.0)]
    second = [record(f"t{n}", reward=0.75) for n in reversed(range(10))]
    second += [record("t0", reward=0.5, environment="other")]
    found = evaluation.compare_records(first, second)
    assert list(found) == ["e"]
    assert found["e"].tasks == 10
    assert found["e"].difference == pytest.approx(0.5)
    assert found["e"].p_value == pytest.approx(2 / 1024)
    passed = evaluation.compare_records(first, second, passing_reward=0.75)["e"]
    assert passed.difference == 1.0
    failed = [record(f"t{n}", error="KeyError") for n in range(10)]
    assert evaluation.compare_records(failed, second, passing_reward=0.75)["e"].difference == 1.0
    assert evaluation.compare_records(second, failed)["e"].difference == pytest.approx(-0.75)


def test_results_without_a_common_task_are_refused():
    with pytest.raises(ValueError, match="no task in common"):
        evaluation.compare_records([record("a")], [record("b")])
    with pytest.raises(ValueError, match="no task in common"):
        evaluation.compare_records([record("a")], [record("a", environment="other")])


def played(**fields):
    sample = Sample(
        token_ids=[1, 2, 3, 4],
        loss_mask=[False, False, True, True],
        behavior_logprobs=[0, 0, -1, -2],
        versions=[NOT_SAMPLED, NOT_SAMPLED, 0, 0],
    )
    values = {
        "samples": [sample, sample],
        "reward": 0.5,
        "metrics": {"turns": 2.0, "undefined": float("nan")},
        "stop": "length",
        "conversation": {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ],
            "tools": [{"type": "function", "function": {"name": "look"}}],
        },
    }
    rollout = Rollout(**(values | fields))
    return Outcome(task={"id": "t", "prompt": "a"}, index=3, seconds=1.23456, rollout=rollout)


def test_the_record_of_a_play():
    found = evaluation.Record.of(played(), environment="e")
    assert (found.environment, found.task, found.index) == ("e", "t", 3)
    assert (found.reward, found.tokens, found.stop, found.seconds) == (0.5, 4, "length", 1.235)
    assert found.metrics == {"turns": 2.0}
    assert found.error is None
    assert evaluation.Record.parse(json.loads(json.dumps(found.as_line()))) == found


def test_the_record_of_a_play_that_failed():
    end = Outcome(task={"id": "t"}, index=0, seconds=1.0, error="KeyError", message="where: what")
    found = evaluation.Record.of(end)
    assert (found.reward, found.tokens, found.stop) == (None, 0, None)
    assert (found.error, found.message) == ("KeyError", "where: what")
    assert evaluation.Record.parse(found.as_line()) == found


def test_the_record_of_an_endpoint_has_the_tokens_that_it_counted():
    found = evaluation.Record.of(played(samples=(), metrics={"completion_tokens": 7.0}))
    assert found.tokens == 7


def test_records_are_conversations_to_train_on(tmp_path):
    lines = [evaluation.Record.of(attrs.evolve(played(), index=n)).as_line() for n in range(2)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, _ = data.Conversations(tmp_path / "rollouts.jsonl")
    assert first["messages"] == played().rollout.conversation["messages"]
    assert first["tools"] == played().rollout.conversation["tools"]


@pytest.mark.parametrize("broken", [{}, {"task": "a"}, record("a").as_line() | {"reward": "high"}])
def test_a_line_that_is_no_record_is_refused(broken):
    with pytest.raises(ValueError, match="not a record of a rollout"):
        evaluation.Record.parse(broken)


def test_a_narrow_terminal_breaks_no_measure():
    from rich.console import Console

    rollouts = [
        record("t1", reward=1.0, environment="long-name"),
        record("t2", error="LookupError"),
    ]
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(evaluation.scores_table(evaluation.scores(rollouts)))
    text = console.export_text()
    for part in ("LookupError", "1 rollouts", "pass@1", "cut short", "1.000"):
        assert part in text


def test_tables_fit_a_terminal_and_have_every_number():
    from rich.console import Console

    rollouts = [
        record(f"t{n}", reward=float(n % 2), environment="a-long-name:of_one") for n in range(8)
    ]
    rollouts += [record("t9", error="ConnectionResetError", environment="a-long-name:of_one")]
    scores = evaluation.scores(rollouts)
    console = Console(width=80, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(evaluation.scores_table(scores))
    console.print(evaluation.comparison_table(evaluation.compare_records(rollouts, rollouts)))
    text = console.export_text()
    console.file.close()
    assert "…" not in text
    for part in ("a-long-name:of_one", "9 tasks", "pass@1", "0.444", "cut short", "0.0%"):
        assert part in text
    assert "ConnectionResetError" in text
    assert "+0.000" in text
