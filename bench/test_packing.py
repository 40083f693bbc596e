"""Load balance of packings over ranks, and the time to compute the packings.

    python -m pytest bench/test_packing.py -m "" --benchmark-only --benchmark-columns=median,iqr -s

On a busy machine, use --benchmark-timer=time.process_time.

10,000 samples of lognormal length, cut at 32,768 tokens, are packed for 64 ranks. Each row prints
the cost of the packing in lockstep (the sum over micro-steps of the most expensive rank) divided by
the mean cost, for the best and the worst of twelve seeds. It also prints the number of micro-steps
beyond those that the tokens need. Costs are tokens, or the FLOPs of training a dense model
(Qwen3-8B) or GLM-5. These packings are compared with ours:

- first fit and best fit decreasing: bins of similar cost share a micro-step;
- Karmarkar-Karp differencing, over ranks and then over the micro-steps of each; it ignores
  capacity, so micro-steps are added until everything fits.
"""

import functools
import heapq
import itertools
from bisect import bisect_left, insort
from types import SimpleNamespace

import numpy as np
import pytest

from primerl import flops, packing

SAMPLES, RANKS, CAP = 10_000, 64, 32_768
SEEDS = range(12)
QWEN3_8B = SimpleNamespace(
    model_type="qwen3", vocab_size=151_936, hidden_size=4096, intermediate_size=12_288,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
)  # fmt: skip
GLM_5 = SimpleNamespace(
    model_type="glm_moe_dsa", vocab_size=154_880, hidden_size=6144, intermediate_size=12_288,
    moe_intermediate_size=2048, num_hidden_layers=78, num_attention_heads=64, n_shared_experts=1,
    n_routed_experts=256, num_experts_per_tok=8, first_k_dense_replace=3, kv_lora_rank=512,
    q_lora_rank=2048, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256, index_topk=2048,
    index_head_dim=128, index_n_heads=32,
)  # fmt: skip
COSTS = {
    "tokens": lambda n: n.astype(np.float64),
    "dense": functools.partial(flops.training, QWEN3_8B),
    "glm-5": functools.partial(flops.training, GLM_5),
}


def lognormal_lengths(seed, median, sigma):
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, SAMPLES)
    return np.clip(lengths, 1, CAP).astype(int)


def ours(lengths, max_tokens, cost):
    return packing.bins(lengths, max_tokens=max_tokens, ranks=RANKS, cost=cost)


def first_fit(lengths, max_tokens, cost):
    rooms, filled = np.full(len(lengths), max_tokens), [[] for _ in lengths]
    for i in np.argsort(-lengths, kind="stable").tolist():
        number = int((rooms >= lengths[i]).argmax())
        rooms[number] -= lengths[i]
        filled[number].append(i)
    return of_like_cost([members for members in filled if members], cost(lengths))


def best_fit(lengths, max_tokens, cost):
    rooms, filled = [], []
    for i in np.argsort(-lengths, kind="stable").tolist():
        place = bisect_left(rooms, (lengths[i],))
        if place == len(rooms):
            room, number = max_tokens, len(filled)
            filled.append([])
        else:
            room, number = rooms.pop(place)
        filled[number].append(i)
        insort(rooms, (room - lengths[i], number))
    return of_like_cost(filled, cost(lengths))


def of_like_cost(filled, costs):
    filled = filled + [[] for _ in range(-len(filled) % RANKS)]
    filled.sort(key=lambda members: -costs[members].sum())
    return [filled[rank::RANKS] for rank in range(RANKS)]


def differencing(indices, costs, parts):
    """Partition by Karmarkar-Karp: merge the two partial partitions of largest spread."""
    if not indices:
        return [[] for _ in range(parts)]
    number = itertools.count()
    heap = [
        (-costs[i], next(number), [(0.0, [])] * (parts - 1) + [(costs[i], [i])]) for i in indices
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = sorted(
            ((a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)),
            key=lambda part: part[0],
        )
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], next(number), merged))
    return [members for _, members in heap[0][2]]


def karmarkar_karp(lengths, max_tokens, cost):
    costs = cost(lengths).tolist()
    by_rank = differencing(range(len(lengths)), costs, RANKS)
    steps = -(-int(lengths.sum()) // (RANKS * max_tokens))
    while True:
        result = [differencing(members, costs, steps) for members in by_rank]
        fullest = max(lengths[m].sum() for m in itertools.chain(*result) if m)
        if fullest <= max_tokens:
            return result
        steps += 1


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("max_tokens", [CAP, 2 * CAP])
@pytest.mark.parametrize(("median", "sigma"), [(3000, 1.0), (1000, 1.5)])
@pytest.mark.parametrize("pack", [ours, best_fit, first_fit, karmarkar_karp])
def test_packing(benchmark, pack, median, sigma, max_tokens, cost):
    slow = pack is karmarkar_karp
    ratios, extra = [], []
    for seed in SEEDS[:1] if slow else SEEDS:
        lengths = lognormal_lengths(seed, median, sigma)
        result = pack(lengths, max_tokens, COSTS[cost])
        costs = COSTS[cost](lengths)
        most_expensive = [
            max(costs[members].sum() for members in step) for step in zip(*result, strict=True)
        ]
        ratios.append(sum(most_expensive) * RANKS / costs.sum())
        extra.append(len(most_expensive) - -(-int(lengths.sum()) // (RANKS * max_tokens)))
    benchmark.extra_info |= {"ratio": max(ratios), "extra_micro_steps": max(extra)}
    benchmark.pedantic(
        pack, args=(lengths, max_tokens, COSTS[cost]), rounds=1 if slow else 7, warmup_rounds=0
    )
    print(
        f"{pack.__name__:15} median {median} sigma {sigma} max_tokens {max_tokens} {cost:7} "
        f"ratio {min(ratios):.4f}-{max(ratios):.4f} steps +{max(extra)} "
        f"{benchmark.stats.stats.median * 1e3:.0f} ms"
    )
