"""Compare the time of packed documents with padded rows, and the work of context-parallel ranks.

    python -m pytest bench/test_mixers.py -m "" -s

Two models of one kind of layer run forward and backward on a CPU, with one thread: a windowed model
(mistral, a window of 128 keys) and one with the gated delta rule (qwen3_5_text). The documents have
between 32 and 2048 tokens. Padded, they are one batch, as transformers computes it. The last tables
show the largest work of a rank over the mean: of attention in a model with two kinds of layers, if
rows stay where they are and if they move, and of layers with the delta rule, which compute whole
documents.
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
def test_work_of_ranks(ranks):
    """Gemma 3's layers: 5 with a window to one without, in one document of 65,536 tokens.

    Rows move once for all layers, so that ranks have equal work in the mean over layers. But ranks
    wait for each other in every layer, where they gather keys and values.
    """
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = testing.tiny_model(
        "gemma3_text", num_hidden_layers=6, layer_types=kinds, sliding_window=1024
    ).config
    positions = np.arange(65536)
    stay = np.repeat(np.arange(ranks), len(positions) // ranks)
    moved = divide_attention(flops.seen_keys(config, positions), ranks)
    for name, workers in (("in place", stay), ("moved", moved)):
        limits = [flops.visible_keys(config, index) for index in range(6)]
        work = [np.bincount(workers, np.minimum(positions + 1, most)) for most in limits]
        windowed, full = (layer.max() / layer.mean() for layer in (work[0], work[5]))
        step = sum(layer.max() for layer in work) / sum(layer.mean() for layer in work)
        print(f"cp {ranks}, {name}: windowed {windowed:.3f}, full {full:.3f}, step {step:.3f}")


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
