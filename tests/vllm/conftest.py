"""Real vLLM servers, which the session shares: each takes half a minute of two cores to start.

What issue 5 wants to be shown on real vLLM, and where it is:

- 1, rollouts under updates: test_rollouts.py
- 2, vLLM's reload bugs on the CPU: test_weights.py (logits), test_proof.py (the canary)
- 3, faults and who catches them: test_weights.py (receipts), test_proof.py (canary, wiring)
- 5, the recipe: test_recipe.py
- 6, servers that die: test_deaths.py; unauthenticated calls: test_server.py
- 7, session affinity: test_engine.py
- 10, the contract of engines: test_engine.py
"""

import os
from pathlib import Path

import pytest

from primerl import rollout, testing

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
    items.sort(key=lambda item: item.path.name == "test_deaths.py")  # the sort is stable


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
    """SmolLM2 in float32, with whatever weights a test left. Leave it serving, and unpaused."""
    with start_server() as server:
        yield server


@pytest.fixture(scope="session")
def tied_experts(tmp_path_factory):
    """The folder of a tiny model with both of vLLM's troubles on the CPU: tied head, experts."""
    folder = tmp_path_factory.mktemp("models") / "tied_experts"
    model = testing.tiny_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=128,
        moe_intermediate_size=32,
        initializer_range=0.2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model.save_pretrained(folder)
    testing.character_tokenizer("abc").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def pair_of_servers(start_server, tied_experts):
    with start_server(
        tied_experts,
        weight_transfer="primerl_faulty",
        worker_extension_cls="receivers.FaultyReceiver",
        api_key="of both",
        env={"PYTHONPATH": str(Path(__file__).parent)},
    ) as first:
        with start_server(tied_experts, api_key="of both") as second:
            yield first, second


@pytest.fixture
def pair(pair_of_servers):
    """Two servers of ``tied_experts``; the first can be told to receive with a fault."""
    for server in pair_of_servers:
        server.start()  # if a test killed it
    return pair_of_servers


@pytest.fixture
def faulty_server(pair):
    return pair[0]
