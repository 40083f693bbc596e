"""Measure how often the indexer of sparse attention chooses other keys when only kernels change.

    python -m pytest bench/test_indexer.py -m "" -s

A randomly initialized glm_moe_dsa (4 layers without experts, 32 indexer heads, top 64 of up to 512
keys) scores 4 documents of 512 tokens in pairs of variants that are equal in exact arithmetic. Each
row shows:

- the fraction of queries whose set of keys differs, among those that see more than 64 keys, in all
  layers and in the first layer;
- the fraction of the chosen keys of these queries that differ;
- the mean and the largest difference of a token's logprob;
- the same differences when the second variant replays the choices of the first.
"""

import torch

from primerl import testing
from primerl.attention import attend_by_document

DOCUMENTS, LENGTH, TOP_K, VOCABULARY = 4, 512, 64, 256


def sparse_model(dtype, **config):
    """Make the model; bfloat16 represents its weights exactly, whatever their dtype."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 4,  # no experts, whose routes would also differ
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "index_topk": TOP_K,
        "index_n_heads": 32,
        "index_head_dim": 32,
        "max_position_embeddings": LENGTH,
        "initializer_range": 0.1,
    }
    model = testing.tiny_model("glm_moe_dsa", **{**settings, **config})
    return model.to(torch.bfloat16).to(dtype)


def run(model, token_ids, way, *, replayed=None):
    """Return each token's logprob, and each layer's choices ``[documents, length, k]``."""
    packed = way == "packed"
    if packed:
        flat, positions = token_ids.flatten(), torch.arange(LENGTH).repeat(DOCUMENTS)
        documents = attend_by_document(model, positions)
        calls = [{"input_ids": flat[None], "position_ids": positions[None], "documents": documents}]
    else:
        model.set_attn_implementation("eager" if way == "eager" else "sdpa")
        rows = [token_ids] if way == "batch" else token_ids.split(1)
        calls = [{"input_ids": ids} for ids in rows]
    chosen = {}

    def record(name):
        def hook(_module, _inputs, output):
            if replayed is not None:
                begin = sum(len(x) for x in chosen.get(name, ()))
                given = replayed[name]
                if packed:
                    output = given.flatten(0, 1).int()[None]
                else:  # transformers attends to a set of keys, and all see the first
                    output = given[begin : begin + len(output)].clamp(min=0)
            of_call = output.reshape(-1, LENGTH, TOP_K).long()
            place = torch.arange(LENGTH)[:, None]  # transformers pads the choices with future keys
            if replayed is not None:
                of_call = replayed[name][begin : begin + len(of_call)]
            chosen.setdefault(name, []).append(of_call.masked_fill(of_call > place, -1))
            return output

        return hook

    indexers = [(n, m) for n, m in model.named_modules() if n.endswith(".indexer")]
    hooks = [module.register_forward_hook(record(name)) for name, module in indexers]
    with torch.no_grad():
        hidden = [model.model(**call, use_cache=False).last_hidden_state for call in calls]
    for hook in hooks:
        hook.remove()
    hidden = torch.cat([x.reshape(-1, LENGTH, x.shape[-1]) for x in hidden]).float()
    log_p = (hidden @ model.lm_head.weight.detach().float().T).log_softmax(-1)
    labels = token_ids.roll(-1, 1)[..., None]
    return log_p.gather(-1, labels)[..., 0], {n: torch.cat(x) for n, x in chosen.items()}


def differences(ours, theirs):
    """Return the fractions of queries and of keys that differ, for queries with a choice."""
    queries, keys = [], []
    for name in ours:
        a, b = (
            torch.zeros(DOCUMENTS, LENGTH, LENGTH, dtype=torch.bool).scatter(
                2, x.clamp(min=0), True
            )
            for x in (ours[name], theirs[name])
        )
        queries.append((a != b).any(-1)[:, TOP_K:].float().mean())
        keys.append((a & ~b)[:, TOP_K:].sum() / a[:, TOP_K:].sum())
    return queries, keys


def compare(title, model, first, second, token_ids, *, other=None, threads=1):
    expected, theirs = run(model, token_ids, first)
    torch.set_num_threads(threads)
    got, chosen = run(other or model, token_ids, second)
    replayed, same = run(other or model, token_ids, second, replayed=theirs)
    torch.set_num_threads(1)
    assert all(torch.equal(same[name], theirs[name]) for name in theirs)
    queries, keys = differences(theirs, chosen)
    gap, left = (got - expected).abs(), (replayed - expected).abs()
    print(
        f"| {title} | {torch.stack(queries).mean():.2%} | {queries[0]:.2%} | "
        f"{torch.stack(keys).mean():.3%} | {gap.mean():.1e} | {gap.max():.1e} | "
        f"{left.mean():.1e} | {left.max():.1e} |"
    )
    return gap.mean(), left.mean()


def test_how_often_other_keys_are_chosen():
    token_ids = torch.randint(
        2, VOCABULARY, (DOCUMENTS, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    print("\n| | queries | of the first layer | keys | logprob | largest | replayed | largest |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        model, name = sparse_model(dtype), str(dtype).removeprefix("torch.")
        compare(f"{name}: sdpa, eager", model, "alone", "eager", token_ids)
        compare(f"{name}: alone, in a batch", model, "alone", "batch", token_ids)
        compare(f"{name}: alone, packed", model, "alone", "packed", token_ids)
        compare(f"{name}: 1 thread, 2 threads", model, "alone", "alone", token_ids, threads=2)
    low, high = sparse_model(torch.bfloat16), sparse_model(torch.float32)
    free, replayed = compare("float32, bfloat16", high, "alone", "alone", token_ids, other=low)
    few = {"index_n_heads": 2}
    compare(
        "float32: alone, packed; 2 indexer heads",
        sparse_model(torch.float32, **few),
        "alone",
        "packed",
        token_ids,
    )
    assert replayed < free
