"""The gate by hand, then by simulation: what it flags, and what it must not."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl.track import MismatchGate

LEVEL = 2e-4
STEPS = 20_000


def after(values, gate=None):
    gate = gate or MismatchGate()
    for value in values:
        gate = gate.after(value)
    return gate


def alarms(values):
    """How many alarms begin."""
    gate, count = MismatchGate(), 0
    for value in values:
        before, gate = gate, gate.after(value)
        count += gate.alarming and not before.alarming
    return count


def lognormal(rng, count, s):
    return np.exp(s * rng.standard_normal(count))


def gamma(rng, count, s):
    return rng.gamma(1 / s**2, s**2, count)


def heavy_tailed(rng, count, s):
    """Student's t with 4 degrees of freedom on the logarithmic scale, of about the same core."""
    return np.exp(0.8 * s * rng.standard_t(4, count))


def with_wild_steps(rng, count, s):
    """One step in fifty is wild: 2.7 times on average, often 10 times."""
    wild = (rng.random(count) < 0.02) * rng.exponential(1.0, count)
    return np.exp(s * rng.standard_normal(count) + wild)


SPREADS = [lognormal, gamma, heavy_tailed, with_wild_steps]


def drifting(count, rate):
    """A level that climbs and falls again by ``rate`` in each step, 400 steps each way."""
    return LEVEL * np.exp(rate * np.abs(np.arange(count) % 800 - 400.0))


# ---- by hand ----


def test_a_level_that_stays_raises_no_alarm_and_a_rise_does_at_its_second_step():
    gate = after([LEVEL] * 30)
    assert gate.alarm is None
    assert gate.ratio == 1

    gate = gate.after(1.5 * LEVEL)
    assert gate.alarm is None, "one step may be wild"
    gate = gate.after(1.5 * LEVEL)
    assert "risen to 0.0003, 1.50 times the 0.0002" in gate.alarm


def test_the_alarm_stays_while_the_rise_does_and_ends_with_it():
    raised = after([LEVEL] * 30 + [1.5 * LEVEL] * 500)
    assert raised.alarm
    assert max(raised.baseline) == LEVEL, "the baseline stands still"
    assert after([LEVEL] * 2, raised).alarm is None


def test_one_wild_step_is_none_and_hides_none():
    assert alarms(([LEVEL] * 9 + [100 * LEVEL]) * 20) == 0
    gate = after([LEVEL] * 30 + [1.5 * LEVEL, 0.1 * LEVEL, 1.5 * LEVEL])
    assert gate.alarm


def test_a_fall_is_no_alarm():
    assert alarms([LEVEL] * 50 + [LEVEL / 10] * 50) == 0


def test_nothing_is_judged_before_the_baseline_is_there():
    gate = after([LEVEL] * 10 + [100 * LEVEL] * 8)
    assert gate.ratio is None
    assert gate.spread is None
    assert gate.alarm is None


def test_a_step_without_a_value_changes_nothing():
    gate = after([LEVEL] * 30)
    assert gate.after(None) == gate
    assert after([LEVEL, None] * 30 + [2 * LEVEL, None, 2 * LEVEL]).alarm


def test_zeros_and_what_is_below_rounding_count_as_the_floor():
    assert alarms([0.0] * 50 + [1e-13, 5e-13] * 50 + [-1e-16] * 10) == 0
    assert after([0.0] * 30 + [1e-6] * 2).alarm


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logprobs_that_are_no_numbers_are_a_rise(bad):
    assert after([LEVEL] * 30 + [bad] * 2).alarm
    assert after([LEVEL] * 30 + [bad]).alarm is None
    assert "the most that rounding explains" in after([bad] * 40).alarm


def test_the_spread_is_that_of_the_logarithms():
    rng = np.random.default_rng(0)
    gate = after(LEVEL * lognormal(rng, 4000, 0.1), MismatchGate(window=4000))
    assert gate.spread == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("change", [{"warm_up": 2}, {"warm_up": 40}, {"floor": 0.0}])
def test_numbers_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match="expected"):
        MismatchGate(**change)


@given(
    values=st.lists(
        st.none() | st.floats(0, 10) | st.sampled_from([math.nan, math.inf]), max_size=60
    ),
    cut=st.integers(0, 60),
)
def test_it_goes_on_from_its_state_as_if_nothing_had_been(values, cut):
    whole = after(values, MismatchGate(window=8, warm_up=4))
    state = json.loads(json.dumps(after(values[:cut], MismatchGate(window=8, warm_up=4)).state()))
    assert after(values[cut:], MismatchGate(**state)) == whole


# ---- by simulation ----


@pytest.mark.thorough
@pytest.mark.parametrize("s", [0.03, 0.08])
@pytest.mark.parametrize("noise", SPREADS)
def test_at_most_one_false_alarm_in_1000_clean_steps_while_training_drifts(noise, s):
    rng = np.random.default_rng(1)
    values = drifting(STEPS, math.log(1.5) / 200) * noise(rng, STEPS, s)

    assert alarms(values.tolist()) <= STEPS / 1000


@pytest.mark.thorough
@pytest.mark.parametrize("s", [0.15, 0.5])
@pytest.mark.parametrize("noise", [lognormal, gamma])
def test_wide_noise_makes_it_slower_not_louder(noise, s):
    rng = np.random.default_rng(2)
    values = LEVEL * noise(rng, STEPS, s)

    assert alarms(values.tolist()) <= STEPS / 1000


@pytest.mark.thorough
@pytest.mark.parametrize("s", [0.03, 0.08])
@pytest.mark.parametrize("noise", SPREADS)
def test_a_sustained_rise_by_half_is_flagged_within_3_steps(noise, s):
    rng = np.random.default_rng(3)
    caught = 0
    for _ in range(200):
        values = LEVEL * noise(rng, 60, s)
        values[57:] *= 1.5
        gate, flagged = after(values[:57].tolist()), False
        for value in values[57:].tolist():
            gate = gate.after(value)
            flagged |= gate.alarming
        caught += flagged

    assert caught >= 0.99 * 200


def test_a_mismatch_that_was_there_from_the_start_is_an_alarm_after_three_steps():
    gate = MismatchGate()
    alarms = []
    for value in (0.59, 0.61, 0.6, 0.58, 0.6):
        gate = gate.after(value)
        alarms.append(gate.alarm)

    assert alarms[:2] == [None, None]
    assert all("above 0.1, the most that rounding explains" in alarm for alarm in alarms[2:])
    assert after([0.59] * 40, MismatchGate(bound=2.0)).alarm is None, "it is relative otherwise"


def test_one_wild_step_at_the_start_is_no_alarm():
    assert after([5.0, 0.004, 0.005, 0.004], MismatchGate()).alarm is None
