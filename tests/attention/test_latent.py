"""Attention to chosen latents, against the same attention computed pair by pair in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_sizes import Sizes
from torch._subclasses.fake_tensor import FakeTensorMode

from primerl.attention import latent as latent_attention
from primerl.attention.latent import attend_to_latents, reason_against_triton

WIDTH, ROTATED, HEADS = 6, 2, 3


def inputs(lengths, top_k, *, seed=0, dtype=torch.float64):
    """Queries, latents, and random choices of documents of these lengths, the last rows first."""
    generator = torch.Generator().manual_seed(seed)
    count, width = sum(lengths), WIDTH + ROTATED
    query = torch.randn(count, HEADS, width, generator=generator, dtype=dtype)
    latent = torch.randn(count, width, generator=generator, dtype=dtype)
    chosen = torch.full((count, top_k), -1, dtype=torch.int32)
    row = 0
    for length in lengths:
        for seen in range(1, length + 1):
            some = torch.randperm(seen, generator=generator)[:top_k]
            chosen[row, : len(some)] = some.int()
            row += 1
    sizes = torch.tensor(lengths)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes).int()
    table = torch.randperm(count, generator=generator).int()
    return query, latent, chosen, starts, table


def gradient_like(query):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(query), HEADS, WIDTH, dtype=query.dtype, generator=generator)


def pair_by_pair(query, latent, chosen, starts, table, *, width, scaling):
    rows = []
    for one, picked, start in zip(query, chosen.tolist(), starts.tolist(), strict=True):
        keys = latent[table[[start + key for key in picked if key >= 0]].long()]
        weights = (one @ keys.T * scaling).softmax(-1)
        rows.append(weights @ keys[:, :width])
    return torch.stack(rows)


def with_gradients(attend, query, latent, *others, upstream):
    query, latent = (x.clone().requires_grad_() for x in (query, latent))
    attended = attend(query, latent, *others, width=WIDTH, scaling=0.3)
    return attended, *torch.autograd.grad((attended * upstream).sum(), [query, latent])


def test_one_query_by_hand():
    """Two keys with scores log 1 and log 3, whose values are 4 and 8; a third isn't chosen."""
    query = torch.tensor([[[1.0, 1.0]]])
    latent = torch.tensor([[4.0, -4.0], [100.0, 0.0], [8.0, -8.0 + torch.tensor(3.0).log()]])
    chosen = torch.tensor([[2, 0, -1]], dtype=torch.int32)
    starts, table = torch.tensor([0], dtype=torch.int32), torch.arange(3, dtype=torch.int32)

    attended = attend_to_latents(query, latent, chosen, starts, table, width=1, scaling=1.0)

    assert attended.tolist() == [[[pytest.approx(7.0)]]]  # 1/4 of 4, 3/4 of 8


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 300),
    st.integers(0, 99),
)
def test_outputs_and_gradients_are_those_of_the_reference(lengths, top_k, at_once, seed):
    query, latent, *others = inputs(lengths, top_k, seed=seed)
    upstream = gradient_like(query)
    expected = with_gradients(pair_by_pair, query, latent, *others, upstream=upstream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attention, "MAX_GATHERED", at_once)
        ours = with_gradients(attend_to_latents, query, latent, *others, upstream=upstream)

    for got, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, theirs, atol=1e-12, rtol=1e-10)


def test_float32_is_within_a_millionth_of_the_reference():
    query, latent, *others = inputs([5, 40, 90], 16)
    upstream = gradient_like(query)
    expected = with_gradients(pair_by_pair, query, latent, *others, upstream=upstream)

    narrow = [x.float() for x in (query, latent)]
    ours = with_gradients(attend_to_latents, *narrow, *others, upstream=upstream.float())

    for got, theirs in zip(ours, expected, strict=True):
        assert (got.double() - theirs).norm() < 1e-6 * theirs.norm()


