"""The guard against updates that aren't finite, in one process; test_parallel has several."""

import logging
import math

import pytest
import torch

from primerl import parallel

NAN = float("nan")


def test_finite_updates_are_allowed():
    guard = parallel.UpdateGuard(on_nonfinite="stop")

    assert guard.allows(torch.tensor(1.0), torch.tensor(2.0))
    assert guard.allows(-1e30, 0.0)
    assert guard.skipped == 0


@pytest.mark.parametrize("loss", [NAN, math.inf, torch.tensor(NAN), torch.tensor(-math.inf)])
def test_a_loss_that_is_not_finite_is_skipped_and_counted(loss, caplog):
    guard = parallel.UpdateGuard(on_nonfinite="skip")

    with caplog.at_level(logging.WARNING):
        assert not guard.allows(loss, 1.0)

    assert guard.skipped == 1
    assert "loss is not finite on 1 rank(s), the gradient norm on 0" in caplog.text
    assert guard.allows(0.0, 1.0)
    assert guard.skipped == 1


def test_a_gradient_that_is_not_finite_is_skipped():
    guard = parallel.UpdateGuard(on_nonfinite="skip")

    assert not guard.allows(1.0, torch.tensor(NAN))
    assert guard.skipped == 1


def test_stop_raises():
    guard = parallel.UpdateGuard(on_nonfinite="stop")

    with pytest.raises(RuntimeError, match="gradient norm on 1"):
        guard.allows(1.0, math.inf)


def test_too_many_skipped_updates_raise():
    guard = parallel.UpdateGuard(on_nonfinite="skip", max_in_a_row=3)

    for _ in range(2):
        assert not guard.allows(NAN, 1.0)
    assert guard.allows(1.0, 1.0)
    for _ in range(2):
        assert not guard.allows(NAN, 1.0)
    with pytest.raises(RuntimeError, match="after 2 skipped step"):
        guard.allows(NAN, 1.0)
    assert guard.skipped == 5


def test_a_skipped_update_leaves_the_weights_and_the_optimizer_alone():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    guard = parallel.UpdateGuard(on_nonfinite="skip")

    def step(scale):
        (scale * weight.square().sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
        if guard.allows(0.0, norm):
            optimizer.step()
        optimizer.zero_grad()

    step(1.0)
    before, moments = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
    step(NAN)

    assert torch.equal(weight, before)
    assert torch.equal(optimizer.state[weight]["exp_avg"], moments)
    step(1.0)
    assert weight.isfinite().all()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"on_nonfinite": "ignore"}, "'ignore'"), ({"max_in_a_row": 0}, "max_in_a_row is 0")],
)
def test_invalid_arguments_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        parallel.UpdateGuard(**options)


def test_sums_by_name_in_a_world_of_one():
    x = {"b": torch.tensor([[1.0, 2.0]], requires_grad=True), "a": torch.tensor(3)}

    total = parallel.all_sum(x)

    assert total["a"].item() == 3
    assert total["b"].tolist() == [[1.0, 2.0]]
    assert not total["b"].requires_grad
    assert parallel.all_sum({}) == {}
