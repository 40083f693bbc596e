"""Every surrogate against tables computed by hand, and their common properties."""

import functools
import inspect
import math

import attrs
import pytest
import torch
from loss_cases import ELEMENTWISE, F64, SURROGATES, alone, random_rows

from primerl import loss

LN2, LN5 = math.log(2), math.log(5)
E20 = math.exp(20)
S1 = 1 / (1 + math.exp(-1))  # sigmoid(1)
S21 = 1 / (1 + math.exp(-1.05 * 2))  # sigmoid(1.05 * 2)

# Columns: p and mu, the probabilities by policy and sampler; the advantage A; the loss; its
# derivative by log p; whether the flag of the surrogate is set. Defaults where none are given.
TABLES = {
    "reinforce": (
        loss.reinforce,
        {},
        None,
        [
            (0.50, 0.25, 3.0, -6.0, -6.0, 0),
            (0.10, 0.40, 2.0, -0.5, -0.5, 0),
            (0.50, 0.25, -3.0, 6.0, 6.0, 0),
            (0.50, 0.25, 0.0, 0.0, 0.0, 0),
        ],
    ),
    "clipped": (
        loss.clipped,
        {},
        "clipped",
        [
            (0.44, 0.40, 2.0, -2.2, -2.2, 0),
            (0.50, 0.40, 2.0, -2.4, 0.0, 1),  # r = 1.25 is cut to 1.2
            (0.28, 0.40, 2.0, -1.4, -1.4, 0),  # r = 0.7: worse than before, so it is learned from
            (0.28, 0.40, -2.0, 1.6, 0.0, 1),  # r = 0.7 is cut to 0.8
            (0.50, 0.40, -2.0, 2.5, 2.5, 0),
            (0.80, 0.10, -2.0, 16.0, 16.0, 0),  # unbounded without a dual clip
            (0.50, 0.40, 0.0, 0.0, 0.0, 0),
        ],
    ),
    "clipped, bounds of their own": (
        loss.clipped,
        {"clip_low": 0.4, "clip_high": 0.28},
        "clipped",
        [
            (0.50, 0.40, 2.0, -2.5, -2.5, 0),
            (0.52, 0.40, 2.0, -2.56, 0.0, 1),  # 1.3 is cut to 1.28
            (0.28, 0.40, -2.0, 1.4, 1.4, 0),  # 0.7 is within
            (0.20, 0.40, -2.0, 1.2, 0.0, 1),  # 0.5 is cut to 0.6
        ],
    ),
    "clipped, dual": (
        loss.clipped,
        {"dual_clip": 3.0},
        "clipped",
        [
            (0.80, 0.20, -2.0, 6.0, 0.0, 1),  # r = 4 counts as 3
            (0.50, 0.20, -2.0, 5.0, 5.0, 0),
            (0.80, 0.20, 2.0, -2.4, 0.0, 1),
            (0.10, 0.20, -2.0, 1.6, 0.0, 1),
            (0.80, 0.20, 0.0, 0.0, 0.0, 0),
        ],
    ),
    "cispo": (
        loss.cispo,
        {},
        "clipped",
        [
            (0.50, 0.25, 3.0, 6 * LN2, -6.0, 0),
            (0.50, 0.05, 2.0, 10 * LN2, -10.0, 1),  # r = 10 is cut to 5
            (0.50, 0.05, -2.0, -10 * LN2, 10.0, 1),
            (0.20, 0.80, -2.0, -0.5 * LN5, 0.5, 0),  # nothing is cut from below
            (0.50, 0.05, 0.0, 0.0, 0.0, 1),
        ],
    ),
    "cispo, bounds of their own": (
        loss.cispo,
        {"clip_low": 0.25, "clip_high": 0.5},
        "clipped",
        [
            (0.50, 0.25, 2.0, 3 * LN2, -3.0, 1),
            (0.20, 0.80, 4.0, 3 * LN5, -3.0, 1),
            (0.50, 0.40, 4.0, 5 * LN2, -5.0, 0),
        ],
    ),
    "topr": (
        loss.topr,
        {},
        "clipped",
        [
            (0.50, 0.05, 3.0, 3 * LN2, -3.0, 0),
            (0.20, 0.80, 3.0, 3 * LN5, -3.0, 0),
            (0.50, 0.05, -3.0, -3 * LN2, 3.0, 1),  # r = 10 is cut to 1
            (0.20, 0.80, -4.0, -LN5, 1.0, 0),  # r = 1/4 tapers
            (0.50, 0.05, 0.0, 0.0, 0.0, 1),
        ],
    ),
    "sapo": (
        loss.sapo,
        {},
        None,
        [
            (0.50, 0.50, 3.0, -6.0, -3.0, 0),
            (0.50, 0.50, -1.0, 2 / 1.05, 1.0, 0),
            (0.50, 0.25, 1.0, -4 * S1, -8 * S1 * (1 - S1), 0),
            (0.75, 0.25, -1.0, 4 / 1.05 * S21, 12 * S21 * (1 - S21), 0),
            (0.50, 0.25, 0.0, 0.0, 0.0, 0),
        ],
    ),
    "sapo, gates of their own": (
        loss.sapo,
        {"gate_positive": 2.1, "gate_negative": 0.5},
        None,
        [
            (0.50, 0.25, 1.0, -4 / 2.1 * S21, -8 * S21 * (1 - S21), 0),
            (0.75, 0.25, -1.0, 8 * S1, 12 * S1 * (1 - S1), 0),
        ],
    ),
    "decoupled": (  # with proximal probabilities of 1/2: w = 1/(2 mu), u = 2 p
        lambda x, mu, advantages: loss.decoupled(x, mu, advantages, torch.full_like(x, -LN2)),
        {},
        "clipped",
        [
            (0.55, 0.25, 1.0, -2.2, -2.2, 0),
            (0.75, 0.25, 1.0, -2.4, 0.0, 1),
            (0.75, 1.00, 1.0, -0.6, 0.0, 1),
            (0.25, 0.25, -1.0, 1.6, 0.0, 1),
            (0.75, 0.25, -1.0, 3.0, 3.0, 0),
            (0.25, 0.25, 1.0, -1.0, -1.0, 0),
            (0.50, 0.01, 1.0, -50.0, -50.0, 0),  # w is not truncated
        ],
    ),
    "decoupled, bounds of their own": (
        lambda x, mu, advantages: loss.decoupled(
            x, mu, advantages, torch.full_like(x, -LN2), clip_low=0.6, clip_high=0.4
        ),
        {},
        "clipped",
        [(0.75, 0.25, 1.0, -2.8, 0.0, 1), (0.25, 0.25, -1.0, 1.0, 1.0, 0)],
    ),
    "dppo": (
        loss.dppo,
        {},
        "dropped",
        [
            (0.59, 0.40, 2.0, -2.95, -2.95, 0),
            (0.61, 0.40, 2.0, 0.0, 0.0, 1),
            (0.10, 0.40, 2.0, -0.5, -0.5, 0),
            (0.21, 0.40, -2.0, 1.05, 1.05, 0),
            (0.19, 0.40, -2.0, 0.0, 0.0, 1),
            (0.70, 0.40, -2.0, 3.5, 3.5, 0),
            (0.19, 0.40, 0.0, 0.0, 0.0, 1),
            (0.70, 0.40, 0.0, 0.0, 0.0, 0),
            (0.01, 0.001, 1.0, -10.0, -10.0, 0),  # ten times likelier, and hardly moved
            (1.00, 0.80, 1.0, -1.25, -1.25, 0),
        ],
    ),
    "dppo, bounds of their own": (
        loss.dppo,
        {"mask_low": 0.5, "mask_high": 0.0},
        "dropped",
        [
            (0.41, 0.40, 1.0, 0.0, 0.0, 1),
            (0.25, 0.50, -1.0, 0.5, 0.5, 0),
            (0.50, 1.00, -1.0, 0.5, 0.5, 0),  # exactly at the bound
            (0.49, 1.00, -1.0, 0.0, 0.0, 1),
            (0.50, 0.50, 1.0, -1.0, -1.0, 0),  # exactly at the bound
        ],
    ),
    "ipo": (
        loss.ipo,
        {},
        "dropped",
        [
            (0.49, 0.40, 2.0, -2.45, -2.45, 0),
            (0.51, 0.40, 2.0, 0.0, 0.0, 1),
            (0.51, 0.40, -2.0, 0.0, 0.0, 1),
            (0.31, 0.40, 2.0, -1.55, -1.55, 0),
            (0.29, 0.40, 2.0, 0.0, 0.0, 1),
            (0.29, 0.40, -2.0, 0.0, 0.0, 1),
        ],
    ),
    "ipo, a threshold of its own": (
        loss.ipo,
        {"threshold": 0.5},
        "dropped",
        [
            (1.00, 0.50, 2.0, -4.0, -4.0, 0),
            (0.50, 1.00, 2.0, -1.0, -1.0, 0),
            (0.49, 1.00, 2.0, 0.0, 0.0, 1),
        ],
    ),
    "distill": (  # A is the teacher's probability here
        lambda x, mu, teacher: loss.distill(x, mu, teacher.log()),
        {},
        "dropped",
        [
            (0.20, 0.40, 0.40, -0.5 * LN2, -0.5 * LN2, 0),
            (0.80, 0.40, 0.40, 2 * LN2, 2 * LN2, 0),  # moving up is never stopped
            (0.19, 0.40, 0.95, 0.0, 0.0, 1),
            (0.10, 0.40, 0.05, 0.0, 0.0, 1),
            (0.50, 0.40, 0.50, 0.0, 0.0, 0),
        ],
    ),
    "distill, a bound of its own": (
        lambda x, mu, teacher: loss.distill(x, mu, teacher.log(), mask_low=0.5),
        {},
        "dropped",
        [(0.50, 1.00, 0.25, 0.5 * LN2, 0.5 * LN2, 0), (0.49, 1.00, 0.49, 0.0, 0.0, 1)],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table(name):
    surrogate, hyperparameters, flag, rows = TABLES[name]
    columns = [torch.tensor(column, **F64) for column in zip(*rows, strict=True)]
    p, mu, advantages, expected, slope, flagged = columns
    logprobs = p.log().requires_grad_()

    per_token, aux = surrogate(logprobs, mu.log(), advantages, **hyperparameters)
    per_token.sum().backward()

    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(per_token.detach(), expected)
    close(logprobs.grad, slope)
    others = {"ref_kl"} if "distill" in name else set()
    assert aux.keys() == {"log_ratio_limited", *([flag] if flag else []), *others}
    assert not aux["log_ratio_limited"].any()
    if flag:
        assert aux[flag].tolist() == flagged.tolist()
    if others:
        close(aux["ref_kl"], p.log() - advantages.log())
    assert not any(value.requires_grad for value in aux.values())


def itself(logprobs, _):
    """A ratio that is exact, so that a bound can be hit."""
    return logprobs


@pytest.mark.parametrize(
    ("surrogate", "hyperparameters", "r", "advantage", "slope"),
    [
        (loss.clipped, {"clip_low": 0.25, "clip_high": 0.5}, 1.5, 2.0, -2.0),
        (loss.clipped, {"clip_low": 0.25, "clip_high": 0.5}, 0.75, -2.0, 2.0),
        (loss.clipped, {"dual_clip": 2.0}, 2.0, -2.0, 2.0),
        (loss.cispo, {"clip_low": 0.25, "clip_high": 0.5}, 1.5, 2.0, -3.0),
        (loss.cispo, {"clip_low": 0.25, "clip_high": 0.5}, 0.75, 2.0, -1.5),
        (loss.topr, {}, 1.0, -2.0, 2.0),
    ],
)
def test_a_ratio_exactly_at_a_clip_is_not_clipped(surrogate, hyperparameters, r, advantage, slope):
    x = torch.tensor([r], **F64, requires_grad=True)
    behavior = torch.tensor([0.0], **F64)

    per_token, aux = surrogate(
        x, behavior, torch.tensor([advantage], **F64), ratio=itself, **hyperparameters
    )
    per_token.sum().backward()

    assert aux["clipped"].tolist() == [0]
    assert x.grad.tolist() == [slope]


@pytest.mark.parametrize("name", sorted(set(ELEMENTWISE) - {"decoupled", "distill"}))
def test_another_ratio_can_be_passed(name):
    """Half the ratio at r = 1: by its value where r is in the loss, by its weight elsewhere."""
    surrogate = getattr(loss, name.split(",")[0])
    x = torch.tensor([-LN2], **F64)

    def halved(logprobs, behavior_logprobs):
        return 0.5 * loss.token_ratio(logprobs, behavior_logprobs)

    per_token = surrogate(x, x, torch.tensor([-1.0], **F64), ratio=halved)[0]

    expected = {
        "reinforce": 0.5,
        "clipped": 0.8,
        "cispo": -0.5 * LN2,
        "topr": -0.5 * LN2,
        "sapo": 4 / 1.05 / (1 + math.exp(1.05 / 2)),
        "dppo": 0.5,
        "ipo": 0.5,
    }[surrogate.__name__]
    assert per_token.item() == pytest.approx(expected, rel=1e-12)


def test_the_other_ratio_is_used_where_two_are_needed():
    x = torch.tensor([-1.0], **F64)

    def tripled(logprobs, behavior_logprobs):
        return 3 * loss.token_ratio(logprobs, behavior_logprobs)

    one = torch.tensor([1.0], **F64)
    assert loss.decoupled(x, x, -one, x, ratio=tripled)[0].item() == pytest.approx(9)
    assert loss.distill(x, x, x - 1, ratio=tripled)[0].item() == pytest.approx(3)


@pytest.mark.parametrize("name", sorted(set(SURROGATES) - {"distill"}))
def test_on_policy_the_gradient_is_reinforce(name):
    logprobs, rows = random_rows(seed=1)
    rows = attrs.evolve(rows, behavior=logprobs, proximal=logprobs)
    x = logprobs.clone().requires_grad_()

    per_token, aux = SURROGATES[name](x, rows, alone)
    per_token[rows.loss_mask].sum().backward()

    expected = torch.where(rows.loss_mask, -rows.advantages, 0.0)
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)
    flags = {key: value for key, value in aux.items() if key != "ref_kl"}
    assert not any(value[rows.loss_mask].any() for value in flags.values())


def test_on_policy_the_gradient_of_distill_is_reinforce_with_the_teachers_advantage():
    logprobs, rows = random_rows(seed=1)
    x = logprobs.clone().requires_grad_()

    loss.distill(x, logprobs, rows.ref)[0].sum().backward()

    torch.testing.assert_close(x.grad, logprobs - rows.ref, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["reinforce", "clipped", "clipped, dual", "sapo", "decoupled"])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_agree_with_finite_differences(name, seed):
    logprobs, rows = random_rows(lengths=(40,), seed=seed)

    def value(x):
        return SURROGATES[name](x, rows, alone)[0]

    assert torch.autograd.gradcheck(value, logprobs.requires_grad_())


@pytest.mark.parametrize("name", ["dppo", "ipo"])
def test_gradients_inside_and_outside_the_trust_region_agree_with_finite_differences(name):
    logprobs, rows = random_rows(lengths=(60,), seed=2)

    def value(x):
        return SURROGATES[name](x, rows, alone)[0]

    dropped = SURROGATES[name](logprobs, rows, alone)[1]["dropped"]
    assert 5 < dropped.sum() < 55
    assert torch.autograd.gradcheck(value, logprobs.requires_grad_())


@pytest.mark.parametrize("name", ["cispo", "topr"])
def test_gradients_agree_with_finite_differences_where_the_weight_is_constant(name):
    """Finite differences would see the weight move, which the stop-gradient must not."""
    logprobs, rows = random_rows(lengths=(40,), seed=3)
    weight = (logprobs - rows.behavior).exp()

    def value(x, ratio):
        return getattr(loss, name)(x, rows.behavior, rows.advantages, ratio=ratio)[0]

    x = logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value(x, lambda *_: weight), x)
    (held,) = torch.autograd.grad(value(x, lambda *_: weight).sum(), x)
    (own,) = torch.autograd.grad(value(x, loss.token_ratio).sum(), x)
    torch.testing.assert_close(own, held, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_distill_by_formula():
    """``-(log ref - log p) r``, as if the factor were a constant."""
    logprobs, rows = random_rows(lengths=(40,), seed=4)
    x = logprobs.clone().requires_grad_()

    loss.distill(x, rows.behavior, rows.ref, mask_low=math.inf)[0].sum().backward()

    expected = (logprobs - rows.ref) * (logprobs - rows.behavior).exp()
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


# Surrogate -> loss and derivative where log p - log mu is 25 and where it is -25; log p is -5 in
# the first and -30 in the second, A is -1, the reference agrees with mu.
BEYOND = {
    "reinforce": [(E20, 0.0), (1 / E20, 0.0)],
    "clipped": [(E20, 0.0), (0.8, 0.0)],
    "clipped, dual": [(1.5, 0.0), (0.8, 0.0)],
    "cispo": [(-1.2 * 5, 1.2), (-0.8 * 30, 0.8)],  # no token loses its gradient
    "topr": [(-5.0, 1.0), (-30 / E20, 1 / E20)],
    "sapo": [(4 / 1.05, 0.0), (4 / 1.05 / (1 + math.exp(1.05)), 0.0)],
    "dppo": [(E20, 0.0), (1 / E20, 0.0)],
    "ipo": [(E20, 0.0), (1 / E20, 0.0)],
    "distill": [(25 * E20, 0.0), (-25 / E20, 0.0)],
}


@pytest.mark.parametrize("name", BEYOND)
def test_an_extreme_ratio_is_clamped_and_counted(name):
    mu = torch.tensor([-30.0, -5.0, -1.0], **F64)
    logprobs = torch.tensor([-5.0, -30.0, -1.0], **F64, requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, 0.0], **F64)
    rows = attrs.evolve(
        random_rows(lengths=(3,))[1], behavior=mu, advantages=advantages, proximal=mu, ref=mu
    )

    per_token, aux = SURROGATES[name](logprobs, rows, alone)
    per_token.sum().backward()

    expected, slope = zip(*BEYOND[name], (0.0, 0.0), strict=True)
    assert per_token.tolist() == pytest.approx(expected, rel=1e-7)
    assert logprobs.grad.tolist() == pytest.approx(slope, rel=1e-9)
    assert aux["log_ratio_limited"].tolist() == [1, 1, 0]


