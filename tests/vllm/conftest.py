"""Real vLLM servers. One is shared by the session; a test that needs another starts and ends it."""

import os
from pathlib import Path

import pytest

from primerl import rollout

# One thread each: servers, trainer and tests share two cores.
SERVER_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
SERVER_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,  # compiling would take minutes
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "enable_prefix_caching": True,
    "block_size": 32,  # a prefix is cached in blocks: short conversations fill some
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def smollm2(request):
    """The folder of SmolLM2-135M in float32; PRIMERL_SMOLLM2 names one that exists already."""
    folder = os.environ.get("PRIMERL_SMOLLM2")
    return folder or str(request.getfixturevalue("smollm2_folder"))


@pytest.fixture(scope="session")
def start_server(smollm2):
    """Starts a server as the shared one is, or with other arguments; the caller ends it."""

    def start(model=smollm2, *, env=None, **settings):
        settings = {**SERVER_ARGS, **settings}
        return rollout.serve_vllm(model, env={**SERVER_ENV, **(env or {})}, **settings)

    return start


@pytest.fixture(scope="session")
def server(start_server):
    """SmolLM2 in float32. Leave it serving, and unpaused."""
    with start_server() as server:
        yield server
