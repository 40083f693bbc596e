import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from primerl import loss, parallel, testing
from primerl._common.forward_passes import recomputing
from primerl.parallel import activation
from tests.helpers.pretended_gpu import PretendedGPU

IDS = torch.randint(2, 60, (48,), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(20), torch.arange(28)])
WAYS = [{}, {"selective": True}, {"every": 2}, {"offload": True}, {"every": 2, "offload": True}]


@pytest.fixture(autouse=True)
def small_activations_too(monkeypatch):
    monkeypatch.setattr(activation, "SMALLEST_OFFLOADED", 1)


def train(model):
    """The loss, the gradients, and the bytes kept for the backward pass."""
    kept, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        value = -loss.model_logprobs(model, IDS, POSITIONS, IDS.roll(-1)).sum()
    value.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return value, gradients, sum(size for size, _ in kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_gradients_are_bitwise_the_same(family, how):
    value, gradients, kept = train(testing.tiny_model(family, num_hidden_layers=4))
    model = parallel.recompute(testing.tiny_model(family, num_hidden_layers=4), **how)
    again, others, less = train(model)

    assert torch.equal(value, again)
    assert len(gradients) == len(others)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    assert less < (0.7 if how.get("every") else 0.15) * kept


def test_only_the_input_of_each_layer_is_kept():
    """hidden_size floats for each token and layer, beside what is kept outside the layers."""
    kept = {
        layers: train(parallel.recompute(testing.tiny_model("llama", num_hidden_layers=layers)))[2]
        for layers in (2, 5)
    }

    assert kept[5] - kept[2] == 3 * IDS.numel() * 32 * 4


def test_what_is_offloaded_leaves_the_graph():
    model = parallel.recompute(testing.tiny_model("llama"), offload=True)

    assert train(model)[2] == 0  # an outer hook sees nothing of it


class Both(torch.autograd.Function):
    """Saves a tensor on the GPU and one in host memory, such as attention's plan."""

    @staticmethod
    def forward(ctx, x, plan, host_first):
        ctx.host_first = host_first
        ctx.save_for_backward(*((plan, x) if host_first else (x, plan)))
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        x, plan = ctx.saved_tensors[:: -1 if ctx.host_first else 1]
        assert plan.device.type == "cpu"
        assert plan.tolist() == [0, 1, 2, 3]
        return 2 * x * gradient, None, None


@pytest.mark.parametrize("host_first", [False, True])
def test_beside_a_gpu_tensors_in_host_memory_are_saved_too(monkeypatch, host_first):
    class Layers(torch.nn.Module):
        def forward(self, x, plan):
            return Both.apply(Both.apply(x, plan, host_first), plan, False)

    gpu, model = PretendedGPU(), Layers()
    gpu.replace_streams(monkeypatch)
    activation._Offloading().attach(model)
    with gpu:
        x = gpu.on_gpu(torch.arange(4.0)).requires_grad_()
        model(x, torch.arange(4)).sum().backward()

        assert x.grad.tolist() == [0, 4, 32, 108]


def test_parameters_are_not_offloaded():
    model = testing.tiny_model("llama")
    weight = model.lm_head.weight

    assert not activation._is_activation(weight)
    assert not activation._is_activation(weight.T)
    assert activation._is_activation(torch.zeros(4))


def products(model):
    """How often each operation runs in forward and backward."""
    counts = {}

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[function.name()] = counts.get(function.name(), 0) + 1
            return function(*args, **(kwargs or {}))

    with Count():
        train(model)
    return counts


def test_selective_recomputation_repeats_no_product_no_attention_and_no_choice_of_experts():
    plain, full, selective = (
        products(parallel.recompute(model, **how) if how is not None else model)
        for how in (None, {}, {"selective": True})
        for model in [testing.tiny_model("qwen3_moe")]
    )
    expensive = [
        "aten::mm",
        "aten::_grouped_mm",
        "aten::topk",
        "primerl::attend",
    ]
    assert all(plain[name] == selective[name] < full[name] for name in expensive)
    assert plain["aten::silu"] < selective["aten::silu"]


def test_every_operator_of_ours_is_kept_whatever_its_name():
    @torch.library.custom_op("primerl::attend_some_day", mutates_args=())
    def attend(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    assert activation._is_kept(torch.ops.primerl.attend_some_day.default)
    assert activation._is_kept(torch.ops.aten.topk.default)
    assert not activation._is_kept(torch.ops.aten.silu.default)
    assert not activation._is_kept(torch.ops.aten.mm.out)  # as in compiled code


def test_selective_recomputation_refuses_results_that_a_layer_modifies():
    def layer(x, w):
        return (x @ w).mul_(2).exp()

    x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    how = {"use_reentrant": False, "context_fn": activation._selective_contexts}
    found = torch.utils.checkpoint.checkpoint(layer, x, w, **how)

    with pytest.raises(RuntimeError, match="in place"):
        found.sum().backward()


def test_selective_recomputation_allows_one_backward_pass():
    model = parallel.recompute(testing.tiny_model("llama"), selective=True)
    value = loss.model_logprobs(model, IDS, POSITIONS, IDS.roll(-1)).sum()
    value.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="one backward pass"):
        value.backward()


def test_code_can_detect_recomputation():
    model = parallel.recompute(testing.tiny_model("llama"))
    seen = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(recomputing()))

    train(model)

    assert seen == [False, True]
    assert not recomputing()


