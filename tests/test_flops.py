import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from admitted_families import ADMITTED, often
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from primerl import flops, parallel, testing
from primerl._common.mixer_costs import MIXED_FAMILIES
from primerl.attention import attend_by_document, indexer, latent
from primerl.testing.families import tiny_config, tiny_family

SPARSE = {"index_topk": 5, "index_n_heads": 2, "index_head_dim": 16}
SETTINGS = {  # where the tiny model's own are not enough
    "dots1": {"n_shared_experts": 1},
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
}
WINDOWED = ("mistral", "phi3", "gemma2", "gemma3_text", "gpt_oss")
MODELS = (  # compared part by part
    "llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "glm4", "gemma2",
    "gemma3_text", "seed_oss", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe",
    "dots1", "minimax_m2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa",
)  # fmt: skip
# Looked up, not multiplied with, and not counted.
OTHER_TABLES = ("embed_positions", "wpe", "embed_tokens_per_layer", "e_score_correction_bias")


def tiny(family, **settings):
    model = testing.tiny_model(family, **{**SETTINGS.get(family, {}), **settings})
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    return model


def counted(model, n):
    """What torch counts: by part, with attention scores as eager attention computes them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(n)[None], use_cache=False)
    parts = dict.fromkeys(("projections", "scores", "indexer", "mlp", "experts", "head"), 0)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    for name, total in counts.items():
        words = name.split(".")
        if words[-1] == "lm_head":
            parts["head"] += total
        elif words[-1] == "self_attn":
            parts["scores"] += total
        elif words[-1] == "indexer":
            parts["indexer"] += total
            parts["scores"] -= total
        elif words[-1].endswith(("_proj", "_mqa")) and words[-2] == "self_attn":
            parts["projections"] += total
            parts["scores"] -= total
        elif words[-1] in ("mlp", "block_sparse_moe"):
            module = model.get_submodule(".".join(words[1:]))
            sparse = hasattr(module, "experts")
            parts["experts" if sparse else "mlp"] += total
    assert sum(parts.values()) == counter.get_total_flops() - rotary_angles(counter)
    return parts


def rotary_angles(counter):
    """Products of positions and frequencies: matrix products in transformers 5.17, not in 5.19."""
    counts = counter.get_flop_counts().items()
    return sum(sum(ops.values()) for name, ops in counts if "rotary_emb" in name.split(".")[-1])


@pytest.mark.parametrize("family", MODELS)
def test_what_a_model_runs_is_what_is_counted(family):
    model, n = tiny(family), 4  # as many tokens as every window and top-k have keys

    ours, theirs = flops.breakdown(model.config, n), counted(model, n)

    assert ours.attention_projections == theirs["projections"]
    assert ours.mlp == theirs["mlp"]
    assert ours.experts == theirs["experts"]
    assert ours.head == theirs["head"]
    # Eager attention computes n * n pairs, of which n (n + 1) / 2 are causal.
    causal = (n + 1) / (2 * n)
    assert ours.attention_scores == theirs["scores"] * causal
    assert ours.indexer == 0  # of documents that see all keys, only transformers runs it
    assert (theirs["indexer"] > 0) == (family in ("deepseek_v32", "glm_moe_dsa"))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_where_an_indexer_chooses_attention_stays_in_the_latent_space(family):
    model, n = tiny(family), 8

    ours, theirs = flops.breakdown(model.config, n), counted(model, n)

    # Eager expands keys (8 + 8) and values (8), and computes all pairs; kernels compute those of
    # the best 5 keys, with latents (16) and 8 of position.
    pairs = 15 + 3 * 5
    assert ours.attention_scores / pairs == theirs["scores"] / n**2 * (16 + 8 + 16) / (8 + 8 + 8)
    scores = 2 * 2 * (16 + 1) * 2  # layers, heads, size and weight, FLOPs
    assert ours.indexer == theirs["indexer"] - scores * (n * n - n * (n + 1) / 2)


class Products(TorchDispatchMode):
    """Counts the FLOPs of products, also within this library's operators."""

    def __init__(self):
        super().__init__()
        self.total = 0
        self.within = {
            torch.ops.primerl.choose_keys.default: indexer._choose._init_fn,
            torch.ops.primerl.attend_to_latents.default: latent._attend._init_fn,
            torch.ops.primerl.attend_to_latents_backward.default: latent._gradients._init_fn,
        }

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        with self:
            if func in self.within:
                return self.within[func](*args)
            parts = func.decompose(*args, **(kwargs or {}))  # matmul into mm and bmm
            if parts is not NotImplemented:
                return parts
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_runs_what_is_counted(family, monkeypatch):
    """Packed documents of 8 and of 5 times index_topk, forward and backward."""
    small = {"index_topk": 64, "index_n_heads": 4, "max_position_embeddings": 512}
    model = tiny(family, **small)
    parallel.freeze_indexer(model)
    monkeypatch.setattr(
        latent, "MAX_GATHERED", 64 * 24 * 2
    )  # 2 queries at a time: few masked pairs
    monkeypatch.setattr(indexer, "MAX_SCORES", 4 * 512 * 8)
    lengths = [512, 320]
    token_ids = torch.randint(2, 64, (sum(lengths),))
    positions = torch.cat([torch.arange(n) for n in lengths])

    with Products() as run:
        documents = attend_by_document(model, positions)
        out = model.model(
            token_ids[None], position_ids=positions[None], documents=documents, use_cache=False
        )
        before = run.total
        out.last_hidden_state.sum().backward()

    parts = flops.breakdown(model.config, lengths)
    forward = (parts.total - parts.head).sum()
    assert before == pytest.approx(forward, rel=0.02)
    backward = (flops.backward(model.config, lengths) - 2 * parts.head).sum()
    assert run.total - before == pytest.approx(backward, rel=0.02)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", often(ADMITTED))
