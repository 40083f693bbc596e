"""Losses and gradients of one step over four gloo ranks, documents whole or split; one launch."""

import json

import pytest
from forked_ranks import forked_ranks
from loss_cases import BY_SEQUENCE, RECIPES, SEQUENCE_CORRECTIONS

pytestmark = pytest.mark.thorough

RANKS = 4
SCENARIOS = [
    "documents whole, 2 ranks",
    "documents whole, 4 ranks",
    "fewer documents than ranks",
    "documents split, 2 ranks",
    "documents split, 4 ranks",
    "rows dealt out, 4 ranks",
    "ranks with nothing to train",
    "2 replicas of 2 ranks that share documents",
]
CONTROL = "control: split, but not summed"


@pytest.fixture(scope="module")
def found(root, tmp_path_factory):
    """What tests/ranks/loss_reductions.py found on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    script = root / "tests/ranks/loss_reductions.py"
    done = forked_ranks(script, folder, ranks=RANKS, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Warning" not in done.stderr, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_loss_and_gradient_are_those_of_one_process(found, scenario):
    for rank_found in found:
        assert rank_found[scenario].keys() == {str(recipe) for recipe in RECIPES}
        for recipe, (mean, slope, size) in rank_found[scenario].items():
            assert mean <= 1e-12, recipe
            assert slope <= 1e-12, recipe
            assert size > 1e-3 or scenario == "fewer documents than ranks", recipe


def test_sequence_losses_need_the_sum_over_ranks(found):
    """The others are correct without it."""
    for recipe in RECIPES:
        surrogate, correction, reduction = recipe
        needed = (
            surrogate in BY_SEQUENCE
            or correction in SEQUENCE_CORRECTIONS
            or reduction == "sequence_mean"
        )
        slope = found[0][CONTROL][str(recipe)][1]
        assert slope > 1e-4 if needed else slope <= 1e-12, recipe


def test_every_scenario_is_covered(found):
    assert found[0].keys() == {*SCENARIOS, CONTROL}
