"""What kernels of attention for GPUs compute, on a CPU, with the signatures of their packages.

Each is a softmax over all keys of a span, in the dtype of its inputs. The gradients are computed
from the output and the logsumexp that they are given, as the kernels do.
"""

import torch

CALLS = []
"""The keyword arguments of each call, with the name of the function."""


def _scores(q, k, scale, window, cap):
    """Scores ``[heads, queries, keys]`` of a span, and the derivative of the cap."""
    raw = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = cap * (raw / cap).tanh() if cap else raw
    slope = 1 - (scores / cap) ** 2 if cap else torch.ones_like(raw)
    position = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))[None]
    hidden = key > position
    if window:
        hidden = hidden | (key <= position - window)
    return scores.masked_fill(hidden, -torch.inf), slope


def _copied(x, heads):
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def attend_span(q, k, v, *, scale, window=0, cap=0.0):
    """Output ``[queries, heads, dv]`` and logsumexp ``[heads, queries]`` of one span."""
    scores, _ = _scores(q, _copied(k, q.shape[1]), scale, window, cap)
    attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), _copied(v, q.shape[1]))
    return attended, scores.logsumexp(-1)


def span_gradients(upstream, q, k, v, out, logsumexp, *, scale, window=0, cap=0.0):
    """Gradients of one span from what its forward pass returned."""
    keys, values = (_copied(x, q.shape[1]) for x in (k, v))
    scores, slope = _scores(q, keys, scale, window, cap)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    inner = (upstream * out).sum(-1).T.unsqueeze(-1)
    arriving = torch.einsum("ihd,jhd->hij", upstream, values)
    of_scores = weights * (arriving - inner) * slope * scale
    of_q = torch.einsum("hij,jhd->ihd", of_scores, keys)
    of_k = torch.einsum("hij,ihd->jhd", of_scores, q)
    of_v = torch.einsum("hij,ihd->jhd", weights, upstream)
    of_k, of_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (of_k, of_v))
    return of_q, of_k, of_v