def test_every_admitted_family_is_counted_or_refused_with_its_reason(family):
    """Products of weights, products of attention, and weights, as its model has them."""
    model, n = tiny_family(family).eval(), 4
    kind = model.config.get_text_config(decoder=True).model_type
    if kind in flops.REFUSED:
        with pytest.raises(ValueError, match=flops.REFUSED[kind]):
            flops.forward(model.config, n)
        return
    weights = {
        id(p): p.numel()
        for name, p in model.named_parameters()
        if p.ndim > 1 and not name.endswith(("bias", "A_log")) and p.requires_grad
        if not any(table in name for table in OTHER_TABLES)
    }
    assert flops.parameters(model.config).total == sum(weights.values())
    if kind in MIXED_FAMILIES or family.startswith(("llama4", "kimi_k25")):
        return  # the next test; experts of Llama 4 compute all tokens, and those of Kimi stay fused
    model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(3, 3 + n)[None], use_cache=False)
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    angles = rotary_angles(counter)
    attention = sum(count for op, count in counts.items() if "bmm" in op) - angles
    counts["rotary angles"] = -angles

    parts, sizes = flops.breakdown(model.config, n), flops.parameters(model.config)

    others = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text", "minimax_m3_vl")
    if family not in others:  # their indexers are counted by other tests
        assert parts.attention_scores == attention * (n + 1) / (2 * n)
        assert parts.total - parts.attention_scores == sum(counts.values()) - attention
    assert 2 * n * sizes.active == sum(counts.values()) - attention


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", sorted(MIXED_FAMILIES))
def test_linear_attention_and_state_space_layers_run_what_is_counted(family):
    model, n = tiny_family(family).eval(), 128
    model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(n)[None] % 90 + 3, use_cache=False)

    ours = flops.forward(model.config, n)

    # Eager attention computes n * n pairs; ours are causal.
    config = flops._language_model(model.config)
    masked = sum(layer.per_pair for layer in flops._layers(config)) * n * (n - 1)
    masked += beside_mamba_2(model, n)
    assert ours + masked == pytest.approx(
        counter.get_total_flops() - rotary_angles(counter), rel=0.02
    )
    assert flops.training(model.config, n) == 3 * ours


