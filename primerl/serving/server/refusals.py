"""The arguments that a vLLM server is given, and those that are refused for training, and why."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

_SAMPLED = "the responses would not show which distribution was sampled"


@attrs.frozen
class _Refusal:
    why: str
    allowed: tuple[str, ...] = ()
    """Values that have no effect."""


# Arguments that change the sampled distribution, its logprobs, or the model. Those that only change
# rounding (dtype, kv_cache_dtype, backends) pass, and the canary measures their effect. So does the
# tokenizer: token ids go in and out.
_REFUSED = {
    "logprobs_mode": _Refusal(
        "losses expect logprobs of the distribution that was sampled, after temperature",
        ("processed_logprobs",),
    ),
    "logits_processors": _Refusal(f"it changes what is sampled, and {_SAMPLED}"),
    "generation_config": _Refusal(
        f"its penalties, temperature and top_p would become request defaults, and {_SAMPLED}",
        ("auto", "vllm"),
    ),
    "override_generation_config": _Refusal(
        f"penalties, temperature and top_p would become request defaults, and {_SAMPLED}"
    ),
    "watermark": _Refusal(f"it changes what is sampled, and {_SAMPLED}"),
    "watermark_config": _Refusal(f"it changes what is sampled, and {_SAMPLED}"),
    "quantization": _Refusal("the server would not compute with the published weights"),
    "quantization_config": _Refusal("the server would not compute with the published weights"),
    "hf_overrides": _Refusal(
        "the trainer would not apply them: change config.json, which both read"
    ),
    "hf_config_path": _Refusal("the trainer reads config.json from the model's folder"),
    "model_class_overrides": _Refusal("the model would differ from the trainer's"),
    "model": _Refusal("the model is the first argument"),
    "config": _Refusal("arguments in a file are not checked: pass them by name"),
}
_REFUSED_WITH_UPDATES = {
    "enable_eplb": _Refusal(
        "it moves experts between devices, and a weight update could load some of them into the "
        "places of others (vLLM 0.32); a server whose weights never change may have it, with "
        "weight_transfer=None",
        ("False",),
    ),
}

# What vLLM 0.32 refuses beside expert routes, after it has loaded for a minute.
_REFUSED_WITH_ROUTES = {
    f"{name}_parallel_size": _Refusal(
        "vLLM 0.32 returns expert routes without pipeline and context parallelism only; divide "
        "the model by tensor_parallel_size, data_parallel_size or enable_expert_parallel",
        ("1",),
    )
    for name in ("pipeline", "decode_context", "prefill_context")
}
_FLAG = re.compile(r"--?([A-Za-z][^=]*)(?:=(.*))?$", re.DOTALL)
# In the names of connectors that take a prefill from one server to another, in lower case.
_MOVES_PREFILLS = ("nixl", "moriio", "mooncakeconnector")


def refuse_arguments(
    engine_args: Mapping[str, Any],
    flags_as_given: Sequence[str],
    *,
    updates: bool = True,
    routes: bool = False,
) -> None:
    """Refuse arguments that change what is sampled or its logprobs.

    With ``updates``, also those that break weight updates, and with ``routes``, those beside which
    vLLM returns no expert routes.

    Raises:
        ValueError: an argument is refused; the message says why.
    """
    refusals = _REFUSED | (_REFUSED_WITH_UPDATES if updates else {})
    refusals |= _REFUSED_WITH_ROUTES if routes else {}
    for name, value in given(engine_args, flags_as_given):
        plain = plain_name(name)
        # With "synthetic" acceptance, draft tokens are accepted regardless of the distribution.
        if plain.startswith("spec") and "synthetic" in f"{name} {value}".lower():
            raise ValueError(f"serve_vllm refuses {name}: draft tokens would be of no policy")
        moves_prefills = any(word in value.lower() for word in _MOVES_PREFILLS)
        if routes and moves_prefills and "kv_transfer_config".startswith(plain):
            raise ValueError(
                f"serve_vllm refuses {name}={value} with enable_return_routed_experts: vLLM 0.32 "
                "does not return the expert routes of a prefill that another server computed. "
                "Serve without a split of prefill and decode, or train without router replay"
            )
        for refused in _named(plain, refusals):
            refusal = refusals[refused]
            if value not in refusal.allowed and value not in ("", "None"):
                raise ValueError(f"serve_vllm refuses {refused}={value}: {refusal.why}")


def _named(name: str, refusals: Mapping[str, _Refusal]) -> list[str]:
    """The refused arguments that a name may mean."""
    name = "quantization" if name == "q" else name
    return [name] if name in refusals else [one for one in refusals if one.startswith(name)]


def given(engine_args: Mapping[str, Any], flags: Sequence[str]) -> list[tuple[str, str]]:
    """Names and values of all arguments: those by name, and vLLM's flags.

    vLLM accepts ``--a-b`` and ``--a_b``, ``--no-a``, ``--a value`` and ``--a=value``,
    ``--a.key=value`` for a key of JSON, and any unique prefix of a name.
    """
    found = [(name, "" if value is None else str(value)) for name, value in engine_args.items()]
    matches = [_FLAG.match(word) for word in flags]
    for index, match in enumerate(matches):
        if match is None:
            continue
        value = match[2]
        if value is None and matches[index + 1 : index + 2] == [None]:
            value = flags[index + 1]
        if match[1].startswith(("no-", "no_")):
            value = "False"
        found.append((match[1], value or "true"))
    return found


def plain_name(name: str) -> str:
    """The name of an argument as vLLM's Python has it."""
    return name.partition(".")[0].replace("-", "_").removeprefix("no_")
