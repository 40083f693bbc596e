"""Windows, chunks, capped scores and sinks, against a masked softmax in float64."""

import pytest
import torch
from drawn_spans import parts_of_documents
from hypothesis import given
from hypothesis import strategies as st
from masked_attention import by_mask

from primerl.attention import (
    Document,
    attend,
    kernels,
    lay_out,
    packed,
    span_kernels,
)

PARTS = parts_of_documents(most=5, longest=12, most_before=5)


def tensors(rows, keys, *, heads=4, kv_heads=2, width=8, value_width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows + 100 * keys)
    shapes = [
        (rows, heads, width),
        (keys, kv_heads, width),
        (keys, kv_heads, value_width),
        (heads,),
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


LIMITS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([None, 1, 3, 4]),
        "chunk": st.sampled_from([None, 1, 3, 4]),
        "softcap": st.sampled_from([None, 0.7]),
    }
)


@given(
    PARTS,
    LIMITS,
    st.booleans(),
    st.sampled_from([8, 1000]),
)
def test_spans_attend_as_under_a_mask(case, limits, has_sinks, block):
    some, keys = case
    q, k, v, sinks = tensors(some[-1].end, keys, value_width=4)
    sinks = sinks if has_sinks else None
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_kernels, "BLOCK", block)
        patch.setattr(span_kernels, "MAX_SCORES", 100)
        ours = attend(q, k, v, lay_out(some), scaling=0.9, sinks=sinks, **limits)
        expected = by_mask(q, k, v, sinks, some, scaling=0.9, **limits)
        torch.testing.assert_close(ours, expected)
        weight = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
        for mine, other in zip(
            torch.autograd.grad((ours * weight).sum(), inputs),
            torch.autograd.grad((expected * weight).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(mine, other)


@given(
    PARTS,
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, 3]),
)
def test_where_dropout_is_computed_too_spans_attend_as_under_a_mask(case, window, chunk):
    some, keys = case
    q, k, v, _ = tensors(some[-1].end, keys, value_width=4)
    limits = {"window": window or 0, "chunk": chunk or 0}

    ours = kernels._attend_by_length(q, k, v, lay_out(some), 0.9, 0.0, **limits)

    expected = by_mask(q, k, v, None, some, scaling=0.9, window=window, chunk=chunk)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_long_documents_in_few_bits(dtype, softcap):
    some = (Document(0, 700), Document(700, 710), Document(710, 900, ((0, 300),)))
    exact = tensors(900, 900, width=16, value_width=16)
    rounded = [x.detach().to(dtype).requires_grad_() for x in exact]
    limits = {"window": 100, "softcap": softcap, "scaling": 0.25}

    ours = attend(*rounded[:3], lay_out(some), sinks=rounded[3], **limits)
    expected = by_mask(*exact, some, **limits)

    loose = dtype == torch.bfloat16
    bounds = {"atol": 3e-2 if loose else 1e-5, "rtol": 3e-2 if loose else 1e-4}
    torch.testing.assert_close(ours.double(), expected, **bounds)
    ours.sum().backward()
    expected.sum().backward()
    for mine, other in zip(rounded, exact, strict=True):
        error = (mine.grad.double() - other.grad).norm() / other.grad.norm()
        assert error < (2e-2 if loose else 1e-5)


def test_the_work_is_proportional_to_the_window():
    """A document of 40 windows: every query is computed once, with at most a window more keys."""
    plan = lay_out((Document(0, 40 * 256), Document(40 * 256, 40 * 256 + 5))).plan

    parts = list(span_kernels.blocks(plan, plan.device, window=256, chunk=0))

    assert sorted(torch.cat([part.queries for part in parts]).tolist()) == list(range(10245))
    pairs = sum(part.size * part.length * part.seen for part in parts)
    assert pairs < 1.6 * 256 * 10245


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_a_compiler_can_trace_the_operator(softcap):
    q, k, v, sinks = tensors(9, 9)
    plan = lay_out((Document(0, 6), Document(6, 9))).plan

    torch.library.opcheck(
        torch.ops.primerl.attend.default, (q, k, v, sinks, plan, 0.9, 3, 0, softcap)
    )


def test_a_window_that_only_the_arguments_name_is_refused():
    module, limits = torch.nn.Linear(1, 1), packed.AttentionLimits(window=8)
    assert packed.attention_options(module, 30, limits, {"sliding_window": 8})["window"] == 8
    assert packed.attention_options(module, 4, limits, {"sliding_window": 4})["window"] == 8

    with pytest.raises(ValueError, match="a window of 4 keys, but its mask has 8"):
        packed.attention_options(module, 30, limits, {"sliding_window": 4})
    with pytest.raises(ValueError, match="a window of 4 keys, but its mask has none"):
        packed.attention_options(module, 30, packed.AttentionLimits(), {"sliding_window": 4})