def beside_mamba_2(model, n):
    """FLOPs of Mamba 2 in plain torch that its algorithm (arXiv:2405.21060) doesn't need.

    Keys and queries are repeated for each head of a group, and the states of chunks are combined
    over all pairs of chunks.
    """
    total = 0
    for mixer in model.modules():
        if hasattr(mixer, "n_groups") and hasattr(mixer, "ssm_state_size"):
            repeated = (mixer.num_heads - mixer.n_groups) * mixer.ssm_state_size
            state = mixer.num_heads * mixer.head_dim * mixer.ssm_state_size
            chunks = n // mixer.chunk_size + 1  # and the state before the document
            total += 2 * (n * mixer.chunk_size * repeated + chunks**2 * state)
    return total


@pytest.mark.parametrize("family", sorted(MIXED_FAMILIES))
def test_mixers_are_linear_in_the_length_of_long_documents(family):
    config = tiny_config(family)
    mixers = [layer for layer in flops._layers(config) if layer.mixer]

    assert mixers
    for layer in mixers:
        short, long = layer.mixing(np.array([2.0**16, 2.0**20]))
        assert long == 16 * short


def test_mamba_2_by_hand():
    """Its chunked algorithm: scores of each group, and values and states of each head."""
    config = tiny_config("bamba")
    heads, size, state = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    groups, chunk = config.mamba_n_groups, config.mamba_chunk_size
    assert heads > groups
    n = 4 * chunk
    scores = n * chunk * groups * state
    values = n * chunk * heads * size
    states = 2 * n * heads * size * state  # into the state of a chunk, and from that before
    convolution = n * config.mamba_d_conv * (heads * size + 2 * groups * state)

    (layer,) = {one for one in flops._layers(config) if one.mixer}

    assert layer.mixing(np.array([float(n)])) == scores + values + states + convolution


def test_families_that_are_listed_are_admitted():
    """All that is counted or refused is the language model of an admitted family, or known."""
    kinds = {tiny_config(family).get_text_config(decoder=True).model_type for family in ADMITTED}
    others = {"kimi_k2"}  # DeepSeek V3's layers

    assert kinds | others == flops.FAMILIES | flops.REFUSED.keys()


@pytest.mark.parametrize("family", MODELS)
def test_weights_are_those_of_the_model(family):
    for tied in (False, True):
        model = tiny(family, tie_word_embeddings=tied)

        matrices = {
            id(weight): weight.numel()
            for name, weight in model.named_parameters()
            if weight.ndim > 1 and not name.endswith("bias")
        }
        assert flops.parameters(model.config).total == sum(matrices.values())


def test_layers_with_heads_of_different_sizes_count_with_their_own():
    """Gemma 4, whose configuration has no head size of all layers."""
    config = transformers.Gemma4TextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    products = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "per_layer_model_projection" not in name
    )
    projected = model.get_submodule("model.per_layer_model_projection").weight.numel()

    assert flops.parameters(config).active == products + projected
    pairs = (10 + 4 * 4) * 16 + 36 * 32  # of eight tokens
    assert flops.breakdown(config, 8).attention_scores == 2 * 2 * 2 * pairs


@pytest.mark.parametrize("family", [*WINDOWED, "qwen3", "qwen3_moe", "deepseek_v32", "glm_moe_dsa"])
def test_pairs_are_those_that_have_attention(family):
    n, heads, size = 12, 4, 8
    settings = {"sliding_window": 5} if family in WINDOWED else {}
    model = tiny(family, num_hidden_layers=6, **settings)

    with torch.no_grad():
        attentions = model(
            torch.arange(n)[None], output_attentions=True, use_cache=False
        ).attentions

    seen = sum(int((weights[0, 0] > 0).sum()) for weights in attentions)
    multiply_adds = 16 + 8 + 16 if family in ("deepseek_v32", "glm_moe_dsa") else 2 * size
    assert len(attentions) == 6
    assert flops.breakdown(model.config, n).attention_scores == 2 * heads * multiply_adds * seen
    assert (seen < 6 * n * (n + 1) / 2) == (family not in ("qwen3", "qwen3_moe"))


