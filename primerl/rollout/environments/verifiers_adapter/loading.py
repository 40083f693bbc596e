"""Functions that find, configure and load a verifiers environment."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any

from primerl._common.optional import ENVIRONMENTS, install_command, require


def load(
    name: str,
    config: Mapping[str, Any],
    *,
    agent: str | None,
    max_turns: int | None,
    tool_timeout_s: float,
) -> Any:
    """Load the verifiers environment ``name``; by default, its agents run on this machine."""
    _check_version()
    vf: Any = require("verifiers.v1", extra="verifiers")
    package, colon, dataset = name.partition(":")
    if colon and not dataset:
        raise ValueError(f"{name!r} names no dataset after the colon")
    taskset = {"id": _taskset_id(package), **config.get("taskset", {})}
    if dataset:
        options = sorted(vf.taskset_config_type(taskset["id"]).model_fields)
        if "dataset" not in options:
            raise ValueError(
                f"{name!r} names the dataset {dataset!r}, but {package} has no dataset to choose; "
                f"its taskset's options are {options}"
            )
        taskset["dataset"] = dataset
    whole = {**config, "taskset": taskset}
    bundled = vf.default_harness_id(taskset["id"])
    for agent_name, field in vf.env_config_type(
        taskset["id"], config.get("id", "")
    ).model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            harness = "null" if bundled == "bash" else bundled
            ours = _agent_config(field.default, harness=harness, max_turns=max_turns)
            merged = {**ours, **config.get(agent_name, {})}
            if "harness" in merged:
                merged["harness"] = {"tool_timeout": tool_timeout_s, **merged["harness"]}
            whole[agent_name] = merged
    env = vf.load_environment(vf.resolve_env_config(whole))
    agents = [one for one, spec in env.config if isinstance(spec, vf.AgentConfig)]
    if agent is not None and agent not in agents:
        raise ValueError(f"{name!r} has no agent {agent!r} to train; its agents are {agents}")
    return env


def _check_version() -> None:
    """Raise ``ImportError`` unless the installed verifiers is one that this adapter knows."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"verifiers is not installed; {install_command('verifiers')}", name="verifiers"
        ) from None
    if version.split(".")[:2] != ["0", "4"]:
        raise ImportError(
            f"verifiers {version} is installed, expected >=0.4,<0.5; {install_command('verifiers')}"
        )


def _agent_config(declared: Any, *, harness: str, max_turns: int | None) -> dict[str, Any]:
    # Settings that the environment's author declared for an agent take precedence.
    ours: dict[str, Any] = {
        "model": "policy",
        "client": {"type": "train", "api_key_var": "PRIMERL_NO_KEY"},
    }
    if "runtime" not in declared.model_fields_set:
        ours["runtime"] = {"type": "subprocess"}  # the default of verifiers is a remote machine
    if declared.harness is None:
        ours["harness"] = {"id": harness}
    if declared.max_turns is None and max_turns is not None:
        ours["max_turns"] = max_turns
    return ours


def _taskset_id(package: str) -> str:
    """Return the id by which verifiers finds ``package``.

    It names one of verifiers' own tasksets, ``<name>_environment``, or ``<name>``.
    """
    module = package.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    if module.isidentifier():
        for name in (f"verifiers.v1.tasksets.{module}", f"{module}_environment", module):
            if importlib.util.find_spec(name) is not None:
                return name.rsplit(".", 1)[-1]
    how = f"install it with: prime env install {package}"
    if package in ENVIRONMENTS:
        how = install_command(environments=[package])
    elif "/" not in package:
        how = "install it from its author's source"
    raise ValueError(
        f"there is no environment {package!r}: neither {module}_environment nor {module} can be "
        f"imported; {how}"
    )
