"""Routes captured from unmodified models, and forced inside their routers."""

import gc

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from primerl import loss, parallel, replay, testing
from primerl.replay.recorder import expert_layers
from primerl.testing.families import tiny_family

# The families of transformers whose layers have experts, and which can be built here.
FAMILIES = [
    "afmoe",
    "aria_text",
    "axk1",
    "axk2",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "laguna",
    "lfm2_moe",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "solar_open",
]
WITH_EXPERTS = {
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    }
}
TOKENS = 24
IDS = torch.randint(1, 90, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def built(family, **settings):
    transformers.logging.set_verbosity_error()
    try:
        return tiny_family(family, **settings).eval()
    except ValueError as error:
        pytest.skip(f"this version of transformers has no {family}: {error}")


def random_rows(model, *, tokens=TOKENS, seed=1):
    shape = replay.shape(model)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, len(shape.layers), shape.experts, generator=generator)
    return scores.topk(shape.k).indices


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def as_sets(rows):
    return rows.long().sort(-1).values


@pytest.fixture
def force_last_top_k(monkeypatch):
    """Another way to force routes: ``torch.topk`` itself is replaced while a layer runs."""

    def force(model, rows):
        layers = expert_layers(model)
        place = {layer.name: index for index, layer in enumerate(layers)}
        running = []
        for layer in layers:
            layer.block.register_forward_pre_hook(lambda *_, name=layer.name: running.append(name))
            layer.experts.register_forward_pre_hook(lambda *_: running.clear())
        plain = torch.topk

        def top_k(scores, k, *args, **kwargs):
            result = plain(scores, k, *args, **kwargs)
            if not running or scores.shape[-1] != layers[0].count or scores.ndim != 2:
                return result
            indices = rows[:, place[running[-1]]]
            return torch.return_types.topk((scores.gather(-1, indices), indices))

        monkeypatch.setattr(torch, "topk", top_k)
        monkeypatch.setattr(torch.Tensor, "topk", top_k)

    return force


class TestEveryFamily:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_own_routes_change_nothing_and_random_ones_are_followed(self, family, force_last_top_k):
        if family == "aria_text" and transformers.__version__.startswith("5.17."):
            pytest.skip("failed with transformers 5.17.0")
        model = built(family, **WITH_EXPERTS.get(family, {}))
        with torch.no_grad(), replay.capture(model) as own:
            plain = model(IDS).logits
        rows = own.rows
        assert rows.shape == (TOKENS, len(replay.shape(model).layers), replay.shape(model).k)
        assert rows.dtype == torch.int16

        with torch.no_grad(), replay.forced(model, rows.flip(-1)):  # their order has no meaning
            assert torch.equal(model(IDS).logits, plain)

        other = random_rows(model)
        with torch.no_grad(), replay.forced(model, other), replay.capture(model) as reached:
            forced = model(IDS).logits
        assert torch.equal(as_sets(reached.rows), as_sets(other))
        assert (forced - plain).abs().max() > 1e-5
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, plain)
            force_last_top_k(model, other)
            torch.testing.assert_close(model(IDS).logits, forced, rtol=0, atol=1e-6)

    @pytest.mark.parametrize(
        ("experts", "k", "groups"), [(6, 1, 1), (16, 4, 4), (12, 3, 2), (20, 19, 1), (40, 8, 5)]
    )
    def test_any_number_of_experts_and_groups(self, experts, k, groups, force_last_top_k):
        model = built(
            "deepseek_v3",
            n_routed_experts=experts,
            num_experts_per_tok=k,
            n_group=groups,
            topk_group=max(1, groups - 1),
        )
        rows = random_rows(model)
        assert rows.shape[-1] == k

        with torch.no_grad(), replay.forced(model, rows), replay.capture(model) as reached:
            forced = model(IDS).logits
        assert torch.equal(as_sets(reached.rows), as_sets(rows))
        with torch.no_grad():
            force_last_top_k(model, rows)
            torch.testing.assert_close(model(IDS).logits, forced, rtol=0, atol=1e-6)

    def test_a_layer_that_looks_its_experts_up_follows_its_own_routes_alone(self):
        model = built("deepseek_v4")
        table = dict(model.named_buffers())["model.layers.0.mlp.gate.tid2eid"]
        entries = torch.rand(len(table), 8, generator=torch.Generator().manual_seed(2))
        table.copy_(entries.topk(table.shape[1]).indices)
        with torch.no_grad(), replay.capture(model) as own:
            plain = model(IDS).logits

        with torch.no_grad(), replay.forced(model, own.rows):
            assert torch.equal(model(IDS).logits, plain)
        with (
            pytest.raises(RuntimeError, match=r"model.layers.0.mlp.experts can't be forced"),
            torch.no_grad(),
            replay.forced(model, random_rows(model)),
        ):
            model(IDS)

    def test_a_family_whose_router_has_no_top_k_is_refused(self):
        model = built("phimoe")
        with (
            pytest.raises(RuntimeError, match="does not choose experts by topk over the scores"),
            torch.no_grad(),
            replay.forced(model, random_rows(model)),
        ):
            model(IDS)

    def test_a_family_whose_experts_take_no_indices_is_refused(self):
        model = built("jetmoe")
        with (
            pytest.raises(ValueError, match="routed experts whose module takes the"),
            replay.capture(model),
        ):
            pytest.fail("the body was reached")


