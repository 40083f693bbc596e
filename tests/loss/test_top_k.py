"""Distillation by top tokens: against sums over the whole vocabulary, and logits in full."""

import math

import numpy as np
import pytest
import torch
from loss_cases import F64
from tensor_sizes import Sizes

from primerl import loss, testing
from primerl.loss import linear_head_tiles

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

LENGTHS = [5, 1, 9, 5, 12]


def test_by_hand():
    """A teacher of 1/2, 1/4 and 1/4 for the rest; a policy of 1/4, 1/4 and 1/2."""
    q = torch.tensor([[0.5, 0.25]], **F64).log()
    p = torch.tensor([[0.25, 0.25]], **F64).log().requires_grad_()

    per_token, aux = loss.top_k_forward_kl(p, q)
    per_token.sum().backward()

    assert per_token.item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), rel=1e-12)
    # -q for each token, and through the rest: p q_rest / p_rest, p = 1/4.
    assert p.grad[0].tolist() == pytest.approx([-0.5 + 0.125, -0.25 + 0.125], rel=1e-12)
    assert aux["ref_tail"].tolist() == pytest.approx([0.25], rel=1e-12)


def distributions(seed, *, rows=6, vocabulary=11, spread=1.5):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(spread * rng.standard_normal((rows, vocabulary))).requires_grad_()
    log_q = torch.from_numpy(spread * rng.standard_normal((rows, vocabulary))).log_softmax(-1)
    return logits, log_q


def of_top_k(logits, log_q, k):
    """The loss of each row, and the gradient of their sum in the logits."""
    top, ids = log_q.topk(k)
    per_token, _ = loss.top_k_forward_kl(logits.log_softmax(-1).gather(1, ids), top)
    (gradient,) = torch.autograd.grad(per_token.sum(), logits)
    return per_token.detach(), gradient


def full_sum(logits, log_q):
    """``KL(q || p)`` over the whole vocabulary, and its gradient."""
    divergence = (log_q.exp() * (log_q - logits.log_softmax(-1))).sum(1)
    (gradient,) = torch.autograd.grad(divergence.sum(), logits)
    return divergence.detach(), gradient


@pytest.mark.parametrize("seed", range(3))
def test_of_the_whole_vocabulary_it_is_the_full_sum(seed):
    logits, log_q = distributions(seed)

    value, gradient = of_top_k(logits, log_q, 11)
    full, of_full = full_sum(logits, log_q)

    torch.testing.assert_close(value, full, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, of_full, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_of_top_k_the_value_is_that_of_the_tokens_and_the_rest(k):
    logits, log_q = distributions(0)

    value, gradient = of_top_k(logits, log_q, k)

    p, q = logits.detach().softmax(-1).numpy(), log_q.exp().numpy()
    _, of_full = full_sum(logits, log_q)
    for row in range(len(p)):
        top = np.argsort(-q[row])[:k]
        rest = np.setdiff1d(np.arange(11), top)
        mine = np.append(p[row, top], p[row, rest].sum())
        teachers = np.append(q[row, top], q[row, rest].sum())
        assert value[row].item() == pytest.approx(
            (teachers * np.log(teachers / mine)).sum(), rel=1e-10
        )
        # Of the top tokens' logits, the gradient of the full sum; of the others, in proportion.
        np.testing.assert_allclose(gradient[row, top], of_full[row, top], rtol=1e-9, atol=1e-12)
        scaled = p[row, rest] * (1 - teachers[-1] / mine[-1])
        np.testing.assert_allclose(gradient[row, rest], scaled, rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 10_000), vocabulary=st.integers(2, 30), spread=st.floats(0.01, 5.0))
def test_it_grows_with_k_up_to_the_divergence_and_is_never_negative(seed, vocabulary, spread):
    logits, log_q = distributions(seed, vocabulary=vocabulary, spread=spread)
    full, _ = full_sum(logits, log_q)

    values = torch.stack([of_top_k(logits, log_q, k)[0] for k in range(1, vocabulary + 1)])

    floor = 1e-5  # the least probability of the rest in logarithms
    assert (values >= -floor).all()
    assert (values <= full + floor).all()
    torch.testing.assert_close(values[-1], full, rtol=1e-9, atol=1e-9)
    ids = log_q.argsort(1, descending=True)
    covered = torch.stack(
        [log_p.gather(1, ids).exp().cumsum(1) for log_p in (logits.log_softmax(-1), log_q)]
    )
    exact = (1 - covered > floor).all(0).T
    assert (values.diff(dim=0)[exact[1:]] >= -1e-12).all()


