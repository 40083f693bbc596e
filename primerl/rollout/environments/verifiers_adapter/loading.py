"""Functions that find, configure and load a verifiers environment."""

import difflib
import enum
import importlib.metadata
import importlib.util
import types
import typing
from collections.abc import Mapping
from typing import Any

from primerl._common.optional import ENVIRONMENTS, install_command, require

NAMES = ("dataset", "game", "env", "env_id")
"""The options by which tasksets name their tasks; the first that a taskset has is the choice."""


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
    package, colon, choice = name.partition(":")
    if colon and not choice:
        raise ValueError(f"{name!r} names nothing after the colon")
    taskset = {"id": _taskset_id(package), **config.get("taskset", {})}
    options = _options(package, taskset["id"])
    if choice:
        taskset = _with_choice(taskset, options, package=package, choice=choice)
    else:
        _check_choice(taskset, options, package=package)
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


def _options(package: str, taskset_id: str) -> Mapping[str, Any]:
    """Return the options of a taskset: pydantic's fields, by name."""
    vf: Any = require("verifiers.v1", extra="verifiers")
    try:
        options: Mapping[str, Any] = vf.taskset_config_type(taskset_id).model_fields
    except (AttributeError, TypeError) as error:
        reason: Exception = error
    except ModuleNotFoundError as error:  # verifiers reports the package itself as missing
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is not None and not missing.startswith("verifiers."):
            raise ImportError(
                f"the environment {package} needs {missing}, which is not installed", name=missing
            ) from error
        reason = cause if isinstance(cause, ModuleNotFoundError) else error
    else:
        return options
    raise ValueError(
        f"{package} is installed, but it is not an environment of verifiers 0.4: {reason}"
    ) from reason


def _choice_option(options: Mapping[str, Any]) -> str | None:
    """Return the option that an id sets after its colon; None if the taskset has none.

    It is the first of ``NAMES`` that the taskset has, or else its only required option.
    """
    for option in NAMES:
        if option in options:
            return option
    required = [option for option, field in options.items() if field.is_required()]
    return required[0] if len(required) == 1 else None


def _with_choice(
    taskset: Mapping[str, Any], options: Mapping[str, Any], *, package: str, choice: str
) -> dict[str, Any]:
    """Return the config of a taskset, with the option that ``choice`` sets.

    Raises:
        ValueError: the taskset has no such option, does not know ``choice``, or its config has
            another value.
    """
    option = _choice_option(options)
    if option is None:
        raise ValueError(
            f"{package}:{choice} names {choice!r}, but {package} has no {', '.join(NAMES)} or only "
            f"required option to choose; its taskset's options are {sorted(options)}"
        )
    known = _known_values(options[option].annotation)
    if known and choice not in known:
        close = difflib.get_close_matches(choice, known, n=5, cutoff=0.5)
        raise ValueError(
            f"{package} has no {option} {choice!r}; there are {', '.join(known)}"
            + (f"; similar: {', '.join(close)}" if close else "")
        )
    value = known.get(choice, choice)
    if str(taskset.get(option, value)) != str(value):
        raise ValueError(
            f"{package}:{choice} names the {option} {choice!r}, but the config names "
            f"{taskset[option]!r}"
        )
    return {**taskset, option: value}


def _check_choice(taskset: Mapping[str, Any], options: Mapping[str, Any], *, package: str) -> None:
    """Raise ``ValueError`` if the taskset requires a choice that neither id nor config makes."""
    option = _choice_option(options)
    if option is None or option in taskset or not options[option].is_required():
        return
    known = list(_known_values(options[option].annotation))
    if known:
        raise ValueError(
            f"name one {option} of {package}, as in '{package}:{known[0]}'; there are "
            f"{', '.join(known)}"
        )
    raise ValueError(f"name one {option} of {package} after a colon: '{package}:<{option}>'")


def _known_values(annotation: Any) -> dict[str, Any]:
    """Return the values that an option's type enumerates, by name; empty if it enumerates none."""
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return {str(value): value for value in members}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {str(member.value): member.value for member in annotation}
    if origin in (typing.Union, types.UnionType):
        parts = [_known_values(part) for part in members if part is not types.NoneType]
        return {name: part[name] for part in parts for name in part} if all(parts) else {}
    return {}


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