def swiglu(block, expert, x):
    gate, up = F.linear(x, block.experts.gate_up_proj[expert]).chunk(2)
    return F.linear(F.silu(gate) * up, block.experts.down_proj[expert])


def mixed(block, x, chosen, weights):
    """Each token's experts, one by one, by weight."""
    return torch.stack(
        [
            sum(w * swiglu(block, int(e), one) for e, w in zip(experts, mix, strict=True))
            for one, experts, mix in zip(x, chosen, weights, strict=True)
        ]
    )


def softmax_router(block, x, chosen):
    """Qwen3-MoE: the softmax of all experts, scaled to 1 over those that are chosen."""
    weights = F.linear(x, block.gate.weight).softmax(-1).gather(-1, chosen)
    return mixed(block, x, chosen, weights / weights.sum(-1, keepdim=True))


def sigmoid_router(block, x, chosen):
    """DeepSeek-V3: sigmoids, scaled to 1 and then by a constant, and a shared expert."""
    weights = F.linear(x, block.gate.weight).sigmoid().gather(-1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * block.config.routed_scaling_factor
    return mixed(block, x, chosen, weights) + block.shared_experts(x)


@pytest.mark.parametrize(
    ("family", "reference"), [("qwen3_moe", softmax_router), ("deepseek_v3", sigmoid_router)]
)
def test_gradients_of_a_forced_router_equal_a_reference_by_hand(family, reference):
    model = built(family, norm_topk_prob=True)
    layer = expert_layers(model)[0]
    block, rows = layer.block, random_rows(model)[:, :1]
    x = torch.randn(TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))

    class OneLayer(nn.Module):
        """The block alone, as a model of one decoder layer."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([block])
            self.config = transformers.PretrainedConfig(num_hidden_layers=1)

        def forward(self, x):
            return self.layers[0](x[None])[0]

    def gradients(compute):
        inputs = x.clone().requires_grad_()
        block.zero_grad()
        out = compute(inputs)
        (out * weight).sum().backward()
        return out.detach(), inputs.grad, *(p.grad.clone() for p in block.parameters())

    alone = OneLayer()
    with replay.forced(alone, rows):
        found = gradients(alone)
    expected = gradients(lambda inputs: reference(block, inputs, rows[:, 0]))

    assert block.gate.weight.grad.abs().max() > 1e-3
    for ours, by_hand in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, by_hand, rtol=1e-4, atol=1e-5)


class TestCounts:
    def test_shares_of_tokens_and_layers(self):
        model = built("qwen3_moe")
        with torch.no_grad(), replay.capture(model) as own:
            model(IDS)
        rows = own.rows.clone()
        rows[:6] = -1  # 6 of 24 tokens, in both layers
        taken = set(rows[10, 1].tolist())
        rows[10, 1, 0] = next(expert for expert in range(8) if expert not in taken)
        counts = replay.RouteCounts()
        assert counts.summary() == {}

        with torch.no_grad(), replay.forced(model, rows, counts=counts):
            model(IDS)
            model(IDS)

        shares = counts.summary()
        # The other expert of token 10 in the last layer changes no later router.
        assert shares == {"routes_differ": 1 / 48, "routes_missing": 12 / 48, "routes_lost": 0}
        assert counts.summary() == {}

    @pytest.mark.parametrize("selective", [False, True])
    def test_recomputed_passes_and_those_run_twice_count_once(self, selective):
        model = built("qwen3_moe").train()
        rows = random_rows(model)
        positions = torch.arange(TOKENS)

        def losses(*, recomputed):
            if recomputed:
                parallel.recompute(model, selective=selective)
            counts = replay.RouteCounts()
            model.zero_grad()
            with replay.forced(model, rows, counts=counts):
                logprobs = loss.model_logprobs(model, IDS[0], positions, IDS[0].roll(-1))
                logprobs.sum().backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            return logprobs.detach(), gradients, counts.summary()

        plain, gradients, shares = losses(recomputed=False)
        again, same, of_recomputed = losses(recomputed=True)

        assert torch.equal(plain, again)
        assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
        assert shares == of_recomputed
        assert shares["routes_differ"] > 0.5


class TestFaults:
    @pytest.fixture
    def model(self):
        return built("glm4_moe", num_hidden_layers=3)  # the first is dense

    def test_rows_of_fewer_layers_are_refused(self, model):
        rows = random_rows(model)[:, :1]
        expected = "the 2 layers with experts, model.layers.1.mlp.experts to model.layers.2"
        with pytest.raises(ValueError, match=expected), replay.forced(model, rows):
            pytest.fail("the body was reached")

    @pytest.mark.parametrize(
        ("token", "layer", "experts", "message"),
        [
            (
                7,
                1,
                [0, 8],
                r"layers.2.mlp.experts .* it does not have, in 1 .* 7 to 7: \[0, 8\] of 8",
            ),
            (
                3,
                0,
                [-2, 1],
                "layers.1.mlp.experts is to be forced to experts that it does not have",
            ),
            (
                3,
                0,
                [5, 5],
                r"layers.1.mlp.experts .* an expert twice, in 1 tokens from token 3 to 3",
            ),
            (2, 0, [4, -1], "some experts, and -1 for others, in 1 tokens from token 2"),
        ],
    )
    def test_rows_of_another_model_are_refused(self, model, token, layer, experts, message):
        rows = random_rows(model)
        rows[token, layer] = torch.tensor(experts)

        with pytest.raises(ValueError, match=message), replay.forced(model, rows):
            pytest.fail("the body was reached")
        assert hooks_of(model) == 0

    def test_rows_of_other_tokens_are_refused(self, model):
        rows = random_rows(model, tokens=TOKENS - 1)
        with (
            pytest.raises(
                ValueError, match=r"layers.1.mlp.experts routes 24 tokens.* have 23 rows"
            ),
            replay.forced(model, rows),
        ):
            model(IDS)
        assert hooks_of(model) == 0
        assert model(IDS).logits.isfinite().all()

    def test_rows_with_another_number_of_choices_are_refused(self, model):
        rows = torch.arange(3).expand(TOKENS, 2, 3)
        with (
            pytest.raises(ValueError, match=r"to 2 experts each, but the routes have 24 rows of 3"),
            replay.forced(model, rows),
        ):
            model(IDS)

    def test_a_dense_model_has_no_routes(self):
        dense = testing.tiny_model("qwen3")
        for enter in (
            replay.capture,
            lambda model: replay.forced(model, torch.zeros(1, 1, 1).long()),
        ):
            with pytest.raises(ValueError, match="no layers with routed experts"), enter(dense):
                pass
        with replay.forced(dense, None):
            dense(IDS % 60)

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    def test_compiled_layers_are_refused(self, model):
        layer = model.model.layers[1]
        layer.compile(dynamic=True)
        with (
            pytest.raises(ValueError, match=r"model.layers.1 is compiled, so routes can"),
            replay.forced(model, random_rows(model)),
        ):
            pytest.fail("the body was reached")

    def test_a_backward_pass_that_recomputes_outside_is_refused(self, model):
        parallel.recompute(model.train())
        with (
            pytest.raises(RuntimeError, match="did not run within `with replay.forced"),
            replay.forced(model, random_rows(model)),
        ):
            model(IDS)
        with torch.no_grad(), replay.forced(model, random_rows(model)):
            model(IDS)

    def test_a_block_that_did_not_run_is_reported(self, model):
        class Skipped(nn.Module):
            def forward(self, x):
                return torch.zeros_like(x)

        def run():
            with replay.forced(model, rows):
                model.model.layers[2].mlp = Skipped()
                model(IDS)

        rows = random_rows(model)
        with pytest.raises(
            RuntimeError, match="layers.2.mlp.experts ran 0 times in 1 forward pass"
        ):
            run()

    def test_an_error_in_the_body_leaves_nothing_behind(self, model):
        def fail(*_):
            raise KeyError("of the experts")

        handle = expert_layers(model)[0].experts.register_forward_hook(fail)
        with (
            pytest.raises(KeyError, match="of the experts"),
            replay.forced(model, random_rows(model)),
        ):
            model(IDS)
        handle.remove()
        gate = model.model.layers[1].mlp.gate
        handle = gate.register_forward_hook(fail)  # while topk is replaced
        with (
            pytest.raises(KeyError, match="of the experts"),
            replay.forced(model, random_rows(model)),
        ):
            model(IDS)
        handle.remove()

        assert hooks_of(model) == 0
        assert torch.overrides._get_current_function_mode_stack() == []
        gc.collect()

    def test_routes_of_a_pass_that_was_not_whole(self, model):
        with replay.capture(model) as routes, pytest.raises(RuntimeError, match="2 of 2 layers"):
            _ = routes.rows


class TestBinding:
    def test_the_shape_of_a_model(self):
        shape = replay.shape(built("glm4_moe", num_hidden_layers=4, first_k_dense_replace=2))
        assert shape == replay.RouteShape(layers=(2, 3), decoder_layers=4, experts=8, k=2)

    def test_layers_that_predict_several_tokens_are_left_out(self):
        model = built("qwen3_moe", num_hidden_layers=3)
        decoder = model.model.layers
        model.config.num_hidden_layers = 2  # the third is one for MTP, in the same list
        extra = built("qwen3_moe", num_hidden_layers=1)
        model.add_module("mtp", nn.ModuleList(extra.model.layers))

        assert [layer.name for layer in expert_layers(model)] == [
            "model.layers.0.mlp.experts",
            "model.layers.1.mlp.experts",
        ]
        assert len(decoder) == 3

    def test_a_layer_with_two_sets_of_experts_is_refused(self):
        model = built("qwen3_moe")
        block = model.model.layers[1]
        block.add_module("vision", built("qwen3_moe").model.layers[0].mlp)

        with pytest.raises(ValueError, match=r"layer 1 has several sets of experts"):
            replay.shape(model)

    def test_with_adapters(self):
        peft = pytest.importorskip("peft")
        model = built("qwen3_moe")
        with torch.no_grad(), replay.capture(model) as own:
            plain = model(IDS).logits
        config = peft.LoraConfig(
            r=2,
            target_modules=["q_proj", "v_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        adapted = peft.get_peft_model(model, config)

        with torch.no_grad(), replay.forced(adapted, own.rows):
            torch.testing.assert_close(adapted(IDS).logits, plain, rtol=0, atol=1e-6)
        other = random_rows(model)
        with replay.forced(adapted, other), replay.capture(adapted) as reached:
            adapted(IDS)
        assert torch.equal(as_sets(reached.rows), as_sets(other))

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"layers": ()}, "expected indices in increasing order"),
            ({"layers": (2, 1)}, "expected indices in increasing order"),
            ({"layers": (0, 4)}, "layer 4 has experts, but there are 4 decoder"),
            ({"k": 9}, "k=9 of 8 experts"),
            ({"experts": 2**15 + 1}, "expected 1 <= k <= experts <= 32768"),
        ],
    )
    def test_shapes_that_contradict_themselves(self, given, message):
        shape = {"layers": (1,), "decoder_layers": 4, "experts": 8, "k": 2}
        with pytest.raises(ValueError, match=message):
            replay.RouteShape(**shape | given)
