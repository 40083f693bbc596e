"""The kernels behind packed and context-parallel attention, against a masked softmax."""

import inspect
import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from drawn_spans import parts_of_documents
from hypothesis import given
from hypothesis import strategies as st

from primerl import loss, testing
from primerl.attention import (
    Document,
    Span,
    attend,
    find_documents,
    kernels,
    lay_out,
    span_kernels,
)

PARTS = parts_of_documents(most=6, longest=5, most_before=4)


def tensors(rows, keys, *, heads=4, kv_heads=2, width=8, value_width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows + 100 * keys)
    shapes = [(rows, heads, width), (keys, kv_heads, width), (keys, kv_heads, value_width)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def by_mask(query, key, value, some, *, scaling=None):
    """The definition: a masked softmax over all queries and keys."""
    mask = torch.zeros(len(query), len(key), dtype=torch.bool)
    for one in some:
        keys = [row for begin, end in one.keys for row in range(begin, end)]
        for row in range(one.begin, one.end):
            mask[row, keys[: len(keys) - (one.end - 1 - row)]] = True
    copies = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, k) * (scaling or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v)


def test_the_keys_of_a_document_are_its_own_and_those_it_shares():
    assert Document(5, 8).keys == ((5, 8),)
    branch = Document(5, 8, ((0, 1), (3, 4)))
    assert branch.keys == ((0, 1), (3, 4), (5, 8))
    assert (branch.shared, branch.length) == (2, 5)


def test_a_document_shares_tokens_of_the_one_before_it_along_the_tree():
    """0 1 2 3, from which 2' 3' branch, from which 3'' 4'' do; then 1* from the very first."""
    position_ids = torch.tensor([0, 1, 2, 3, 2, 3, 3, 4, 1, 2, 0])

    assert find_documents(position_ids) == (
        Document(0, 4),
        Document(4, 6, ((0, 2),)),
        Document(6, 8, ((0, 2), (4, 5))),
        Document(8, 10, ((0, 1),)),
        Document(10, 11),
    )


def test_an_empty_pack_is_refused():
    with pytest.raises(ValueError, match="position_ids is empty"):
        find_documents(torch.arange(0))


