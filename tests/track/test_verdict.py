"""The verdict on a run, from metrics made by hand, and its bounds in the documentation."""

import re

import pytest

from primerl.track import verdict as verdicts
from primerl.track.verdict import BOUNDS, verdict


def steps(count=12, **columns):
    """Steps whose rewards rise by 0.1, with further metrics: the same in all steps, or a list."""
    columns = {"reward": [0.1 * step for step in range(count)]} | columns
    return [
        {"step": step}
        | {
            name.replace("__", "/"): values[step] if isinstance(values, list) else values
            for name, values in columns.items()
        }
        for step in range(count)
    ]


NOISE = [0.3, -0.2, 0.1, -0.3, 0.2, -0.1]


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({}, "learning"),
        (
            {"mismatch_kl": 2e-3, "truncated": 0.05, "trainer_wait_s": 1.0, "step_s": 2.0},
            "learning",
        ),
        ({"reward": [0.5 + NOISE[step % 6] for step in range(12)]}, "not learning yet"),
        # A rise of 0.08 is less than three standard errors of this noise, and one of 1.6 is more.
        ({"reward": [0.01 * step + NOISE[step % 6] for step in range(12)]}, "not learning yet"),
        ({"reward": [0.2 * step + NOISE[step % 6] for step in range(12)]}, "learning"),
        ({"reward": [1.0 - 0.05 * step for step in range(12)]}, "not learning yet"),
        ({"reward": 0.0, "reward_std": 0.0}, "not learning yet"),
        ({"evaluation": [0.4, *[None] * 4, 0.3, *[None] * 5, 0.2]}, "not learning yet"),
        ({"evaluation": [0.2, *[None] * 4, 0.3, *[None] * 5, 0.4]}, "learning"),
        ({"mismatch_kl": 0.11}, "mismatched"),
        ({"mismatch_kl": [1e-3] * 11 + [5.0]}, "learning"),  # one outlier
        ({"alarm": [None] * 11 + ["mismatch_kl has risen to 1, 3.00 times"]}, "mismatched"),
        ({"alarm": "metrics.jsonl: No space left on device"}, "learning"),
        ({"effective_sample_size": 0.4}, "stale"),
        ({"off_policy_kl__1": 0.01, "off_policy_kl__2": 0.2}, "stale"),
        ({"dropped__stale": 5}, "stale"),  # per 8 trained
        ({"dropped__stale": 3}, "learning"),
        ({"truncated": 0.26}, "truncated"),
        ({"truncated": 0.25}, "learning"),
        ({"trainer_wait_s": 1.6, "step_s": 2.0}, "starved"),
        ({"trainer_wait_s": 1.4, "step_s": 2.0}, "learning"),
        ({"trainer_wait_s": 1.6, "step_s": 2.0, "mismatch_kl": 0.2}, "mismatched"),
        ({"reward": None, "loss": [2.0 - 0.1 * step for step in range(12)]}, "learning"),
        ({"reward": None, "loss": [2.0 + 0.1 * step for step in range(12)]}, "not learning yet"),
        ({"reward": "much", "truncated": float("nan"), "mismatch_kl": True}, "not learning yet"),
        ({"reward": None, "loss": [1e200, -1e200] * 6}, "not learning yet"),  # squares overflow
        ({"truncated": 10**400}, "learning"),  # no float is as large
        ({"mismatch_kl": 0.1, "off_policy_kl__1": 0.1, "effective_sample_size": 0.5}, "learning"),
        ({"dropped__stale": 4, "trainer_wait_s": 1.5, "step_s": 2.0}, "learning"),  # on the bounds
    ],
)
def test_the_name_of_the_verdict(columns, name):
    assert verdict(steps(**columns), {"groups_per_step": 8}).name == name


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"dropped__stale": 4.2}, "stale"),  # 0.525 per trained group; 0.4725 in eleven steps
        ({"alarm": "mismatch_kl has risen to 1, 3.00 times"}, "mismatched"),
    ],
)
def test_the_evaluation_of_the_final_weights_hides_no_fault(columns, name):
    """Its line has no metrics of a step."""
    found = [*steps(10, **columns), {"step": 10, "evaluation": 0.9, "evaluation_failed": 0}]

    assert verdict(found, {"groups_per_step": 8}).name == name


def test_the_reason_has_the_numbers():
    """The means of the first and the last four of twelve steps: 0.15 and 0.95."""
    found = verdict(steps(evaluation=[0.1, *[None] * 10, 0.9]), {})

    assert found.reason == "reward 0.15 → 0.95 over 12 steps, evaluation 0.1 → 0.9."


def test_the_worst_fault_comes_first_and_the_others_are_told():
    found = verdict(steps(truncated=0.5, mismatch_kl=0.5), {})

    assert found.name == "mismatched"
    assert found.reason == (
        "mismatch_kl is 0.5 nats (bound 0.1): sampler and trainer disagree. "
        "Also truncated: 50% of the replies are cut at a length limit (bound 25%). "
        "Also learning: reward 0.15 → 0.95 over 12 steps."
    )


@pytest.mark.parametrize("count", [0, 5])
def test_a_trend_needs_steps(count):
    found = verdict(steps(count), {})

    assert found.name == "not learning yet"
    assert found.reason == f"steps with a reward: {count}; a trend needs 6."


def test_only_the_last_steps_decide_whether_there_is_a_fault():
    early = steps(30, truncated=[0.9] * 20 + [0.0] * 10)

    assert verdict(early, {}).name == "learning"


def test_the_documentation_has_the_bounds(root):
    page = (root / "docs/runs.md").read_text()
    _, table = page.split("### The verdict")
    rows = re.findall(r"^\| `([\w/]+)`[^|]*\| [^|]+ \| ([\d.e-]+)[^|]* \|", table, re.MULTILINE)

    assert {name: float(bound) for name, bound in rows} == BOUNDS
    assert f"last {verdicts.RECENT} steps" in table
    assert f"{verdicts.TREND:g} standard errors" in table
    assert f"{verdicts.FEWEST_STEPS} steps" in table
