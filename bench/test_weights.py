"""Publishing SmolLM2 (bfloat16, 269 MB) to a real vLLM server after a real step at lr 1e-6.

    PRIMERL_SMOLLM2=folder python -m pytest bench/test_weights.py -m "" --benchmark-only -s \
        -o addopts=--import-mode=importlib

The benchmark needs vLLM. It times a whole ``publish``, including checks, with an idle engine. Each
row prints the bytes written and the median seconds of these phases:

- ``gather``: the cast to bfloat16;
- ``encode``: digests and differences of a delta;
- ``write``: writing, including the digests of a full version;
- ``prepare``: fetching, checking and patching while the engine generates;
- ``pause``: loading and packing in the worker while the engine is paused.

The baseline is the row ``disk full``: the cost of a checkpoint in a shared folder. Rounds alternate
between the weights before and after the step.
"""

import contextlib
import itertools
import os
import statistics

import pytest
import torch
from smollm2_steps import bf16_rounded, steps

from primerl import serving, testing, weights

ROUNDS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    given = os.environ.get("PRIMERL_SMOLLM2")
    return given or str(testing.smollm2(tmp_path_factory.mktemp("models") / "smollm2"))


@pytest.fixture(scope="module")
def model_before_and_after(folder):
    """Return the model, and its weights before and after one step."""
    model, tokenizer = bf16_rounded(folder)

    def state():
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    before = state()
    next(steps(model, tokenizer, count=1))
    return model, (before, state())


@pytest.fixture(scope="module")
def engine(folder):
    pytest.importorskip("vllm")
    environment = {"OMP_NUM_THREADS": "1"}
    settings = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512}
    with (
        serving.serve_vllm(folder, env=environment, **settings) as server,
        contextlib.closing(serving.VLLMEngine(server)) as engine,
    ):
        yield engine


VERSIONS = itertools.count(1)


@pytest.mark.parametrize("encoding", ["full", "delta"])
@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
def test_publish(benchmark, model_before_and_after, engine, tmp_path, transport, encoding):
    model, states = model_before_and_after
    settings = {"encoding": encoding, "dtype": torch.bfloat16}
    if transport == "disk":
        publisher = weights.Disk(model, engine, folder=tmp_path, **settings)
    else:
        publisher = weights.SharedMemory(model, engine, **settings)
    receipts = []

    def move():
        version = next(VERSIONS)
        with torch.no_grad():
            model.load_state_dict(states[version % 2])
        return (version,), {}

    def publish(version):
        receipts.append(publisher.publish(version))

    (first,), _ = move()
    publisher.publish(first)  # a full publication, whatever the encoding
    benchmark.pedantic(publish, setup=move, rounds=ROUNDS)
    assert {receipt.kind for receipt in receipts} == {encoding}
    phases = {
        phase: statistics.median(receipt.seconds[phase] for receipt in receipts)
        for phase in ("gather", "encode", "write", "load")
    }
    workers = [next(iter(receipt.servers.values()))[0]["seconds"] for receipt in receipts]
    phases["prepare"] = statistics.median(w["prepare"] for w in workers)
    phases["pause"] = statistics.median(w["load"] + w["finish"] for w in workers)
    row = "  ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    print(f"\n{transport} {encoding}: {receipts[-1].bytes:,} bytes; seconds: {row}")
