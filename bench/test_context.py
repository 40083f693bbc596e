"""Load balance of context-parallel attention, and the time to divide the work.

    python -m pytest bench/test_context.py -m "" --benchmark-only --benchmark-columns=median,iqr -s

65,536 rows are divided over 2, 4 and 8 ranks, as one long document, as many short ones and as a
skewed mixture. Work is counted exactly, as pairs of query and key. Each row prints the largest work
of a rank over the mean for these methods:

- contiguous: each rank computes attention for its own rows;
- zigzag: rows are cut into 2 cp equal chunks, and rank j has chunks j and 2 cp - 1 - j;
- ours: ``context="gathered"``, with the fraction of queries that are sent to another rank and back.

With ``context="ulysses"``, every rank computes its share of the heads over all rows, so the ratio
is 1.000. The timed part runs once per forward pass on the host: it finds documents and divides the
work.
"""

import numpy as np
import pytest
import torch

from primerl.attention import find_documents
from primerl.parallel.context_parallel.balancing import divide_attention
from primerl.parallel.context_parallel.sharing import row_spans

ROWS = 65_536


def cut(lengths):
    """Cut or extend the documents' lengths so that they fill the pack exactly."""
    ends = np.minimum(np.cumsum(lengths), ROWS)
    return np.diff(np.unique(np.append(ends, ROWS)), prepend=0)


def lognormal(median, sigma, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, ROWS // 8)
    return cut(np.clip(drawn, 1, ROWS).astype(int))


PACKS = {
    "one long document": np.array([ROWS]),
    "two halves": np.array([ROWS // 2] * 2),
    "40k, 8k, 8k, 4k, 4k": np.array([40, 8, 8, 4, 4]) * 1024,
    "1k to 32k, doubling": cut(2 ** np.arange(10, 16)),
    "short after one long": cut([ROWS // 2, *[128] * 256]),
    "lognormal, median 3000, sigma 1": lognormal(3000, 1.0),
    "lognormal, median 500, sigma 2": lognormal(500, 2.0),
    "512 of 128": np.array([128] * 512),
}


def contiguous(position_ids, ranks):
    return np.repeat(np.arange(ranks), len(position_ids) // ranks)


def zigzag(position_ids, ranks):
    chunks = np.repeat(np.arange(2 * ranks), len(position_ids) // (2 * ranks))
    return np.minimum(chunks, 2 * ranks - 1 - chunks)


def ratio(workers, position_ids, ranks):
    work = np.bincount(workers, position_ids + 1, minlength=ranks)
    return work.max() / work.mean()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", PACKS)
def test_balance(benchmark, name, ranks):
    position_ids = np.concatenate([np.arange(length) for length in PACKS[name]])

    def plan():
        documents = find_documents(torch.from_numpy(position_ids))
        workers = divide_attention(position_ids + 1.0, ranks)
        return workers, [row_spans(np.flatnonzero(workers == 0), documents)]

    workers, _ = benchmark.pedantic(plan, rounds=7, warmup_rounds=1)
    found = {
        each.__name__: ratio(each(position_ids, ranks), position_ids, ranks)
        for each in (contiguous, zigzag)
    }
    found["ours"] = ratio(workers, position_ids, ranks)
    moved = (workers != contiguous(position_ids, ranks)).mean()
    benchmark.extra_info |= {**found, "moved": moved}
    print(
        f"{name:32} cp {ranks} "
        + " ".join(f"{each} {value:.3f}" for each, value in found.items())
        + f" moved {moved:.1%} {benchmark.stats.stats.median * 1e3:.1f} ms"
    )
    assert found["ours"] <= 1.05