@given(seed=st.integers(0, 10_000), k=st.integers(1, 11), shift=st.floats(0.01, 2.0))
def test_it_is_zero_exactly_where_the_two_agree(seed, k, shift):
    _, log_q = distributions(seed)

    same, gradient = of_top_k(log_q.clone().requires_grad_(), log_q, k)
    moved = log_q.clone()
    moved.scatter_add_(1, log_q.argmax(1, keepdim=True), torch.full((6, 1), shift, **F64))
    other, _ = of_top_k(moved.requires_grad_(), log_q, k)

    assert same.abs().max() < 1e-12
    assert gradient.abs().max() < 1e-12
    assert (other > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_probabilities_have_finite_values_and_gradients(dtype):
    low = -1000.0
    teachers = torch.tensor([[0.0, low], [0.0, low], [low, low], [-0.7, -0.7]], dtype=dtype)
    mine = torch.tensor([[low, 0.0], [0.0, low], [0.0, low], [low, low]], dtype=dtype)
    mine.requires_grad_()

    per_token, aux = loss.top_k_forward_kl(mine, teachers)
    per_token.sum().backward()

    assert per_token.isfinite().all()
    assert (per_token > -1e-5).all()
    assert mine.grad.isfinite().all()
    assert per_token[0].item() == pytest.approx(1000, rel=1e-3)  # the teacher's only token
    assert per_token[1].abs() < 1e-6
    assert per_token[2] > 10  # all of the teacher is in the rest, and nothing of the policy
    assert mine.grad[0, 0].item() == pytest.approx(-1)
    assert ((aux["ref_tail"] >= 0) & (aux["ref_tail"] <= 1)).all()


def test_a_row_without_a_number_sends_no_gradient():
    mine = torch.tensor([[math.nan, -1.0], [-1.0, -2.0]], requires_grad=True)
    teachers = torch.tensor([[-1.0, -1.0], [-1.0, -2.0]])

    per_token, _ = loss.top_k_forward_kl(mine, teachers)
    mask = torch.tensor([False, True])
    loss.token_mean(per_token, mask, denom=1).backward()

    assert per_token[0].isnan()
    assert mine.grad.isfinite().all()
    assert not mine.grad[0].any()


def test_low_precision_is_widened():
    q = torch.tensor([[0.5, 0.25]]).log().bfloat16()
    per_token, aux = loss.top_k_forward_kl(q, q)

    assert per_token.dtype == aux["ref_tail"].dtype == torch.float32
    assert not aux["ref_tail"].requires_grad


@pytest.mark.parametrize(
    ("mine", "teachers", "message"),
    [
        (torch.zeros(3), torch.zeros(3, 2), r"logprobs has shape \(3,\), expected \[t, k\]"),
        (torch.zeros(3, 2), torch.zeros(3, 4), r"ref_logprobs has shape \(3, 4\), but logprobs"),
        (torch.zeros(3, 2), torch.zeros(2, 2), r"ref_logprobs has shape \(2, 2\), but logprobs"),
        (
            torch.zeros(1, 2),
            torch.full((1, 2), -math.inf),
            r"ref_logprobs\[0, 0\] is -inf \(2 of 2 entries",
        ),
    ],
)
def test_mistakes_are_named(mine, teachers, message):
    with pytest.raises(ValueError, match=message):
        loss.top_k_forward_kl(mine, teachers)


# ---- logprobs of several tokens in each row, by a model ----


def packed(*, seed=0):
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(2, 64, (sum(LENGTHS),), generator=generator)
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])
    rows = torch.rand(len(token_ids), generator=generator) < 0.6
    temperature = 0.5 + torch.rand(len(token_ids), generator=generator)
    return token_ids, position_ids, rows, temperature


def all_logprobs(model, token_ids, temperature):
    """The reference: transformers' own attention and logits ``[t, v]``, document by document."""
    model.set_attn_implementation("eager")
    logits = [model(input_ids=one.unsqueeze(0)).logits[0] for one in token_ids.split(LENGTHS)]
    return (torch.cat(logits) / temperature.unsqueeze(1)).log_softmax(-1)