def test_a_tiny_dense_model_by_hand():
    config = SimpleNamespace(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, vocab_size=10,
    )  # fmt: skip

    parts = flops.breakdown(config, [0, 1, 5])

    # q and o: 8 x 8 each, k and v: 8 x 4 each; two FLOPs, three layers
    assert parts.attention_projections.tolist() == [0, 2 * 3 * 192, 5 * 2 * 3 * 192]
    # 2 heads of size 4, for keys and for values, over 1 and over 15 pairs
    assert parts.attention_scores.tolist() == [0, 2 * 3 * 16, 15 * 2 * 3 * 16]
    assert parts.mlp.tolist() == [0, 2 * 3 * 384, 5 * 2 * 3 * 384]
    assert parts.head.tolist() == [0, 2 * 80, 5 * 2 * 80]
    assert parts.experts.tolist() == parts.indexer.tolist() == [0, 0, 0]
    assert flops.forward(config, 1) == 2 * (3 * (192 + 16 + 384) + 80)
    assert flops.training(config, 1) == 3 * flops.forward(config, 1)
    assert flops.training(config, 1, recompute=True) == 4 * flops.forward(config, 1)
    assert flops.parameters(config) == flops.Parameters(total=1888, active=1808)
    many = flops.forward(config, np.array([[1, 2], [3, 4]]))
    assert many.shape == (2, 2)
    assert many.dtype == np.float64


def test_glm_5_and_5_2_have_their_published_size():
    glm_5 = flops.parameters(transformers.GlmMoeDsaConfig())
    shared = transformers.GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)
    glm_5_2 = flops.parameters(shared)

    assert glm_5.total == pytest.approx(743.911e9, rel=2e-6)
    assert glm_5_2.total == pytest.approx(743.377e9, rel=2e-6)
    assert glm_5.active == pytest.approx(40.8e9, rel=1e-3)
    # 57 of the 78 layers share their keys with one before
    indexer = 2048 * 32 * 128 + 6144 * (128 + 32)
    assert glm_5.total - glm_5_2.total == 57 * indexer
    whole, less = (
        flops.breakdown(config, 131_072) for config in (transformers.GlmMoeDsaConfig(), shared)
    )
    assert less.indexer / whole.indexer == pytest.approx(21 / 78)
    assert less.attention_scores == whole.attention_scores


@pytest.mark.parametrize(
    ("length", "indexer", "total"), [(32768, 10.5, 114), (65536, 20.9, 125), (131_072, 41.9, 146)]
)
def test_glm_5_has_its_published_cost(length, indexer, total):
    """In GFLOPs for each token, forward."""
    config = transformers.GlmMoeDsaConfig()

    parts = flops.breakdown(config, length)

    giga = 1e9 * length
    weights = 2 * flops.parameters(config).active
    assert weights == pytest.approx(81.7e9, rel=1e-3)
    # 2048 keys for all but the first tokens, which have fewer
    assert 0.96 * 22.2 < parts.attention_scores / giga < 22.2
    # the published number leaves out the weights that sum the heads' scores, one in 128
    scores = parts.indexer / giga - 2 * 78 * 9_371_648 / 1e9
    assert scores == pytest.approx(indexer * 129 / 128, rel=5e-3)
    assert parts.total / giga == pytest.approx(total, rel=5e-3)
    assert flops.training(config, length) == 3 * parts.total - 2 * parts.indexer


@pytest.mark.parametrize(
    "share",
    [
        {"indexer_types": ["full", "full", "shared", "full"]},
        {"index_topk_pattern": "FFSF"},
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
    ],
)
def test_layers_that_share_their_keys_have_no_indexer(share):
    settings = {
        **vars(tiny("glm_moe_dsa", num_hidden_layers=4).config),
        "indexer_types": None,
        **share,
    }
    plain = SimpleNamespace(**settings, model_type="glm_moe_dsa")
    every = SimpleNamespace(**{**settings, "index_topk_freq": 1, "indexer_types": ["full"] * 4})

    ours = flops.breakdown(plain, 9).indexer

    assert ours == flops.breakdown(every, 9).indexer * 3 / 4


