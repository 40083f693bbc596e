"""Publishing a low-rank adapter alone against publishing the merged weights: bytes and pause.

    PRIMERL_SMOLLM2=folder python -m pytest bench/test_adapters.py -m "" --benchmark-only -s \
        -o addopts=--import-mode=importlib

The model is SmolLM2 in bfloat16 with adapters of rank 16 on all linear layers. There are two real
vLLM servers, one for adapters and one for weights, since a vLLM 0.32 server that accepts adapters
can't reload its base model. Each row prints the bytes written, the median time of ``publish``
(without a canary) and the median pause. The pause is the longest gap between two tokens of a
request that streams meanwhile, minus its median gap. Rounds alternate between two values of the
adapter.
"""

import json
import os
import statistics
import threading
import time
import urllib.request

import peft
import pytest
import torch

from primerl import models, serving, testing, weights

ROUNDS = 5
RANK = 16
SETTINGS = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    given = os.environ.get("PRIMERL_SMOLLM2")
    return given or str(testing.smollm2(tmp_path_factory.mktemp("models") / "smollm2"))


@pytest.fixture(scope="module")
def model(folder):
    model, _ = models.load_pretrained(folder)
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"), model
    )
    return model


def change(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(1e-3 * torch.randn(parameter.shape, generator=generator))


class Stream:
    """A request in flight, with the arrival time of each token."""

    def __init__(self, server, name):
        sampling = {"max_tokens": 400, "temperature": 1.0, "ignore_eos": True}
        body = {"token_ids": [504, 3575, 282, 4649], "sampling_params": sampling, "stream": True}
        if name is not None:
            body["model"] = name
        self._request = urllib.request.Request(
            f"{server.url}/inference/v1/generate",
            data=json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {server.api_key}",
                "Content-Type": "application/json",
            },
        )
        self.times = []
        self._enough = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self):
        with urllib.request.urlopen(self._request, timeout=300) as lines:
            for line in lines:
                if self._enough:
                    return  # closes the connection, so that vLLM aborts the request
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())

    def __enter__(self):
        self._thread.start()
        while len(self.times) < 10:
            time.sleep(0.01)
        return self

    def __exit__(self, *error):
        at_end = len(self.times)
        while len(self.times) < at_end + 5:
            time.sleep(0.01)
        self._enough = True
        self._thread.join()

    @property
    def pause(self):
        gaps = [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
        return max(gaps) - statistics.median(gaps)


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_publish(benchmark, folder, model, publish):
    pytest.importorskip("vllm")
    takes = {"enable_lora": True, "max_lora_rank": RANK} if publish == "adapter" else {}
    server = serving.serve_vllm(folder, env={"OMP_NUM_THREADS": "1"}, **SETTINGS, **takes)
    adapter = "policy" if publish == "adapter" else None
    receipts, pauses, version = [], [], 0
    with server, serving.VLLMEngine(server, adapter=adapter, run="bench") as engine:
        transport = (weights.Adapter if adapter else weights.SharedMemory)(
            model, engine, dtype=torch.bfloat16
        )
        transport.publish(0)

        def move():
            nonlocal version
            change(model, version % 2)
            version += 1

        def measured():
            receipts.append(transport.publish(version))

        def one_round():
            name = f"policy-bench-{version - 1}" if adapter else None
            with Stream(server, name) as stream:
                started = time.perf_counter()
                measured()
                seconds.append(time.perf_counter() - started)
            pauses.append(stream.pause)

        seconds = []
        benchmark.pedantic(one_round, setup=move, rounds=ROUNDS)
    print(
        f"\n{publish}: {receipts[-1].bytes:,} bytes; median of {ROUNDS}: publish "
        f"{statistics.median(seconds):.3f} s, pause {1e3 * statistics.median(pauses):.0f} ms "
        f"({1e3 * min(pauses):.0f} to {1e3 * max(pauses):.0f})"
    )