def test_gradients_pass_finite_differences():
    query, latent, *others = inputs([4, 5], 3)
    arguments = [query.requires_grad_(), latent.requires_grad_()]

    assert torch.autograd.gradcheck(
        lambda q, k: attend_to_latents(q, k, *others, width=WIDTH, scaling=0.3), arguments
    )


def test_the_operator_works_with_compilation_and_fake_tensors():
    query, latent, *others = inputs([7, 5], 3)
    arguments = (query.requires_grad_(), latent.requires_grad_(), *others, WIDTH, 0.3)

    torch.library.opcheck(torch.ops.primerl.attend_to_latents.default, arguments)


def test_no_more_is_held_than_keys_are_chosen(monkeypatch):
    """Neither a square of all pairs, nor the gathered keys of all queries."""
    query, latent, *others = inputs([512], 8, dtype=torch.float32)
    monkeypatch.setattr(latent_attention, "MAX_GATHERED", 1024)
    query, latent = query.requires_grad_(), latent.requires_grad_()

    with Sizes() as made:
        attend_to_latents(query, latent, *others, width=WIDTH, scaling=0.3).sum().backward()

    assert max(made.sizes) == query.numel() < 512 * 8 * (WIDTH + ROTATED)


def test_why_no_triton_kernel_is_used():
    assert "not on cpu" in reason_against_triton(torch.zeros(1, 1, 80), 64)
    with FakeTensorMode():
        on_gpu = torch.zeros(1, 1, 80, device="cuda", dtype=torch.bfloat16)
    assert reason_against_triton(on_gpu, 64) is None
    assert "widths, not 48" in reason_against_triton(on_gpu, 48)
    assert "not in torch.float16" in reason_against_triton(on_gpu.half(), 64)


def test_large_gradients_in_float16_become_infinite_but_not_nan():
    """A loss scale that is too large is recognized by infinite gradients; others stay exact."""
    query, latent, *others = inputs([9], 4, dtype=torch.float16)
    upstream = gradient_like(query) * 15_000
    query, latent = query * 3, latent * 3
    exact = [x.double() for x in (query, latent)]
    expected = with_gradients(pair_by_pair, *exact, *others, upstream=upstream.double())

    ours = with_gradients(attend_to_latents, query, latent, *others, upstream=upstream)

    for got, theirs in zip(ours[1:], expected[1:], strict=True):
        assert not got.isnan().any()
        kept = theirs.abs() < 60_000
        assert 0 < got.isinf().sum() < (~kept).sum() + 1
        torch.testing.assert_close(got[kept].double(), theirs[kept], atol=200.0, rtol=5e-3)


def test_a_second_derivative_is_refused():
    query, latent, *others = inputs([4], 3)
    attended = attend_to_latents(query.requires_grad_(), latent, *others, width=WIDTH, scaling=0.3)
    (gradient,) = torch.autograd.grad(attended.sum(), query, create_graph=True)

    with pytest.raises(RuntimeError, match="has no second derivative"):
        gradient.sum().backward()


def test_no_queries_attend_to_nothing():
    query, latent, *others = inputs([4], 3)
    none = [x[:0] for x in (query.requires_grad_(), *others[:2])]

    attended = attend_to_latents(none[0], latent, *none[1:], others[2], width=WIDTH, scaling=0.3)

    assert attended.shape == (0, HEADS, WIDTH)
    assert not torch.autograd.grad(attended.sum(), query)[0].any()


def test_the_gradient_of_a_transposed_query_is_contiguous_as_the_kernel_writes_it():
    q = torch.randn(3, 5, 32).transpose(0, 1).requires_grad_()
    chosen = torch.arange(5).unsqueeze(1).int()
    rows = torch.zeros(5, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    out = attend_to_latents(q, torch.randn(5, 32), chosen, *rows, width=16, scaling=0.5)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert not q.is_contiguous()
    assert gradient.is_contiguous()