@given(PARTS, st.sampled_from([None, 0.3]))
def test_spans_attend_as_under_a_mask(case, scaling):
    some, keys = case
    q, k, v = tensors(some[-1].end, keys, value_width=4)

    ours = attend(q, k, v, lay_out(some), scaling=scaling)
    expected = by_mask(q, k, v, some, scaling=scaling)

    torch.testing.assert_close(ours, expected)
    weight = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
    for mine, other in zip(
        torch.autograd.grad((ours * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_short_spans_of_many_lengths_are_few_calls():
    """Four prompts of about 40 tokens, each with branches of 1 to 16 tokens."""
    spans, begin = [], 0
    for prompt in range(36, 40):
        first = begin
        begin += prompt + 8
        spans.append(Document(first, begin))
        for length in range(1, 17):
            spans.append(Document(begin, begin + length, ((first, first + prompt),)))
            begin += length
    long = Document(begin, begin + 300)
    plan = lay_out((*spans, long)).plan

    def calls(**limits):
        return list(span_kernels.blocks(plan, **{"window": 0, "chunk": 0, "padded": True} | limits))

    assert len(calls(padded=False)) == 4 * 17 + 1
    assert len(calls()) == 2 + 1  # the first documents, the branches, and the long one
    assert len(calls(window=1000)) == len(calls(chunk=1000)) == 2 + 1
    assert len(calls(window=100)) > 4 * 17  # windows are computed by blocks
    rows = torch.cat([one.real_queries for one in calls()])
    assert rows.sort().values.equal(torch.arange(long.end))
    scores = sum(one.size * one.length * one.seen for one in calls())
    assert scores < 2.5 * sum((one.end - one.begin) * one.length for one in (*spans, long))


def test_a_rank_may_have_no_queries():
    q, k, v = tensors(0, 5)

    ours = attend(q, k, v, lay_out(()))

    assert ours.shape == (0, 4, 8)
    assert torch.autograd.grad(ours.sum(), k)[0].eq(0).all()


@given(PARTS)
def test_where_dropout_is_computed_too_spans_attend_as_under_a_mask(case):
    some, keys = case
    q, k, v = tensors(some[-1].end, keys, value_width=4)

    ours = kernels._attend_by_length(q, k, v, lay_out(some), 8**-0.5, 0.0)

    torch.testing.assert_close(ours, by_mask(q, k, v, some))


CALLS = []


def kernel_of_torch_2_13(
    query, key, value, query_ends, key_ends, longest, longest_keys, *, scale=None,
    window_size=(-1, -1), enable_gqa=False,
):  # fmt: skip
    """What ``varlen_attn`` computes, on a CPU."""
    assert window_size == (-1, 0)
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query_ends.dtype == key_ends.dtype == torch.int32
    ends, ends_k = query_ends.tolist(), key_ends.tolist()
    assert longest == max(np.diff(ends))
    assert longest_keys == max(np.diff(ends_k))
    CALLS.append(key.data_ptr())
    queries, keys = itertools.pairwise(ends), itertools.pairwise(ends_k)
    some = [Span(*own, (seen,)) for own, seen in zip(queries, keys, strict=True)]
    return by_mask(query, key, value, some, scaling=scale)


def kernel_of_torch_2_11(
    query, key, value, query_ends, key_ends, longest, longest_keys, is_causal=False, scale=None
):
    assert is_causal
    return kernel_of_torch_2_13(
        query, key, value, query_ends, key_ends, longest, longest_keys, scale=scale,
        window_size=(-1, 0),
    )  # fmt: skip


@pytest.mark.parametrize("kernel", [kernel_of_torch_2_13, kernel_of_torch_2_11])
@given(
    case=PARTS,
    value_width=st.sampled_from([4, 8, 12]),
)
def test_the_kernel_of_gpus_gets_what_it_needs(kernel, case, value_width):
    some, keys = case
    q, k, v = tensors(some[-1].end, keys, value_width=value_width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "varlen_attn", kernel)
        patch.setattr(kernels, "_VARLEN_ARGUMENTS", inspect.signature(kernel).parameters)
        ours = kernels._attend_end_to_end(q, k, v, lay_out(some), 8**-0.5)

    torch.testing.assert_close(ours, by_mask(q, k, v, some))


def test_documents_end_to_end_are_one_call_without_a_copy(monkeypatch):
    monkeypatch.setattr(kernels, "varlen_attn", kernel_of_torch_2_13)
    monkeypatch.setattr(kernels, "_VARLEN_ARGUMENTS", {"window_size", "enable_gqa"})
    some = (Document(0, 5), Document(5, 6), Document(6, 9))
    q, k, v = tensors(9, 9)
    CALLS.clear()

    kernels._attend_end_to_end(q, k, v, lay_out(some), 8**-0.5)

    assert CALLS == [k.data_ptr()]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (192, 128), (128, 128)])
@pytest.mark.parametrize("shared", [False, True])
def test_a_gpu_computes_what_a_cpu_does(dtype, width, value_width, shared, monkeypatch):
    by_kernel = mock.Mock(wraps=kernels._attend_end_to_end)
    monkeypatch.setattr(kernels, "_attend_end_to_end", by_kernel)
    last = Document(300, 420, ((0, 150),)) if shared else Document(300, 420)
    some = (Document(0, 299), Document(299, 300), last)
    exact = tensors(420, 420, width=width, value_width=value_width)
    rounded = [x.detach().to("cuda", dtype).requires_grad_() for x in exact]

    expected, ours = attend(*exact, lay_out(some)), attend(*rounded, lay_out(some, "cuda"))
    expected.sum().backward()
    ours.sum().backward()

    assert by_kernel.called
    torch.testing.assert_close(ours.cpu().double(), expected, atol=2e-2, rtol=2e-2)
    for mine, other in zip(rounded, exact, strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), other.grad, atol=5e-2, rtol=5e-2)


def test_a_model_that_attends_to_later_tokens_is_refused():
    ids, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 0, 1])

    with pytest.raises(ValueError, match="attends to later tokens too"):
        loss.model_logprobs(testing.tiny_model("bert"), ids, positions, ids)


def test_a_model_that_takes_no_positions_is_refused():
    ids, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 0, 1])

    with pytest.raises(ValueError, match="bart takes no position_ids"):
        loss.model_logprobs(testing.tiny_model("bart"), ids, positions, ids)
