"""Peak memory per rank while a model loads: sharded from the start, or loaded whole, then sharded.

    python -m pytest bench/test_sharded_loading.py -m "" --benchmark-only -s

The model is a random mixture of experts of about 1 GB in float32 on four gloo ranks, so each rank
holds a quarter. The peak is the increase of anonymous memory, sampled every 2 ms. It excludes pages
of the checkpoint's files, which belong to the page cache.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from primerl import models, parallel, testing

RANKS = 4
CONFIG = {
    "vocab_size": 32_000, "hidden_size": 512, "num_hidden_layers": 8, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512,
}  # fmt: skip


@pytest.mark.benchmark(group="loading on four ranks", warmup=False)
@pytest.mark.parametrize("how", ["shards", "whole"])
def test_memory_of_a_rank(benchmark, tmp_path, how):
    model = testing.tiny_model("qwen3_moe", **CONFIG)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(tmp_path / "model", max_shard_size="100MB")
    del model
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", __file__, str(tmp_path / "model"), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def launch():
        subprocess.run(command, env=environment, capture_output=True, timeout=300, check=True)

    benchmark.pedantic(launch, rounds=1, iterations=1)
    files = sorted((tmp_path / "model").glob("peak-*.json"))
    peaks = [json.loads(path.read_text())["peak"] / size for path in files]
    assert len(peaks) == RANKS
    benchmark.extra_info.update(model_bytes=size, peaks=peaks)
    print(f"\n{how}: {size / 1e9:.2f} GB; peak of each rank: {[f'{p:.2f}' for p in peaks]} of it")
    if how == "shards":
        assert max(peaks) < 0.5


class Peak:
    """Measures the peak increase of anonymous memory while the context is open."""

    def __enter__(self):
        self.before, self.most, self.open = anonymous(), 0, True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.open = False
        self.thread.join()

    def watch(self):
        while self.open:
            self.most = max(self.most, anonymous() - self.before)
            time.sleep(0.002)


def anonymous():
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def rank(folder, how):
    torch.set_num_threads(1)
    with parallel.process_group(timeout_s=120) as world:
        mesh = parallel.mesh(ep=2)
        with Peak() as peak:
            if how == "shards":
                model = parallel.shard(models.empty_model(folder), mesh)
                models.load_shards(model, folder)
            else:
                import transformers

                model = transformers.AutoModelForCausalLM.from_pretrained(folder)
                parallel.shard(model, mesh)
    Path(folder, f"peak-{world.rank}.json").write_text(
        json.dumps({"peak": peak.most}), encoding="utf-8"
    )


if __name__ == "__main__":
    rank(*sys.argv[1:])