FAMILIES = {  # the last three have no plain head, or change their logits
    "llama": {},
    "qwen3_moe": {"tie_word_embeddings": True},
    "granite": {"logits_scaling": 4.0},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None},
    "phi": {},
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Blocks of 128 columns, so that a vocabulary of 300 spans several."""
    monkeypatch.setattr(linear_head_tiles, "CPU_TILE", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_are_scored_as_with_all_logits(small_tiles, family):
    model = testing.tiny_model(family, vocab_size=300, **FAMILIES[family])
    token_ids, position_ids, rows, temperature = packed()
    generator = torch.Generator().manual_seed(1)
    candidates = torch.randint(0, 300, (len(token_ids), 7), generator=generator)
    candidates[:, 3] = candidates[:, 2]  # a token may come twice
    weights = torch.randn(candidates.shape, generator=generator)
    parameters = list(model.parameters())

    def gradient(logprobs):
        return torch.autograd.grad((weights * logprobs).sum(), parameters, allow_unused=True)

    asked = candidates.masked_fill(~rows.unsqueeze(1), -100)
    ours = loss.model_candidate_logprobs(
        model, token_ids, position_ids, asked, temperature=temperature, rows=rows
    )
    of_ours = gradient(ours)
    theirs = all_logprobs(model, token_ids, temperature).gather(1, candidates)
    theirs = theirs * rows.unsqueeze(1)

    torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=0)
    for mine, other in zip(of_ours, gradient(theirs), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 20, 200])
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_top_tokens_are_those_of_all_logits(small_tiles, family, k):
    model = testing.tiny_model(family, vocab_size=300, **FAMILIES[family])
    token_ids, position_ids, rows, temperature = packed()
    labels = token_ids.roll(-1)

    logprobs, top_ids, top_logprobs = loss.model_top_k_logprobs(
        model, token_ids, position_ids, labels, k=k, temperature=temperature, rows=rows
    )

    every = all_logprobs(model, token_ids, temperature)
    of_labels = every.gather(1, labels.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprobs, of_labels * rows, atol=3e-6, rtol=0)
    best = every.topk(k)[0] * rows.unsqueeze(1)
    torch.testing.assert_close(top_logprobs, best, atol=3e-6, rtol=0)
    by_id = every.gather(1, top_ids) * rows.unsqueeze(1)
    torch.testing.assert_close(top_logprobs, by_id, atol=3e-6, rtol=0)
    assert top_ids.dtype == torch.int64
    assert all(len(set(row.tolist())) == k for row in top_ids[rows])
    assert not top_ids[~rows].any()
    assert not logprobs.requires_grad
    assert not top_logprobs.requires_grad


def test_the_top_k_of_a_model_give_the_gradient_of_the_full_sum():
    """Of all weights, with k the whole vocabulary: student and teacher by their own heads."""
    student, teacher = (testing.tiny_model("llama", seed=seed) for seed in (0, 1))
    token_ids, position_ids, rows, _ = packed()
    labels = token_ids.roll(-1)
    parameters = list(student.parameters())

    _, ids, ref_logprobs = loss.model_top_k_logprobs(
        teacher, token_ids, position_ids, labels, k=64, rows=rows
    )
    logprobs = loss.model_candidate_logprobs(student, token_ids, position_ids, ids, rows=rows)
    per_token, _ = loss.top_k_forward_kl(logprobs, ref_logprobs)
    ours = loss.token_mean(per_token, rows, denom=10)
    of_ours = torch.autograd.grad(ours, parameters)

    one = torch.ones(len(token_ids))
    log_q = all_logprobs(teacher, token_ids, one).detach()
    log_p = all_logprobs(student, token_ids, one)
    theirs = ((log_q.exp() * (log_q - log_p)).sum(1) * rows).sum() / 10
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for mine, other in zip(of_ours, torch.autograd.grad(theirs, parameters), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-3)


def test_logits_are_not_materialized_for_several_tokens_either():
    model = testing.tiny_model("llama", vocab_size=50_000, max_position_embeddings=32)
    token_ids = torch.randint(0, 50_000, (512,))
    position_ids = torch.arange(8).repeat(64)

    with Sizes() as made:
        _, top_ids, _ = loss.model_top_k_logprobs(model, token_ids, position_ids, token_ids, k=20)
        loss.model_candidate_logprobs(model, token_ids, position_ids, top_ids).sum().backward()

    assert max(made.sizes) <= linear_head_tiles.CPU_TILE < len(token_ids) * 50_000 / 8


def test_what_does_not_fit_is_refused():
    model = testing.tiny_model("llama")
    ids, positions = torch.arange(4), torch.arange(4)

    def candidates(x, **options):
        return loss.model_candidate_logprobs(model, ids, positions, x, **options)

    with pytest.raises(ValueError, match=r"candidates has shape \(4,\), .*expected \[t, c\]"):
        candidates(ids)
    with pytest.raises(ValueError, match=r"candidates has shape \[t, 0\]"):
        candidates(ids.new_zeros(4, 0))
    with pytest.raises(ValueError, match=r"candidates\[2, 1\] is 64, outside the vocabulary of 64"):
        candidates(torch.tensor([[0, 1], [0, 1], [0, 64], [0, 1]]))
    with pytest.raises(ValueError, match=r"temperature has shape \(5,\), but candidates has shape"):
        candidates(ids.unsqueeze(1), temperature=torch.ones(5))
    for k in (0, 65):
        with pytest.raises(ValueError, match=f"k is {k}; expected 1 to 64"):
            loss.model_top_k_logprobs(model, ids, positions, ids, k=k)
