"""``recipes/glm_swe.py`` with its debug scale edited, as a user would edit it, to sample on vLLM.

vLLM's build for CPUs has no experts in FP8 and returns no routes.
"""

import importlib.util
from pathlib import Path

import attrs
import torch

from primerl import track

RECIPE = Path(__file__).parents[2] / "recipes" / "glm_swe.py"
spec = importlib.util.spec_from_file_location("glm_swe", RECIPE)
glm_swe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(glm_swe)

if __name__ == "__main__":
    glm_swe.SCALES["debug"] = attrs.evolve(
        glm_swe.SCALES["debug"],
        engine="vllm",
        fp8=None,
        replay=False,
        dtype=torch.float32,
        server={"enforce_eager": True, "max_num_seqs": 16, "max_num_batched_tokens": 512},
    )
    glm_swe.main(track.command_line(glm_swe.Args))
