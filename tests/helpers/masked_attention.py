"""Attention by its definition: a masked softmax over all queries and keys."""

import torch


def by_mask(query, key, value, sinks, some, *, window=None, chunk=None, softcap=None, scaling):
    """All scores, capped, masked and with a column of sinks: ``[t, heads, dv]``."""
    mask = torch.zeros(len(query), len(key), dtype=torch.bool)
    for one in some:
        keys = [row for begin, end in one.keys for row in range(begin, end)]
        for row in range(one.begin, one.end):
            position = len(keys) - (one.end - row)
            for number, other in enumerate(keys[: position + 1]):
                near = window is None or position - number < window
                same = chunk is None or position // chunk == number // chunk
                mask[row, other] = near and same
    copies = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, k) * scaling
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.view(-1, 1, 1).expand(-1, len(query), 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hij,jhd->ihd", weights, v)
