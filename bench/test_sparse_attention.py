"""Time and memory of sparse attention at a fixed number of chosen keys, beside dense attention.

    python -m pytest bench/test_sparse_attention.py -m "" -s

One layer of latent attention with 16 heads, on one thread of a CPU in float32, forward and
backward, over one document. Each query attends to 512 keys, or to all before it. The indexer has 8
heads of 32 and no backward pass. Each number is of a process of its own: CPU seconds, which other
processes disturb less than the clock, and the peak of resident memory above that before the call.
"""

import multiprocessing
import time
from pathlib import Path

import torch

from primerl.attention import attend, find_documents, lay_out
from primerl.attention.documents import spans_within
from primerl.attention.indexer import choose_keys
from primerl.attention.sparse import attend_sparsely, attend_to_chosen
from primerl.testing import tiny_model

LENGTHS = [2048, 4096, 8192, 16384, 32768]
TOP_K, HEADS, LATENT, ROTATED, PLAIN, VALUE = 512, 16, 64, 16, 32, 32
INDEX_HEADS, INDEX_SIZE = 8, 32


def attention_layer():
    model = tiny_model(
        "glm_moe_dsa",
        num_hidden_layers=1,
        hidden_size=256,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTATED,
        qk_nope_head_dim=PLAIN,
        v_head_dim=VALUE,
        index_topk=TOP_K,
        index_n_heads=INDEX_HEADS,
        index_head_dim=INDEX_SIZE,
    )
    attend_sparsely(model)
    return model.model.layers[0].self_attn


def measured(work):
    """CPU seconds of a call, and the GB by which it raises the peak of resident memory."""
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak

    def peak():
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024

    before, start = peak(), time.process_time()
    work()
    return time.process_time() - start, (peak() - before) / 1e9


def measure(kind, length, results):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = attention_layer()
    document = find_documents(torch.arange(length))
    query = torch.randn(length, HEADS, PLAIN + ROTATED, requires_grad=True)
    latent = torch.randn(length, LATENT + ROTATED, requires_grad=True)
    keys, queries = torch.randn(length, INDEX_SIZE), torch.randn(length, INDEX_HEADS, INDEX_SIZE)
    weights = torch.randn(length, INDEX_HEADS)

    def dense():
        k, v = layer.expand(*latent[None, None].split([LATENT, ROTATED], -1))
        k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)
        attend(query, k, v, lay_out(document)).sum().backward()

    def sparse():
        spans = spans_within(document, 0, length)
        layout = lay_out(document)
        attended = attend_to_chosen(layer, query, latent, layout, spans, chosen, scaling=0.15)
        attended.sum().backward()

    def indexer():
        choose_keys(layer.indexer.wrapped[0], queries, weights, keys)

    # Random keys, in random order, which cost what the indexer's would.
    seen = torch.arange(1, length + 1).unsqueeze(1)
    chosen = (torch.rand(length, TOP_K) * seen).int()
    chosen.masked_fill_(torch.arange(TOP_K) >= seen, -1)
    results.put(measured({"dense": dense, "sparse": sparse, "indexer": indexer}[kind]))


def alone(kind, length):
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=measure, args=(kind, length, results))
    process.start()
    found = results.get()
    process.join()
    return found


def test_time_and_memory_are_linear():
    print("\n| tokens | dense, s | sparse, s | indexer, s | dense / (sparse + indexer) | "
          "dense, GB | sparse, GB | indexer, GB |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    sparse = {}
    for length in LENGTHS:
        found = {kind: alone(kind, length) for kind in ("dense", "sparse", "indexer")}
        times = {kind: seconds for kind, (seconds, _) in found.items()}
        sparse[length] = found["sparse"]
        ratio = times["dense"] / (times["sparse"] + times["indexer"])
        print(
            f"| {length:,} | {times['dense']:.2f} | {times['sparse']:.2f} | "
            f"{times['indexer']:.2f} | {ratio:.2f} | "
            + " | ".join(f"{memory:.2f}" for _, memory in found.values())
            + " |",
            flush=True,
        )
        if length >= 8192:
            assert ratio > 1
    # 8 times as many tokens take less than 12 times the time and memory; all pairs would take 64.
    for few, many in zip(sparse[4096], sparse[32768], strict=True):
        assert many < 12 * few
