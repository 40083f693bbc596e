"""Checks of one process that are columns of docs/families.md, and faults that they must show."""

import contextlib
import functools

import pytest
import torch

from primerl import fp8, replay
from primerl.replay.forcing import forced
from primerl.rollout.engines.transformers.recurrent_states import StateStep
from tools import family_checks


@pytest.mark.parametrize(("family", "replayed"), [("qwen3_moe", "pass"), ("llama", "")])
def test_replay_and_fp8(family, replayed):
    assert family_checks.replayed(family) == (replayed, "")
    assert family_checks.quantized(family) == ("pass", "")


def test_unsupported_families_are_refused_with_the_reason():
    for check, family, words in (
        (family_checks.replayed, "jetmoe", "no layers with routed experts whose module takes the"),
        (family_checks.replayed, "phimoe", "can't be forced: it does not choose experts by topk"),
        (family_checks.quantized, "gpt2", "GPT2LMHeadModel has no torch.nn.Linear layers"),
        (family_checks.quantized, "gpt_oss", "it can be trained, but not published: "),
    ):
        result, reason = check(family)
        assert result == "refused"
        assert words in reason


def test_what_a_pass_leaves_out_is_said():
    assert family_checks.quantized("llama4_text") == ("pass", family_checks.PLAIN_EXPERTS)
    assert family_checks.replayed("deepseek_v4") == ("pass", family_checks.LOOKED_UP)


def without_forcing(model, rows):
    return contextlib.nullcontext()


def of_the_first_token(model, rows):
    return forced(model, None if rows is None else rows[:1].expand_as(rows))


@contextlib.contextmanager
def without_gradients(model, rows):
    """The last router gets no gradient, except in the plain pass."""
    with forced(model, rows):
        router = model.model.layers[-1].mlp.gate.weight
        router.requires_grad_(rows is None)
        yield


@contextlib.contextmanager
def with_experts_that_are_changed_later(model, rows):
    yield
    if rows is not None:
        raise RuntimeError("other experts than those that were forced")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (without_forcing, "other routes did not reach the experts"),
        (of_the_first_token, "the model's own routes did not reach the experts"),
        (with_experts_that_are_changed_later, "other experts than those that were forced"),
        (without_gradients, "the model's own routes change its results by inf"),
    ],
)
def test_a_fault_of_forcing_is_found(monkeypatch, fault, reason):
    monkeypatch.setattr(replay, "forced", fault)
    assert family_checks.replayed("qwen3_moe") == ("FAIL", reason)


def test_a_checkpoint_of_other_values_is_found(monkeypatch):
    rounded = functools.partial(fp8.CheckpointQuantizer, dtype=torch.bfloat16)
    monkeypatch.setattr(fp8, "CheckpointQuantizer", rounded)
    result, reason = family_checks.quantized("qwen3_moe")
    assert result == "FAIL"
    assert "differ from the operands of their products" in reason


def test_layers_that_do_not_multiply_in_fp8_are_found(monkeypatch):
    monkeypatch.setattr(fp8, "convert_linears", lambda model, form: [])
    assert family_checks.quantized("llama") == ("FAIL", "logprobs don't change")


def test_a_state_that_is_lost_between_segments_is_found(monkeypatch):
    assert family_checks.sampled("qwen3_next") == ("pass", "")
    divide = StateStep._divide

    def without_states(step, device):
        """Forget the state of a request wherever several of its tokens follow."""
        return [
            (places, rows, count, resumes and places.shape[1] == 1)
            for places, rows, count, resumes in divide(step, device)
        ]

    monkeypatch.setattr(StateStep, "_divide", without_states)
    result, reason = family_checks.sampled("qwen3_next")
    assert result == "FAIL"
    assert "logprobs differ" in reason
