"""Real vLLM servers, which the session shares: each takes half a minute of a core to start, and
2 GB, so tests of other servers wait until those are closed.

What issue 5 wants to be shown on real vLLM, and where it is:

- 1, rollouts under updates: test_rollouts.py
- 2, vLLM's reload bugs on the CPU: test_weights.py (logits), test_proof.py (the canary)
- 3, faults and who catches them: test_weights.py (receipts), test_proof.py (canary, wiring)
- 5, the recipe: test_recipe.py
- 6, servers that die: test_deaths.py; unauthenticated calls: test_server.py
- 7, session affinity: test_engine.py
- 10, the contract of engines: test_engine.py
"""

import contextlib
import functools
import os
import re
import string
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import interpreted_triton
import pytest
import torch

from primerl import serving, testing
from primerl.serving.server.arguments import flags
from primerl.serving.server.readiness import free_port

HERE = Path(__file__).parent
KEY = "of the pair"
HOST = "127.0.0.1"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
SERVER_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Two threads, as the tests have: who waits for the other leaves its core to it.
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
}
FAULTY_ENV = {
    **SERVER_ENV,
    "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent / "helpers"))),
}
SERVER_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,  # compiling would take minutes
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,  # a server that starts computes that many, to see if it can
    "enable_prefix_caching": True,
    "block_size": 32,  # a prefix is cached in blocks: short conversations fill some
}
CLOSED_EARLY = ("server", "routes_server", "loading_server", "two_workers")