def test_latent_queries_may_be_projected_at_once():
    config = tiny("deepseek_v3", q_lora_rank=None)

    assert (
        flops.breakdown(config.config, 4).attention_projections == counted(config, 4)["projections"]
    )


EXPERTS_IN_SOME = {  # where the tiny model has experts in all layers
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "jamba": {"num_hidden_layers": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
    "llama4_text": {"interleave_moe_layer_step": 2, "moe_layers": None},
    "qwen3_moe": {"num_hidden_layers": 4, "decoder_sparse_step": 2},
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", often(ADMITTED))
def test_experts_are_chosen_in_the_layers_that_have_them(family):
    model = tiny_family(family, **EXPERTS_IN_SOME.get(family, {}))
    kind = model.config.get_text_config(decoder=True).model_type
    if kind in flops.REFUSED:
        pytest.skip(f"{kind} {flops.REFUSED[kind]}")
    chosen = flops.chosen_experts(model.config)
    names = [name for name, module in model.named_modules() if is_mixture(module)]
    found = {int(re.search(r"layers\.(\d+)\.", name)[1]) for name in names}

    assert {index for index, count in enumerate(chosen) if count} == found
    if family in EXPERTS_IN_SOME:
        assert 0 < len(found) < len(chosen)


def is_mixture(module):
    """Whether a module is a feed-forward layer with experts, by the modules of transformers."""
    if type(module).__name__ == "JetMoeMoE":
        return True
    return hasattr(module, "experts") and isinstance(module.experts, torch.nn.Module)


def test_chosen_blocks_of_keys_are_counted():
    """MiniMax-M3: pairs as its attention has them, and its indexer, of documents beyond the top."""
    model = tiny_family("minimax_m3_vl_text", index_block_size=4, index_topk_blocks=3).eval()
    model.set_attn_implementation("eager")
    config = model.config.get_text_config()
    sparse = config.layer_types.index("minimax_m3_sparse")

    for n in (1, 3, 12, 13, 16, 18, 31):
        with torch.no_grad():
            out = model(torch.arange(n)[None] + 3, output_attentions=True, use_cache=False)
        seen = sum(int((weights[0, 0] > 0).sum()) for weights in out.attentions)
        widths = 2 * config.num_attention_heads * config.head_dim
        parts = flops.breakdown(config, n)
        assert parts.attention_scores == 2 * widths * seen
        indexer = model.get_submodule(f"model.layers.{sparse}.self_attn.indexer")
        weights = sum(p.numel() for p in indexer.parameters() if p.ndim > 1)
        per_pair = config.index_n_heads * config.index_head_dim
        expected = 2 * (n * weights + n * (n + 1) // 2 * per_pair)
        assert parts.indexer == (expected if n > 12 else 0)


def test_a_query_that_may_not_see_its_own_block_is_refused():
    config = tiny_config("minimax_m3_vl_text", index_local_blocks=0)
    with pytest.raises(ValueError, match="index_local_blocks is 0; expected at least 1"):
        flops.forward(config, 5)


def test_experts_in_some_layers_only():
    every_other = tiny("qwen3_moe", num_hidden_layers=3, decoder_sparse_step=2)
    first_dense = tiny("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0])

    for model in (every_other, first_dense):
        parts, theirs = flops.breakdown(model.config, 6), counted(model, 6)
        assert (parts.mlp, parts.experts) == (theirs["mlp"], theirs["experts"])
        assert parts.mlp > 0


def test_a_window_that_is_switched_off_is_none():
    config = tiny("qwen3").config
    raw = {**vars(config), "layer_types": None, "sliding_window": 3}

    off = SimpleNamespace(**{**raw, "use_sliding_window": False})
    on = SimpleNamespace(**{**raw, "use_sliding_window": True})

    assert flops.forward(off, 9) == flops.forward(config, 9) > flops.forward(on, 9)


def test_a_config_with_a_language_model_in_it_is_that_one():
    text = tiny("deepseek_v3").config

    assert flops.forward(SimpleNamespace(text_config=text), 7) == flops.forward(text, 7)
    assert flops.forward(SimpleNamespace(**vars(text), model_type="kimi_k2"), 7) > 0


def test_unknown_families_are_refused():
    with pytest.raises(ValueError, match="config.model_type 'mamba' is not supported"):
        flops.forward(transformers.MambaConfig(), 5)
    config = vars(tiny("qwen3").config)
    linear = SimpleNamespace(**{**config, "layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(ValueError, match=r"layer_types\[1\] is 'linear_attention', which primerl"):
        flops.forward(linear, 5)
    for name in ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"):
        without = SimpleNamespace(**{**config, name: None})
        with pytest.raises(ValueError, match=f"has no {name}.*, which the FLOPs"):
            flops.parameters(without)
    latent = SimpleNamespace(**{**config, "kv_lora_rank": 4})
    with pytest.raises(ValueError, match="has no qk_rope_head_dim"):
        flops.forward(latent, 5)
    experts = SimpleNamespace(**{**config, "num_experts": 4})
    with pytest.raises(ValueError, match="has no num_experts_per_tok"):
        flops.forward(experts, 5)


@pytest.mark.parametrize("lengths", [-1, [3, -2], 2.5, [1.0, float("nan")], float("inf"), "12"])
def test_invalid_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths is .*; expected whole numbers, at least 0"):
        flops.forward(tiny("llama").config, lengths)


def test_it_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from primerl import flops; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- published figures ----

QWEN3 = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "30B-A3B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
# As those who published them assume: an A6000 has that of an A100.
PEAKS = {"A6000": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2.25e15}
# Model, tokens, GPUs, their kind, tokens/s in thousands, and the share of the peak in percent:
# prime-rl's BENCHMARKS.md of 2026-02-01, all rows of full fine-tuning.
PUBLISHED = """
0.6B 16384 1 H100 11.90 11.1
0.6B 16384 1 A6000 3.69 10.9
0.6B 65536 1 H100 10.15 26.8
0.6B 65536 1 H100 9.98 26.4
0.6B 65536 4 A6000 7.72 16.2
0.6B 65536 1 A6000 2.04 17.1
0.6B 8192 1 H100 26.01 16.8
0.6B 8192 1 A6000 6.60 13.5
0.6B 16384 1 H100 25.49 23.7
30B-A3B 16384 8 H100 6.11 2.9
30B-A3B 16384 8 H200 5.94 2.8
30B-A3B 65536 8 H200 12.75 15.4
30B-A3B 16384 8 H200 35.03 16.6
4B 16384 8 B200 27.54 6.5
4B 16384 8 H200 27.44 14.7
4B 16384 8 H100 26.03 13.9
4B 65536 8 H200 29.54 36.1
4B 65536 8 H100 28.97 35.4
4B 16384 8 B200 68.36 16.0
4B 16384 8 H200 53.14 28.4
4B 16384 8 H100 49.72 26.6
4B 65536 8 B200 26.39 14.2
"""


@pytest.mark.parametrize("row", PUBLISHED.split("\n")[1:-1])
def test_shares_of_the_peak_that_others_published(row):
    """Our parameters in their count: dense attention over all pairs, heads as wide as the model."""
    model, tokens, gpus, gpu, thousands, published = row.split()
    kind = transformers.Qwen3MoeConfig if "A3B" in model else transformers.Qwen3Config
    config = kind(vocab_size=151936, head_dim=128, **QWEN3[model])
    pairs = 12 * config.num_hidden_layers * config.hidden_size * int(tokens)
    per_token = 6 * flops.parameters(config).active + pairs
    each = float(thousands) * 1e3 / int(gpus) / PEAKS[gpu]
    assert abs(100 * per_token * each - float(published)) < 0.06

    # Our count, causal and with the heads' true size, is equal where these are twice as wide as the
    # model; those of 4B are 1.6 times as wide.
    ours = float(flops.training(config, [int(tokens)])[0]) / int(tokens)
    assert ours == pytest.approx(per_token, rel=1e-3) if model != "4B" else ours < 0.95 * per_token
