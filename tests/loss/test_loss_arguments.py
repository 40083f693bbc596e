"""What callers may get wrong: every tensor argument of every function, with and without the hook.

The tests run under jaxtyping's import hook, whose errors must not come before those for users. The
last test makes the same mistakes in a process without it.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import primerl
from primerl import loss
from primerl.loss.diagnostics import token_statistics

ROWS = 3
FLOATS = torch.tensor([-1.0, -2.0, -0.5])
BOOLS = torch.tensor([True, False, True])
INTEGERS = torch.tensor([0, 0, 1])
KINDS = {"loss_mask": BOOLS, "mask": BOOLS, "sequence_ids": INTEGERS, "versions": INTEGERS}
OPTIONS = {"denom": 2.0, "length": 5.0, "version": 0, "max_staleness": 1}
# Of the sampler or of another model: never NaN, except in masked rows if the function has a mask.
DATA = {"behavior_logprobs", "advantages", "proximal_logprobs", "ref_logprobs", "other"}
HEADS = {"model_logprobs", "model_logprobs_and_entropy", "token_logprobs", "linear_logprobs"}
TOP_K = {"model_candidate_logprobs", "model_top_k_logprobs", "top_k_forward_kl"}  # in test_top_k.py
NOT_CHECKED_HERE = {*HEADS, *TOP_K, "Statistics"}  # test_linear_logprobs.py checks the heads
FUNCTIONS = {name: getattr(loss, name) for name in loss.__all__ if name not in NOT_CHECKED_HERE}
FUNCTIONS["token_statistics"] = token_statistics  # what loss.Statistics.add calls


def arguments(name):
    """Tensors that the function accepts, by argument, and its other arguments."""
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    tensors = {n: KINDS.get(n, FLOATS) for n, p in parameters.items() if p.kind is positional}
    if "entropy" in parameters:
        tensors["entropy"] = FLOATS
    return tensors, {n: value for n, value in OPTIONS.items() if n in parameters}


def wrong(name):
    """Every mistake: the argument, what is passed instead, and what the error must say."""
    tensors, _ = arguments(name)
    first = next(iter(tensors))
    for argument, x in tensors.items():
        beside = "" if argument == first else rf"but {first} has shape \(3,\): "
        yield argument, x[None], rf"{argument} has shape \(1, 3\), {beside}expected \[t\]"
        yield argument, x[0], rf"{argument} has shape \(\), {beside}expected \[t\]"
        yield argument, x.tolist(), f"{argument} is of type list, expected a torch tensor"
        yield argument, None, f"{argument} is of type NoneType, expected a torch tensor"
        others = {torch.complex64: "complex64", torch.bool: "bool", torch.int64: "int64"}
        for dtype, text in others.items():
            if x.dtype != dtype:
                yield argument, x.to(dtype), f"{argument} has dtype torch.{text}, expected an? "
        if x is INTEGERS:
            for dtype in (torch.uint8, torch.int8, torch.int16):
                yield argument, x.to(dtype), f"{argument} has dtype {dtype}, expected an int32 or"
        if argument != first:
            both = rf"{argument} has shape \(2,\), but {first} has shape \(3,\): expected the same"
            yield argument, x[:2], both
        elif len(tensors) > 1:
            second = list(tensors)[1]
            both = rf"{second} has shape \(3,\), but {first} has shape \(2,\): expected the same"
            yield argument, x[:2], both
        if argument in DATA:
            for number in ("nan", "inf", "-inf"):
                bad = x.clone()
                bad[2] = float(number)
                yield argument, bad, rf"{argument}\[2\] is {number} \(1 of 3 rows"
        if argument == "sequence_ids":
            yield (
                argument,
                x - 1,
                "sequence_ids contains -1; expected document numbers from 0",
            )


MISTAKES = [
    (name, argument, value, message)
    for name in FUNCTIONS
    for argument, value, message in wrong(name)
    if not (argument == "entropy" and value is None)
]


def refusal(name, argument, value):
    tensors, options = arguments(name)
    tensors[argument] = value
    entropy = {"entropy": tensors.pop("entropy")} if "entropy" in tensors else {}
    try:
        FUNCTIONS[name](*tensors.values(), **options, **entropy)
    except ValueError as error:
        return str(error)
    return "no ValueError"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_a_mistake_nothing_is_refused(name):
    tensors, options = arguments(name)

    FUNCTIONS[name](**tensors, **options)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mistake_is_named(name):
    mistakes = [rest for owner, *rest in MISTAKES if owner == name]
    assert len(mistakes) >= 5

    for argument, value, message in mistakes:
        assert re.match(message, refusal(name, argument, value)), (argument, value, message)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_by_keyword_are_checked_too(name):
    tensors, options = arguments(name)

    for argument in tensors:
        with pytest.raises(ValueError, match=f"{argument} is of type list"):
            FUNCTIONS[name](**(tensors | {argument: [1.0]}), **options)


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if "sequence_ids" in arguments(name)[0]]
)
def test_data_of_masked_rows_may_be_anything(name):
    tensors, options = arguments(name)
    for argument in DATA & tensors.keys():
        tensors[argument] = tensors[argument].where(tensors["loss_mask"], float("nan"))

    FUNCTIONS[name](**tensors, **options)


def test_the_first_of_two_bad_arguments_is_named():
    """In the order of the arguments, whatever the seed of hashes."""
    bad = torch.full((ROWS,), float("nan"))

    with pytest.raises(ValueError, match=r"^behavior_logprobs\[0\] is nan \(3 of 3 rows"):
        loss.decoupled(FLOATS, bad, bad, bad)


def test_int32_ids_and_versions_are_accepted():
    ids = INTEGERS.int()

    assert loss.sequence_mean(FLOATS, BOOLS, ids, denom=2).item() == pytest.approx(-0.75)
    assert loss.mismatch_kl(FLOATS, FLOATS, BOOLS, ids, version=0)[1].item() == 1


def test_the_rows_of_aux_must_fit():
    statistics = loss.Statistics(version=0)

    with pytest.raises(ValueError, match=r"clipped has shape \(2,\), but loss_mask has .* \(3,\)"):
        statistics.add(FLOATS, FLOATS, BOOLS, INTEGERS, aux={"clipped": FLOATS[:2]})


def test_an_optional_tensor_may_be_none():
    statistics = loss.Statistics(version=0)
    statistics.add(FLOATS, FLOATS, BOOLS, INTEGERS, loss=None, entropy=None, aux=None)

    assert "entropy" not in statistics.summary()


def test_missing_and_surplus_arguments_are_pythons_own_errors():
    with pytest.raises(TypeError, match="advantages"):
        loss.clipped(FLOATS, FLOATS)
    with pytest.raises(TypeError, match="positional"):
        loss.clipped(FLOATS, FLOATS, FLOATS, 0.2)
    with pytest.raises(TypeError, match="clip_lo"):
        loss.clipped(FLOATS, FLOATS, FLOATS, clip_lo=0.2)


@pytest.mark.thorough
def test_without_the_hook_the_errors_are_the_same():
    tests = Path(__file__).parent
    helpers = tests.parent / "helpers"
    root = Path(primerl.__file__).parent.parent
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import test_loss_arguments as t; t.main()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tests), str(helpers)])},
        cwd=tests,
        capture_output=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )

    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout) == refusals()


def refusals():
    return [refusal(name, argument, value) for name, argument, value, _ in MISTAKES]


def main():
    print(json.dumps(refusals()))


def test_a_ratio_of_another_shape_is_refused():
    x = torch.tensor([-1.0, -2.0, -3.0])

    for surrogate in (loss.reinforce, loss.clipped, loss.dppo, loss.cispo):
        with pytest.raises(ValueError, match=r"ratio returned shape \(\), but logprobs .* \(3,\)"):
            surrogate(x, x, x, ratio=lambda p, q: (p - q).exp().mean())


def test_ids_that_are_no_numbers_of_documents_are_refused():
    x, mask = torch.tensor([-1.0, -2.0]), torch.tensor([True, True])

    with pytest.raises(
        ValueError,
        match="sequence_ids contains 1099511627776; expected document numbers from 0 to 16777215",
    ):
        loss.sequence_ratio(x, x, mask, torch.tensor([0, 2**40]))


def test_an_all_sum_that_returns_nothing_is_refused():
    x, mask = torch.tensor([-1.0, -2.0]), torch.tensor([True, True])

    with pytest.raises(
        ValueError, match="all_sum returned None; expected a tensor, like parallel.all_sum"
    ):
        loss.sequence_ratio(x, x, mask, torch.tensor([0, 0]), all_sum=lambda x: None)


@pytest.mark.parametrize("denom", [6, 6.0, np.int64(6), np.float32(6), torch.tensor(6)])
def test_a_denominator_may_be_any_number(denom):
    x, mask = torch.tensor([1.0, 2.0]), torch.tensor([True, True])

    assert loss.token_mean(x, mask, denom=denom).item() == 0.5
    with pytest.raises(ValueError, match=r"denom has shape \(1,\); expected a single number"):
        loss.token_mean(x, mask, denom=torch.tensor([6]))


def test_inputs_from_the_sampler_have_no_gradient():
    """Forgetting to detach would give a ratio whose gradient is 0."""
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0])

    for surrogate in (loss.reinforce, loss.clipped, loss.cispo, loss.dppo, loss.ipo, loss.sapo):
        (gradient,) = torch.autograd.grad(surrogate(x, x, advantages)[0].sum(), x)
        torch.testing.assert_close(gradient, -advantages)
