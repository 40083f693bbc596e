"""Saving and restoring the states of random number generators."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor


def generator_states() -> dict[str, Tensor | str]:
    """Return the states of torch's generators (CPU and this rank's GPU), numpy's and Python's.

    A rank that trains on the CPU beside a GPU has never initialized CUDA, and does not do so here.
    """
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    states: dict[str, Tensor | str] = {
        "torch": torch.get_rng_state(),
        "numpy": json.dumps([kind, [int(x) for x in key], position, has_gauss, gauss]),
        "python": json.dumps(random.getstate()),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: Mapping[str, Any]) -> None:
    """Restore the states that ``generator_states`` returned."""
    version, internal, gauss = json.loads(states["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, key, position, has_gauss, normal = json.loads(states["numpy"])
    np.random.set_state((kind, np.array(key, np.uint32), position, has_gauss, normal))  # noqa: NPY002
    torch.set_rng_state(states["torch"].clone())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].clone())


def reseed_generators(states: Mapping[str, Any], rank: int) -> None:
    """Seed this rank's generators from its number and the saved state of rank 0."""
    seed = xxhash.xxh3_64(bytes(states["torch"].numpy()), seed=rank).intdigest() >> 1
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