def test_without_gradients_nothing_is_kept_or_recomputed():
    model = parallel.recompute(testing.tiny_model("llama"), offload=True)
    expected = loss.model_logprobs(testing.tiny_model("llama"), IDS, POSITIONS, IDS.roll(-1))

    with torch.no_grad():
        logprobs = loss.model_logprobs(model, IDS, POSITIONS, IDS.roll(-1))

    assert torch.equal(logprobs, expected)


def test_a_failure_within_the_model_leaves_no_hooks_behind():
    model = parallel.recompute(testing.tiny_model("llama"), offload=True)
    handle = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=IDS[None])
    handle.remove()

    x = torch.ones(3, requires_grad=True)
    assert isinstance((x * x).grad_fn._saved_self, torch.Tensor)
    assert torch.equal(train(model)[0], train(testing.tiny_model("llama"))[0])


@pytest.mark.thorough
def test_ranks_recompute_exactly_and_in_the_same_order(optimized):
    """With ep=2: full recomputation exchanges experts' tokens again, selective does not."""
    for found in optimized:
        ways = found["recomputed"]
        assert all(way["equal"] for way in ways.values())
        assert ways["kept"] == ways["selective"]
        for name, again in (("full", 6), ("offloaded", 6), ("every second", 3)):
            assert ways[name]["all"] == ways["kept"]["all"] + again


def test_after_sharding_it_is_refused(optimized):
    for found in optimized:
        assert "already sharded" in found["refused"]
        assert "recompute -> shard -> compile" in found["refused"]


@pytest.mark.parametrize(
    ("model", "how", "message"),
    [
        (lambda: testing.tiny_model("llama").eval(), {}, "call model.train\\(\\) first"),
        (lambda: testing.tiny_model("llama"), {"every": 0}, "every is 0"),
        (lambda: torch.nn.Linear(2, 2), {}, "expected a transformers model"),
    ],
)
def test_what_would_not_work_is_refused(model, how, message):
    with pytest.raises(ValueError, match=message):
        parallel.recompute(model(), **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # other kernels
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_on_a_gpu(how, dtype):
    model, other = (
        testing.tiny_model("llama", num_hidden_layers=4).to("cuda", dtype) for _ in range(2)
    )
    parallel.recompute(other, **how)
    ids, positions = IDS.cuda(), POSITIONS.cuda()
    for one in (model, other):
        for _ in range(3):
            (-loss.model_logprobs(one, ids, positions, ids.roll(-1)).sum()).backward()

    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        atol = 1e-5 if dtype == torch.float32 else 2e-2 * a.grad.abs().max().item()
        torch.testing.assert_close(a.grad, b.grad, atol=atol, rtol=2e-2)


def test_a_layer_that_computes_other_products_again_is_an_error():
    def layer(x):
        return (x @ weight if recomputing() else torch.addmm(x, x, weight)).exp()

    x, weight = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3)
    how = {"use_reentrant": False, "context_fn": activation._selective_contexts}
    y = torch.utils.checkpoint.checkpoint(layer, x, **how)

    with pytest.raises(RuntimeError, match=r"recomputes aten.mm.*where its forward pass computed"):
        y.sum().backward()
