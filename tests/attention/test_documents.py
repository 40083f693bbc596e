"""The kernels behind packed and context-parallel attention, against a masked softmax."""

import pytest
import torch
from drawn_spans import parts_of_documents
from hypothesis import given
from hypothesis import strategies as st

from primerl import loss, testing
from primerl.attention import (
    Document,
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
        options = {"window": 0, "chunk": 0, "padded": True} | limits
        return list(span_kernels.blocks(plan, plan.device, **options))

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


def test_a_model_that_attends_to_later_tokens_is_refused():
    ids, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 0, 1])

    with pytest.raises(ValueError, match="attends to later tokens too"):
        loss.model_logprobs(testing.tiny_model("bert"), ids, positions, ids)


def test_a_model_that_takes_no_positions_is_refused():
    ids, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 0, 1])

    with pytest.raises(ValueError, match="bart takes no position_ids"):
        loss.model_logprobs(testing.tiny_model("bart"), ids, positions, ids)
