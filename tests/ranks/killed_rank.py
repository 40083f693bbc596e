"""Run by torchrun in test_parallel.py: rank 1 is killed in a layer of a sharded model."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from primerl import loss, parallel, testing


def main(folder):
    torch.set_num_threads(1)
    world = parallel.process_group(timeout_s=120)
    try:
        with world:
            mesh = parallel.mesh(ep=3)
            model = parallel.shard(testing.tiny_model("qwen3_moe", num_experts=6), mesh)
            ids = torch.arange(2, 12)
            for step in range(1000):
                logprobs = loss.model_logprobs(model, ids, torch.arange(10), ids.roll(-1))
                began = time.monotonic()
                if step == 2 and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                logprobs.sum().backward()
    except Exception as error:
        found = {"message": str(error), "seconds": time.monotonic() - began, "step": step}
        (folder / f"died-{world.rank}.json").write_text(json.dumps(found))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
