"""Compare the time of packed documents with padded rows, and the work of context-parallel ranks.

    python -m pytest bench/test_mixers.py -m "" -s

Two models of one kind of layer run forward and backward on a CPU, with one thread: a windowed model
(mistral, a window of 128 keys) and one with the gated delta rule (qwen3_5_text). The documents have
between 32 and 2048 tokens. Padded, they are one batch, as transformers computes it. The last tables
show the largest work of a rank over the mean: of attention, if rows stay where they are and if they
move, and of layers with the delta rule, which compute whole documents.
"""

import time

import numpy as np
import pytest
import torch

from primerl import flops, loss, testing
from primerl.parallel.context_parallel.balancing import divide_attention
from primerl.parallel.context_parallel.mixing import divide_documents

LENGTHS = (2048, 512, 512, 256, 128, 128, 64, 32)
MODELS = {
    "mistral": {"sliding_window": 128},
    "qwen3_5_text": {
        "layer_types": ["linear_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
SHARED = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
}


def seconds(step, rounds=3):
    """Return the least time of a step."""
    step()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return min(times)


@pytest.mark.parametrize("family", MODELS)
def test_packed_against_padded(family):
    model = testing.tiny_model(family, **SHARED, **MODELS[family])
    documents = [torch.randint(2, 256, (n,)) for n in LENGTHS]
    token_ids = torch.cat(documents)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    rows = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)

    def padded():
        logits = model(input_ids=rows, use_cache=False).logits
        logprobs = logits.log_softmax(-1).gather(-1, rows.roll(-1, 1).unsqueeze(-1))
        logprobs.sum().backward()

    def packed():
        loss.model_logprobs(model, token_ids, positions, token_ids.roll(-1)).sum().backward()

    of_padded, of_packed = seconds(padded), seconds(packed)
    print(
        f"{family:14} {len(token_ids)} tokens, {rows.numel()} padded: "
        f"packed {of_packed:.2f} s, padded {of_padded:.2f} s, {of_padded / of_packed:.1f} times"
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("window", [None, 1024])
def test_work_of_ranks(ranks, window):
    """Layers with windows have nearly equal work wherever their rows are."""
    config = testing.tiny_model("mistral", sliding_window=window).config
    cost = flops.seen_keys(config, np.arange(65536))
    stay = np.repeat(np.arange(ranks), len(cost) // ranks)
    moved = divide_attention(cost, ranks)
    ratios = [np.bincount(of, cost).max() / np.bincount(of, cost).mean() for of in (stay, moved)]
    print(f"window {window}, cp {ranks}: {ratios[0]:.3f} in place, {ratios[1]:.3f} moved")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("median", [500, 3000])
def test_tokens_of_ranks(ranks, median):
    """The largest number of tokens that a rank computes, over the mean, in packs of 65,536."""
    draw = np.random.default_rng(0).lognormal(np.log(median), 1, 1000).clip(1, 32768).astype(int)
    lengths = draw[: np.searchsorted(draw.cumsum(), 65536)].tolist()
    of_ranks = [sum(lengths[n] for n in own) for own in divide_documents(lengths, ranks)]
    print(
        f"median {median}, {ranks} ranks: {len(lengths)} documents, the longest "
        f"{max(lengths)}: {max(of_ranks) / np.mean(of_ranks):.3f}"
    )