def _ranges(ends):
    assert ends.dtype == torch.int32
    return [slice(*pair) for pair in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def _spans(query_ends, key_ends, longest, longest_keys):
    spans = list(zip(_ranges(query_ends), _ranges(key_ends), strict=True))
    assert longest == max(own.stop - own.start for own, _ in spans)
    assert longest_keys == max(seen.stop - seen.start for _, seen in spans)
    return spans


def end_to_end(q, k, v, query_ends, key_ends, longest, longest_keys, **options):
    """Outputs and logsumexp ``[heads, t]`` of spans that lie end to end."""
    assert len(k) == len(v) == key_ends[-1]
    found = [
        attend_span(q[own], k[seen], v[seen], **options)
        for own, seen in _spans(query_ends, key_ends, longest, longest_keys)
    ]
    return torch.cat([x for x, _ in found]), torch.cat([x for _, x in found], dim=1)


def end_to_end_gradients(
    upstream, q, k, v, out, logsumexp, query_ends, key_ends, longest, longest_keys, **options
):
    found = [
        span_gradients(
            *(upstream[own], q[own], k[seen], v[seen], out[own], logsumexp[:, own]), **options
        )
        for own, seen in _spans(query_ends, key_ends, longest, longest_keys)
    ]
    return tuple(torch.cat(some) for some in zip(*found, strict=True))


class FlashAttention4:
    """The functions of ``flash_attn.cute.interface`` 4.0.0b36 that are called."""

    results = 5
    """The number of results of the forward function."""

    def flash_attn_varlen_func(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        min_seqlen_k=None,
        seqused_q=None,
        seqused_k=None,
        gather_kv_indices=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(None, None),
        learnable_sink=None,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        score_mod=None,
        score_mod_bwd=None,
        mask_mod=None,
        block_sparse_tensors=None,
        aux_tensors=None,
        aux_scalars=None,
        return_lse=False,
        scheduler_metadata=None,
        seqlen_k_per_split=None,
        disable_scheduler_metadata=False,
        gather_bwd_recompute_p=False,
        gather_bwd_token_chunk=None,
    ):
        assert causal
        assert return_lse
        CALLS.append(("flash4", {"sizes": (q.shape, k.shape, v.shape)}))
        left, right = window_size
        assert right == (None if left is None else 0)
        found = end_to_end(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            scale=softmax_scale,
            window=0 if left is None else left + 1,
            cap=softcap,
        )
        return (*found, None, None, None)[: FlashAttention4.results]

    def _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        window_size_left=None,
        window_size_right=None,
        m_block_size=64,
        n_block_size=128,
        num_threads=256,
        pack_gqa=False,
        num_stages_Q=2,
        num_stages_dO=2,
        SdP_swapAB=False,
        dKV_swapAB=False,
        dQ_swapAB=False,
        AtomLayoutMSdP=2,
        AtomLayoutNdKV=2,
        AtomLayoutMdQ=2,
        V_in_regs=False,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        deterministic=False,
        dq=None,
        dk=None,
        dv=None,
        score_mod=None,
        score_mod_bwd=None,
        mask_mod=None,
        aux_tensors=None,
        aux_scalars=None,
        block_sparse_tensors=None,
        dlse=None,
        learnable_sink=None,
    ):
        assert causal
        assert lse.is_contiguous()
        assert lse.shape == (q.shape[1], len(q))
        assert window_size_right == (None if window_size_left is None else 0)
        found = end_to_end_gradients(
            *(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            scale=softmax_scale,
            window=0 if window_size_left is None else window_size_left + 1,
            cap=softcap,
        )
        return (*found, None)[: FlashAttention4.results]


def flash_attention_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """``aten::_flash_attention_forward``."""
    assert dropout_p == 0.0
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert is_causal == (window_size_left == -1)
    assert window_size_right == 0
    CALLS.append(("varlen", {"key": key.data_ptr()}))
    found = end_to_end(
        *(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k),
        scale=scale,
        window=window_size_left + 1,
    )
    return (*found, None, None, None)


def flash_attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    """``aten::_flash_attention_backward``."""
    assert is_causal == (window_size_left == -1)
    return end_to_end_gradients(
        *(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k),
        scale=scale,
        window=window_size_left + 1,
    )


class Statistics:
    """How many dimensions cuDNN's statistics have: 4, or 3 in some versions of torch."""

    dimensions = 4


def cudnn_attention(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    """``aten::_scaled_dot_product_cudnn_attention``."""
    assert attn_bias is None
    assert compute_log_sumexp
    assert is_causal
    assert dropout_p == 0.0
    assert query.shape[2] == key.shape[2]
    CALLS.append(("cudnn", {"shape": query.shape, "query": query.data_ptr()}))
    found = [
        attend_span(*(x.transpose(0, 1) for x in one), scale=scale)
        for one in zip(query, key, value, strict=True)
    ]
    # In memory it lies as the queries do: [documents, length, heads, d].
    out = torch.stack([x for x, _ in found]).transpose(1, 2)
    statistics = torch.stack([x for _, x in found])
    if Statistics.dimensions == 4:
        statistics = statistics.unsqueeze(-1)
    length = query.shape[2]
    return out, statistics, None, None, length, length, None, None, None


def cudnn_attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    """``aten::_scaled_dot_product_cudnn_attention_backward``."""
    assert is_causal
    assert max_q == max_k == query.shape[2]
    assert logsumexp.dim() == Statistics.dimensions
    assert logsumexp.is_contiguous()
    assert logsumexp.isfinite().all()
    assert grad_out.stride() == out.stride()
    rows = zip(*(grad_out, query, key, value, out, logsumexp.view(query.shape[:3])), strict=True)
    found = [
        span_gradients(*(x.transpose(0, 1) for x in tensors), statistics, scale=scale)
        for *tensors, statistics in rows
    ]
    return tuple(torch.stack(some).transpose(1, 2) for some in zip(*found, strict=True))