def pytest_collection_modifyitems(items):
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    for item in ours:
        item.add_marker(pytest.mark.vllm)

    def place(item):
        """Those of one server together, and last the file that leaves servers dead."""
        uses = [name in item.fixturenames for name in CLOSED_EARLY]
        return item.path.name == "test_deaths.py", [not used for used in uses]

    ours.sort(key=place)
    items[:] = [item for item in items if not item.path.is_relative_to(HERE)] + ours


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Not checked: servers, which tests share, start and end processes at any time."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """End a shared server when no test needs it any more: it holds up to 2.5 GB."""
    for name in CLOSED_EARLY:
        if name in item.fixturenames and name not in getattr(nextitem, "fixturenames", ()):
            shared = item.funcargs.get(name)  # missing if the test was skipped
            if shared is not None:
                shared.close()


@pytest.fixture(scope="session")
def smollm2(request):
    """The folder of SmolLM2-135M in float32; PRIMERL_SMOLLM2 names one that exists already."""
    folder = os.environ.get("PRIMERL_SMOLLM2")
    return folder or str(request.getfixturevalue("smollm2_folder"))


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
    tokenizer = testing.character_tokenizer(string.printable)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """The folder of a tiny model that vLLM can serve with adapters on a CPU."""
    folder = tmp_path_factory.mktemp("models") / "dense"
    model = testing.tiny_model(
        "llama",
        vocab_size=512,
        hidden_size=128,
        head_dim=32,
        initializer_range=0.08,
        max_position_embeddings=1024,
    )
    model.save_pretrained(folder)
    tokenizer = testing.character_tokenizer(string.printable)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def routed_model():
    """By its seed, a tiny model with a dense layer among those with experts."""
    return functools.partial(
        testing.tiny_model,
        "qwen3_moe",
        vocab_size=512,  # with more, interpreted kernels take most of the time
        hidden_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        mlp_only_layers=[1],
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.2,
        max_position_embeddings=1024,
    )


@pytest.fixture(scope="session")
def routed(tmp_path_factory, routed_model):
    """The folder of ``routed_model`` of seed 0."""
    folder = tmp_path_factory.mktemp("models") / "routed"
    routed_model(seed=0).save_pretrained(folder)
    tokenizer = testing.character_tokenizer(string.printable)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def serve_routes(tmp_path_factory, routed):
    """A function that makes a server of ``routed`` that returns routes, with further arguments.

    vLLM needs Triton for that, whose kernels Python interprets here: 20 tokens a second.
    """
    entry_point = tmp_path_factory.mktemp("triton")
    interpreted_triton.write_entry_point(entry_point)
    return functools.partial(
        serving.serve_vllm,
        routed,
        enable_return_routed_experts=True,
        enable_prompt_tokens_details=True,
        env={
            **SERVER_ENV,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join([str(entry_point), str(HERE.parent / "helpers")]),
        },
        **SERVER_ARGS,
    )


class ServerByHand:
    """A server started by the command line."""

    api_key = KEY

    def __init__(self, model, log_path, *flags):
        self._log_path = log_path
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "primerl.serving.server", model, *flags],
                stdout=log,  # a pipe that nobody reads fills up with requests, and blocks it
                stderr=log,
                env={**os.environ, **SERVER_ENV, "PRIMERL_API_KEY": self.api_key},
            )
        self.pid = self._process.pid
        self.url = None

    def start(self):
        """Wait for the URL that it prints."""
        while self.url is None:
            assert self.alive, self._log_path.read_text()
            time.sleep(0.1)
            found = re.search(r"^(http://\S+)\n", self._log_path.read_text(), re.MULTILINE)
            self.url = found and found[1]

    @property
    def alive(self):
        return self._process.poll() is None

    def close(self):
        self._process.kill()
        self._process.wait()


def needed(request, *names):
    """Which of the fixtures any test of the session needs."""
    return {name for item in request.session.items for name in item.fixturenames} & {*names}


@contextlib.contextmanager
def started(*servers):
    """Start servers at once, and close them: each takes half a minute, most of it on one core."""
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda one: one.start(), servers))
        yield
    finally:
        for one in servers:
            one.close()


@pytest.fixture(scope="session")
def server(smollm2):
    """SmolLM2 in float32, with whatever weights a test left. Leave it serving, and unpaused."""
    server = serving.serve_vllm(smollm2, env=SERVER_ENV, **SERVER_ARGS)
    with started(server):
        yield server


@pytest.fixture(scope="session")
def servers_with_routes(request, serve_routes, tmp_path_factory):
    """By name, the servers of ``routed`` that any of the tests needs."""
    made = {}
    names = needed(request, "routes_server", "loading_server")
    if "routes_server" in names:
        made["routes_server"] = serve_routes()
    if "loading_server" in names:
        stored = tmp_path_factory.mktemp("keys_and_values")
        made["loading_server"] = serve_routes(
            kv_transfer_config=serving.kv_folder(stored / "store", chunk_tokens=32),
        )
    with started(*made.values()):
        yield made


@pytest.fixture(scope="session")
def routes_server(servers_with_routes):
    """``routed``, with whatever weights a test left; it returns expert routes."""
    return servers_with_routes["routes_server"]


@pytest.fixture(scope="session")
def loading_server(servers_with_routes):
    """``routed``, with routes; it stores keys and values of prompts, and loads those it finds."""
    return servers_with_routes["loading_server"]


@pytest.fixture(scope="session")
def servers_with_faults(request, tied_experts, dense, tmp_path_factory):
    """By name, those of ``pair`` and ``lora_server`` that any of the tests needs."""
    faulty = {
        "weight_transfer": "primerl_faulty",
        "worker_extension_cls": "receivers.FaultyReceiver",
        "env": FAULTY_ENV,
        **SERVER_ARGS,
    }
    made = {}
    names = needed(request, "pair", "lora_server")
    if "pair" in names:
        made["first"] = serving.serve_vllm(tied_experts, api_key=KEY, **faulty)
        log_path = tmp_path_factory.mktemp("by_hand") / "log"
        made["second"] = ServerByHand(tied_experts, log_path, *flags(SERVER_ARGS))
    if "lora_server" in names:
        made["lora_server"] = serving.serve_vllm(dense, enable_lora=True, max_lora_rank=8, **faulty)
    with started(*made.values()):
        yield made


@pytest.fixture(scope="session")
def pair(servers_with_faults):
    """Two servers of ``tied_experts``.

    The first can be told to receive with a fault; the second was started from the command line.
    """
    return servers_with_faults["first"], servers_with_faults["second"]


@pytest.fixture(scope="session")
def lora_server(servers_with_faults):
    """``dense``, with room for adapters of rank 8."""
    return servers_with_faults["lora_server"]


@pytest.fixture(scope="session")
def two_workers(tied_experts):
    """A server of ``tied_experts`` whose two workers have half of the experts each."""
    server = serving.serve_vllm(
        tied_experts,
        weight_transfer="primerl_faulty",
        worker_extension_cls="receivers.FaultyReceiver",
        env={**FAULTY_ENV, "OMP_NUM_THREADS": "1"},
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        **SERVER_ARGS,
    )
    with started(server):
        yield server


@pytest.fixture
def two_ranks(dense):
    """A server of ``dense`` with two data-parallel ranks."""
    server = serving.serve_vllm(dense, env=SERVER_ENV, data_parallel_size=2, **SERVER_ARGS)
    with started(server):
        yield server


@pytest.fixture
def drafting_server(dense, tmp_path):
    """A server of ``dense`` with two tensor-parallel workers, which drafts tokens from n-grams.

    Python interprets the Triton kernels that verify drafts: those of the build for CPUs are wrong.
    Model Runner V2's own kernel for n-grams can't be interpreted.
    """
    interpreted_triton.write_entry_point(tmp_path)
    server = serving.serve_vllm(
        dense,
        env={
            **SERVER_ENV,
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE.parent / "helpers")]),
        },
        tensor_parallel_size=2,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
        **SERVER_ARGS,
    )
    with started(server):
        yield server


@pytest.fixture
def two_nodes(dense):
    """The two nodes of a server of ``dense``, on this machine, with a data-parallel rank each."""
    of_both = {
        "host": HOST,
        "port": free_port(HOST),
        "api_key": KEY,
        "env": {**SERVER_ENV, "OMP_NUM_THREADS": "1"},
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_address": HOST,
        "data_parallel_rpc_port": free_port(HOST),
        **SERVER_ARGS,
    }
    first = serving.serve_vllm(dense, **of_both)
    second = serving.serve_vllm(dense, headless=True, data_parallel_start_rank=1, **of_both)
    with started(first, second):
        yield first, second


@pytest.fixture(scope="session")
def faulty_server(pair):
    return pair[0]


@pytest.fixture(autouse=True, scope="session")
def _threads():
    torch.set_num_threads(2)


@pytest.fixture
def serve_family():
    """A function that starts a server of a folder in bfloat16, without a prefix cache."""
    return functools.partial(
        serving.serve_vllm,
        env=SERVER_ENV,
        **SERVER_ARGS | {"dtype": "bfloat16", "enable_prefix_caching": False},
    )
