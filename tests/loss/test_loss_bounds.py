"""An accepted bound has an effect on some token, and not on all."""

import functools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from primerl import loss

LOG_RATIOS = torch.linspace(-40, 40, 161)
ROWS = len(LOG_RATIOS)
MASK, OWN_SEQUENCES = torch.ones(ROWS, dtype=torch.bool), torch.arange(ROWS)
ZEROS, ONES = torch.zeros(ROWS), torch.ones(ROWS)


def of_tokens(fn):
    return lambda **bound: fn(LOG_RATIOS, ZEROS, **bound)


def of_sequences(fn):
    return lambda **bound: fn(LOG_RATIOS, ZEROS, MASK, OWN_SEQUENCES, **bound)


def surrogate(fn, advantage):
    return lambda **bound: fn(LOG_RATIOS, ZEROS, advantage * ONES, **bound)[0]


def gspo(advantage, **bound):
    defaults = {"clip_low": 1.0, "clip_high": math.inf}
    rows = (LOG_RATIOS, ZEROS, advantage * ONES, MASK, OWN_SEQUENCES)
    return loss.gspo(*rows, **{**defaults, **bound})[0]


def tried(fn, **bound):
    """What a function returns; or None, and why it refuses."""
    try:
        return fn(**bound), ""
    except ValueError as error:
        return None, str(error)


# The function, its bound, and the value that says that there is none.
RATIO_BOUNDS = {
    "token_tis": (of_tokens(loss.token_tis), "cap", math.inf),
    "token_mis": (of_tokens(loss.token_mis), "cap", math.inf),
    "sequence_tis": (of_sequences(loss.sequence_tis), "cap", math.inf),
    "sequence_mis": (of_sequences(loss.sequence_mis), "cap", math.inf),
    "icepop, low": (functools.partial(of_tokens(loss.icepop), high=math.inf), "low", 0),
    "icepop, high": (functools.partial(of_tokens(loss.icepop), low=0), "high", math.inf),
    "geometric, low": (
        functools.partial(of_sequences(loss.geometric_rejection), high=math.inf), "low", 0
    ),
    "geometric, high": (
        functools.partial(of_sequences(loss.geometric_rejection), low=0), "high", math.inf
    ),
    "dual_clip": (surrogate(loss.clipped, -1.0), "dual_clip", None),
    "clipped, high": (surrogate(loss.clipped, 1.0), "clip_high", math.inf),
    "clipped, low": (surrogate(loss.clipped, -1.0), "clip_low", 1.0),
    "decoupled": (
        lambda **bound: loss.decoupled(LOG_RATIOS, ZEROS, ONES, ZEROS, **bound)[0],
        "clip_high",
        math.inf,
    ),
    "gspo": (functools.partial(gspo, 1.0), "clip_high", math.inf),
    "cispo, high": (surrogate(loss.cispo, 1.0), "clip_high", math.inf),
    "cispo, low": (
        functools.partial(surrogate(loss.cispo, 1.0), clip_high=math.inf), "clip_low", 1.0
    ),
}  # fmt: skip
BOUNDS = {"clip_high": lambda x: x - 1, "clip_low": lambda x: 1 - x}


@pytest.mark.parametrize("case", RATIO_BOUNDS)
@given(log_bound=st.floats(-60, 60))
@example(log_bound=-20.0)
@example(log_bound=20.0)
@example(log_bound=math.log(1e-10))
@example(log_bound=19.9)
def test_a_bound_of_ratios_that_is_accepted_takes_effect(case, log_bound):
    fn, name, off = RATIO_BOUNDS[case]
    value = BOUNDS.get(name, lambda x: x)(math.exp(log_bound))
    bounded, refusal = tried(fn, **{name: value})
    if bounded is None:
        allowed = {"clip_low": 0 <= value <= 1, "clip_high": value >= 0, "dual_clip": value > 1}
        assert abs(log_bound) > 19.9 or not allowed.get(name, True)
        assert f"{name}={value}" in refusal
    elif value != off:
        differs = bounded != fn(**{name: off})
        assert differs.any()
        assert not differs.all()


@given(log_bound=st.floats(-60, 60))
@example(log_bound=math.log(1e-10))
def test_a_threshold_of_veto_that_is_accepted_takes_effect(log_bound):
    threshold = math.exp(log_bound)
    kept, refusal = tried(of_sequences(loss.veto), threshold=threshold)
    if kept is None:
        assert abs(log_bound) > 19.9
        assert f"threshold={threshold}" in refusal
    else:
        assert 0 < kept.sum() < ROWS


SURE, NEVER = torch.tensor([0.0, -60.0, -1.0]), torch.tensor([-60.0, 0.0, -1.0])
SHIFT_BOUNDS = [
    ("mask_high", lambda **bound: loss.dppo(SURE, NEVER, torch.ones(3), **bound)[0]),
    ("mask_low", lambda **bound: loss.dppo(SURE, NEVER, -torch.ones(3), **bound)[0]),
    ("threshold", lambda **bound: loss.ipo(SURE, NEVER, torch.ones(3), **bound)[0]),
    ("mask_low", lambda **bound: loss.distill(SURE, NEVER, torch.zeros(3), **bound)[0]),
]


@pytest.mark.parametrize(("name", "fn"), SHIFT_BOUNDS)
@pytest.mark.parametrize("value", [0.0, 0.5, 0.999, 1.0, 1.5, 1e9])
def test_a_bound_of_probabilities_that_is_accepted_takes_effect(name, fn, value):
    bounded, refusal = tried(fn, **{name: value})
    if bounded is None:
        assert value >= 1
        assert f"{name}={value}" in refusal
    else:
        assert (bounded != fn(**{name: math.inf})).any()