def test_decoupled_counts_an_extreme_ratio_of_either_kind():
    behavior = torch.tensor([-30.0, -5.0, -5.0, -5.0], **F64)
    proximal = torch.tensor([-5.0, -5.0, -30.0, -5.0], **F64)
    logprobs = torch.tensor([-5.0, -30.0, -5.0, -5.0], **F64, requires_grad=True)

    per_token, aux = loss.decoupled(logprobs, behavior, torch.ones(4, **F64), proximal)
    per_token.sum().backward()

    assert aux["log_ratio_limited"].tolist() == [1, 1, 1, 0]
    expected = [-E20, -1 / E20, -1.2 / E20, -1.0]
    assert per_token.tolist() == pytest.approx(expected, rel=1e-9)
    assert logprobs.grad.tolist() == pytest.approx([-E20, 0.0, 0.0, -1.0], rel=1e-9)


@pytest.mark.parametrize(("gap", "limited"), [(19.999, 0), (20.001, 1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_ratio_is_clamped_from_twenty_on(gap, limited, sign):
    x = torch.tensor([sign * gap - 64.0], **F64, requires_grad=True)
    mu = torch.tensor([-64.0], **F64)

    per_token, aux = loss.reinforce(x, mu, torch.tensor([-1.0], **F64))
    per_token.sum().backward()

    ratio = math.exp(sign * min(gap, 20.0))
    assert per_token.item() == pytest.approx(ratio, rel=1e-12)
    assert x.grad.item() == pytest.approx(0 if limited else ratio, rel=1e-12)
    assert aux["log_ratio_limited"].item() == limited


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_dtypes(name, given, computed):
    logprobs, rows = random_rows(dtype=given)
    x = logprobs.requires_grad_()

    per_token, aux = SURROGATES[name](x, rows, alone)
    per_token[rows.loss_mask].sum().backward()

    assert per_token.dtype == computed
    assert {value.dtype for value in aux.values()} == {computed}
    assert x.grad.dtype == given
    floats = ("behavior", "advantages", "proximal", "ref")
    exact = attrs.evolve(rows, **{field: getattr(rows, field).double() for field in floats})
    expected = SURROGATES[name](x.detach().double(), exact, alone)[0]
    torch.testing.assert_close(
        per_token.detach().double()[rows.loss_mask],
        expected[rows.loss_mask],
        rtol=1e-12 if computed == torch.float64 else 1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("fn", "defaults"),
    [
        (loss.clipped, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
        (loss.gspo, {"clip_low": 3e-4, "clip_high": 4e-4}),
        (loss.cispo, {"clip_low": 1.0, "clip_high": 4.0}),
        (loss.sapo, {"gate_positive": 1.0, "gate_negative": 1.05}),
        (loss.decoupled, {"clip_low": 0.2, "clip_high": 0.2}),
        (loss.dppo, {"mask_low": 0.2, "mask_high": 0.2}),
        (loss.ipo, {"threshold": 0.1}),
        (loss.distill, {"mask_low": 0.2}),
    ],
)
def test_hyperparameters_are_keywords_with_the_documented_defaults(fn, defaults):
    parameters = inspect.signature(fn).parameters

    for name, value in defaults.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == value


NAN = float("nan")


def _rows_of(fn):
    """As many rows as the function takes tensors."""
    one = torch.tensor([-1.0])
    tensors = {
        "loss_mask": torch.tensor([True]),
        "sequence_ids": torch.tensor([0]),
    }
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [n for n, p in inspect.signature(fn).parameters.items() if p.kind is positional]
    return [tensors.get(name, one) for name in names]


@pytest.mark.parametrize(
    ("fn", "hyperparameters"),
    [
        *((fn, {"clip_low": low}) for fn in (loss.clipped, loss.gspo, loss.cispo, loss.decoupled)
          for low in (-0.1, 1.1, NAN)),
        *((fn, {"clip_high": high}) for fn in (loss.clipped, loss.gspo, loss.cispo, loss.decoupled)
          for high in (-0.1, NAN)),
        *((loss.clipped, {"dual_clip": c}) for c in (1.0, 0.5, -1.0, NAN)),
        *((loss.sapo, {gate: tau}) for gate in ("gate_positive", "gate_negative")
          for tau in (0.0, -1.0, NAN)),
        *((loss.dppo, {bound: x}) for bound in ("mask_low", "mask_high") for x in (-0.1, NAN)),
        *((loss.ipo, {"threshold": x}) for x in (-0.1, NAN)),
        *((loss.distill, {"mask_low": x}) for x in (-0.1, NAN)),
    ],
)  # fmt: skip
def test_hyperparameters_out_of_range_are_refused(fn, hyperparameters):
    ((name, value),) = hyperparameters.items()

    with pytest.raises(ValueError, match=f"{name}={value}.*expected"):
        fn(*_rows_of(fn), **hyperparameters)


@pytest.mark.parametrize(
    ("fn", "hyperparameters"),
    [
        (loss.clipped, {"clip_low": 0.0, "clip_high": 0.0}),
        (loss.clipped, {"clip_low": 1.0, "clip_high": float("inf")}),
        (loss.cispo, {"clip_low": 0.0, "clip_high": 0.0}),
        (loss.dppo, {"mask_low": 0.0, "mask_high": 0.0}),
        (loss.ipo, {"threshold": 0.0}),
        (loss.distill, {"mask_low": 0.0}),
    ],
)
def test_hyperparameters_at_the_ends_of_their_ranges_are_accepted(fn, hyperparameters):
    assert fn(*_rows_of(fn), **hyperparameters)[0].isfinite().all()


def test_topr_learns_a_good_token_in_full_however_small_its_advantage():
    x = torch.tensor([-1.0], requires_grad=True)

    per_token, aux = loss.topr(x, torch.tensor([-2.0]), torch.tensor([0.5]))
    per_token.sum().backward()

    assert x.grad.item() == -0.5
    assert aux["clipped"].item() == 0
