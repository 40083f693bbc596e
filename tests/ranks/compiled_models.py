"""Run by test_compiled.py: few compilations serve every pack, and gradients stay equal."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch._dynamo

from primerl import fp8, loss, parallel, testing
from primerl.attention import kernels

# While it traces, torch warns itself of what it does.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Backend:
    """Counts what is compiled; dynamo's part and, unless it is "eager", autograd's are real."""

    def __init__(self, name):
        self.compile, self.graphs = torch._dynamo.lookup_backend(name), 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self.compile(graph, inputs)


def random_packs(count, *, longest=12):
    """Token ids and positions of packs: some documents share tokens of the one before."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        positions = np.arange(rng.integers(2, longest))  # a tensor of one row is traced apart
        for _ in range(rng.integers(0, 6)):
            begin = int(rng.integers(0, positions[-1] + 2)) if rng.random() < 0.4 else 0
            begin = min(begin, longest - 1)
            positions = np.append(positions, np.arange(begin, rng.integers(begin, longest) + 1))
        ids = rng.integers(4, 30, len(positions))
        yield torch.from_numpy(ids), torch.from_numpy(positions)


def compiled(model, whole, backend):
    if whole == "layers":
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True)
    elif whole == "in place":
        model.compile(backend=backend, fullgraph=True)
    else:
        return torch.compile(model, backend=backend, fullgraph=True)
    return model


def train(model, ids, positions):
    """Logprobs, entropies and their gradients."""
    model.zero_grad()
    found = loss.model_logprobs_and_entropy(
        model, ids, positions, ids.roll(-1), rows=torch.arange(len(ids)) % 3 > 0
    )
    sum(x.sum() for x in found).backward()
    return [*found, *(x.grad for x in model.parameters() if x.grad is not None)]


CHOSEN = []


def always(*_):
    CHOSEN.append("varlen")
    return "varlen"


def family_model(family, how=None, **config):
    torch.manual_seed(0)
    model = testing.tiny_model(family, **config).train()
    return parallel.recompute(model, **how) if how is not None else model


@pytest.mark.parametrize(
    "whole", ["layers", "in place", pytest.param("model", marks=pytest.mark.slow)]
)
def test_two_compilations_serve_every_pack(whole):
    eager, backend = family_model("qwen3"), Backend("eager")
    model = compiled(family_model("qwen3"), whole, backend)

    for ids, positions in random_packs(20):
        for ours, expected in zip(
            train(model, ids, positions), train(eager, ids, positions), strict=True
        ):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)

    assert 1 <= backend.graphs <= 2


def test_two_compilations_serve_every_pack_with_the_operator_of_gpus(monkeypatch):
    """It reads all that differs between packs from their plan, when it runs."""
    eager, backend = family_model("qwen3"), Backend("aot_eager")
    model = compiled(family_model("qwen3"), "layers", backend)

    for ids, positions in random_packs(20):
        expected = train(eager, ids, positions)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_kernel_for", torch.compiler.assume_constant_result(always))
            found = train(model, ids, positions)
        for ours, other in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)

    assert backend.graphs <= 2
    assert CHOSEN


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3", None),
        pytest.param("qwen3", {}, marks=pytest.mark.slow),
        ("qwen3", {"selective": True}),
    ],
)
def test_gradients_are_those_of_the_eager_model(family, how):
    eager, backend = family_model(family, how), Backend("aot_eager")
    model = compiled(family_model(family, how), "layers", backend)

    for ids, positions in random_packs(4):
        for ours, expected in zip(
            train(model, ids, positions), train(eager, ids, positions), strict=True
        ):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)

    assert backend.graphs <= (2 if how is None else 4)  # recomputation has graphs of its own


@pytest.mark.parametrize(
    "top_k", [8, pytest.param(64, marks=pytest.mark.slow)], ids=["chosen keys", "all keys"]
)
def test_layers_with_sparse_attention_compute_what_they_do_eagerly(top_k):
    """With breaks of the graph where keys are chosen, and none if all keys are seen."""
    config = {"index_topk": top_k, "index_n_heads": 8, "first_k_dense_replace": 2}
    model, eager = (family_model("glm_moe_dsa", **config) for _ in range(2))
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")

    for ids, positions in random_packs(3):
        for ours, expected in zip(
            train(model, ids, positions), train(eager, ids, positions), strict=True
        ):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_model_with_windows_computes_what_it_does_eagerly():
    backend = Backend("eager")
    model = compiled(family_model("mistral", sliding_window=8), "layers", backend)
    eager = family_model("mistral", sliding_window=8)

    for ids, positions in random_packs(12, longest=8):
        for ours, expected in zip(
            train(model, ids, positions), train(eager, ids, positions), strict=True
        ):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert backend.graphs <= 3  # one more, where the longest document is what varies


def test_lengths_of_runs_and_of_packs_that_agree_are_told_apart():
    """Lengths that were equal when a graph was compiled are not assumed to be equal."""
    backend = Backend("eager")
    model = compiled(family_model("llama"), "layers", backend)

    for lengths in ([6, 6, 6], [3], [1], [2, 2, 5], [1] * 9, [4, 3, 2, 1]):
        positions = torch.cat([torch.arange(length) for length in lengths])
        logprobs = loss.model_logprobs(model, positions + 4, positions, positions + 5)

        ends = np.cumsum([0, *lengths])
        for begin, end in pairwise(ends):
            alone = positions[begin:end]
            expected = loss.model_logprobs(family_model("llama"), alone + 4, alone, alone + 5)
            torch.testing.assert_close(logprobs[begin:end], expected, atol=1e-5, rtol=1e-5)
    assert backend.graphs <= 3  # one row alone is a case of its own to torch


def test_layers_in_fp8_compile_whole():
    """A value next to an edge may round to the other FP8 value, so not to the last bit."""
    eager, backend = family_model("llama"), Backend("aot_eager")
    fp8.convert_linears(eager, form=fp8.Format.of_blocks(16), weight_gradient="fp8")
    model = compiled(copy.deepcopy(eager), "layers", backend)

    for ids, positions in random_packs(6):
        for ours, expected in zip(
            train(model, ids, positions), train(eager, ids, positions), strict=True
        ):
            assert (ours - expected).norm() <= 0.05 * expected.norm() + 1e-6

    assert 1 <= backend.graphs <= 2


def test_layers_compile_although_their_experts_stay_outside_of_the_graph():
    """Torch's graph breaks and its modes of functions do not go together."""
    model, eager = family_model("qwen3_moe"), family_model("qwen3_moe")
    backend, graphs = Backend("aot_eager"), []
    for layer in model.model.layers:
        layer.compile(backend=backend)
    for ids, positions in random_packs(4):
        for ours, expected in zip(
            train(model, ids, positions), train(eager, ids, positions), strict=True
        ):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        graphs.append(backend.graphs)
    assert graphs[1] == graphs[-1]  # each part is compiled for the first two packs, and no more
