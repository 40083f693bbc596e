"""Run by tests/attention/test_sparse_kernels.py: Triton's kernels, interpreted or compiled."""

import os

import pytest
import torch
from hopper import compile_for_hopper

from primerl.attention import indexer_triton, latent_triton
from primerl.attention.latent import attend_to_latents

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WIDTH, ROTATED, SCALING = 32, 16, 0.2
# Of each query: its document's first row, its own row, and the number of keys that it chose. The
# second document shares the first two rows of the first, and its rows begin at 40.
QUERIES = [(0, 0, 1), (0, 4, 5), (0, 36, 33), (0, 39, 40), (40, 0, 3), (40, 7, 4), (40, 9, 12)]
TABLE = [*range(40), 0, 1, *range(40, 50)]


def inputs(heads, dtype):
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(len(QUERIES), heads, WIDTH + ROTATED, generator=generator)
    latent = torch.randn(50, WIDTH + ROTATED, generator=generator)
    chosen = torch.full((len(QUERIES), 40), -1, dtype=torch.int32)
    for row, (start, own, count) in enumerate(QUERIES):
        seen = own + 1 if start == 0 else own + 3
        picked = torch.randperm(seen, generator=generator)[:count]
        chosen[row, : len(picked)] = picked.int()
    starts = torch.tensor([start for start, _, _ in QUERIES], dtype=torch.int32)
    table = torch.tensor(TABLE, dtype=torch.int32)
    return query.to(dtype), latent.to(dtype), chosen, starts, table


# bfloat16 is multiplied as integers by the interpreter; a program computes 64 and 32 heads at most.
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-6), (torch.float16, 2e-3)], ids=["float32", "float16"]
)
@pytest.mark.parametrize("heads", [3, 16, 40, 65])
def test_interpreted_kernels_compute_what_the_torch_form_does(heads, dtype, error):
    query, latent, *others = inputs(heads, dtype)
    upstream = torch.randn(len(QUERIES), heads, WIDTH, generator=torch.Generator().manual_seed(1))
    upstream = upstream.to(dtype)
    exact = [x.double().requires_grad_() for x in (query, latent)]
    expected = attend_to_latents(*exact, *others, width=WIDTH, scaling=SCALING)
    gradients = torch.autograd.grad((expected * upstream.double()).sum(), exact)

    out, logsumexp = torch.empty_like(upstream), torch.empty(len(QUERIES), heads)
    latent_triton.forward(query, latent, *others, SCALING, out, logsumexp)
    shifts = (upstream.float() * out.float()).sum(-1)
    grad_q, grad_latent = torch.empty_like(query), torch.zeros(latent.shape)
    latent_triton.backward(
        *(upstream, query, latent, logsumexp, shifts, *others, SCALING, grad_q, grad_latent)
    )

    found = (out, grad_q, grad_latent)
    for got, theirs in zip(found, (expected.detach(), *gradients), strict=True):
        assert (got.double() - theirs).norm() < error * theirs.norm()


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-6), (torch.float16, 1e-3)], ids=["float32", "float16"]
)
@pytest.mark.parametrize(("count", "heads"), [(5, 32), (3, 64), (9, 2), (130, 1)])
def test_interpreted_scores_are_those_of_the_torch_form(count, heads, dtype, error):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(count, heads, 16, generator=generator).to(dtype)
    weights, keys = torch.randn(count, heads, generator=generator), torch.randn(150, 16).to(dtype)
    expected = (queries.double() @ keys.double().T).relu()
    expected = (weights.double().unsqueeze(1) @ expected).squeeze(1)

    found = indexer_triton.index_scores(queries, weights, keys)

    assert (found.double() - expected).norm() < error * expected.norm()


# GLM-5's sizes.
TYPES = {
    **dict.fromkeys(("q", "latent", "out", "gradient", "grad_q", "queries", "keys"), "*bf16"),
    **dict.fromkeys(("chosen", "starts", "table"), "*i32"),
    **dict.fromkeys(("logsumexp", "shifts", "grad_latent", "weights", "scores"), "*fp32"),
    "scaling": "fp32",
    "heads": "i32",
    "count": "i32",
    "seen": "i32",
}
LATENT = {"KEYS": latent_triton.KEYS, "WIDTH": 512, "ROTATED": 64}
KERNELS = {
    "forward": (latent_triton._forward, LATENT | {"HEADS": latent_triton.FORWARD_HEADS}),
    "backward": (latent_triton._backward, LATENT | {"HEADS": latent_triton.BACKWARD_HEADS}),
    "scores": (indexer_triton._index_scores, {"QUERIES": 4, "HEADS": 32, "KEYS": 128, "SIZE": 128}),
}


@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper_within_its_resources(name):
    kernel, blocks = KERNELS[name]
    found = compile_for_hopper(kernel, TYPES, blocks | {"PRECISION": "tf32"}, warps=8, stages=2)
    print(name, found.shared, found.stack, found.registers)

    assert found.shared < 227 * 2**10
    assert found.stack <= 256  # bytes that a thread spills
    # The backward pass has too few heads at a time for the products of Hopper.
    products = "mma.sync" if name == "backward" else "wgmma.mma_async"
    assert products in found.ptx
