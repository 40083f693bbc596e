"""Checks that refuse vLLM arguments that would break training, and the reasons."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

_SAMPLED = "the responses would not show which distribution was sampled"


@attrs.frozen
class _RefusedArgument:
    why: str
    allowed: tuple[str, ...] = ()
    """Values that are accepted because they have no effect."""


# Arguments that change the sampled distribution, its logprobs, or the model. Arguments that only
# change rounding (dtype, kv_cache_dtype, backends) are accepted, and the canary measures their
# effect. The tokenizer is accepted too, because requests and responses contain only token ids.
_REFUSED = {
    "logprobs_mode": _RefusedArgument(
        "losses expect logprobs of the distribution that was sampled, after temperature",
        ("processed_logprobs",),
    ),
    "logits_processors": _RefusedArgument(f"it changes what is sampled, and {_SAMPLED}"),
    "generation_config": _RefusedArgument(
        f"its penalties, temperature and top_p would become request defaults, and {_SAMPLED}",
        ("auto", "vllm"),
    ),
    "override_generation_config": _RefusedArgument(
        f"penalties, temperature and top_p would become request defaults, and {_SAMPLED}"
    ),
    "watermark": _RefusedArgument(f"it changes what is sampled, and {_SAMPLED}"),
    "watermark_config": _RefusedArgument(f"it changes what is sampled, and {_SAMPLED}"),
    "quantization": _RefusedArgument("the server would not compute with the published weights"),
    "quantization_config": _RefusedArgument(
        "the server would not compute with the published weights"
    ),
    "hf_overrides": _RefusedArgument(
        "the trainer would not apply them: change config.json, which both read"
    ),
    "hf_config_path": _RefusedArgument("the trainer reads config.json from the model's folder"),
    "model_class_overrides": _RefusedArgument("the model would differ from the trainer's"),
    "model": _RefusedArgument("the model is the first argument"),
    "config": _RefusedArgument("arguments in a file are not checked: pass them by name"),
}
_REFUSED_WITH_UPDATES = {
    "enable_eplb": _RefusedArgument(
        "it moves experts between devices, and a weight update could load some of them into the "
        "places of others (vLLM 0.32); to serve weights that never change, add "
        "weight_transfer=None",
        ("False",),
    ),
}

# Arguments that vLLM 0.32 can't combine with expert routes; it refuses them only after a minute.
_REFUSED_WITH_ROUTES = {
    f"{name}_parallel_size": _RefusedArgument(
        "vLLM 0.32 returns expert routes without pipeline and context parallelism only; divide "
        "the model by tensor_parallel_size, data_parallel_size or enable_expert_parallel",
        ("1",),
    )
    for name in ("pipeline", "decode_context", "prefill_context")
}
# Methods of speculative decoding whose drafts come from texts, not from weights.
_DRAFT_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
_DRAFT_METHOD = re.compile(r"(?:\bspec[_-]|(?<![\w-]))method\W+(\w+)")
_FLAG = re.compile(r"--?([A-Za-z][^=]*)(?:=(.*))?$", re.DOTALL)
# Lower-case parts of the names of KV connectors that move a prefill from one server to another.
_MOVES_PREFILLS = ("nixl", "moriio", "mooncakeconnector")


def refuse_arguments(
    engine_args: Mapping[str, Any],
    flags_as_given: Sequence[str],
    *,
    updates: bool = True,
    routes: bool = False,
) -> None:
    """Refuse arguments that change what is sampled or its logprobs.

    With ``updates``, also refuse arguments that break weight updates. With ``routes``, also refuse
    arguments with which vLLM returns no expert routes.

    Raises:
        ValueError: an argument is refused; the message gives the reason.
    """
    refusals = _REFUSED | (_REFUSED_WITH_UPDATES if updates else {})
    refusals |= _REFUSED_WITH_ROUTES if routes else {}
    if updates:
        _refuse_drafts_with_weights(engine_args, flags_as_given)
    for name, value in given(engine_args, flags_as_given):
        plain = plain_name(name)
        # With "synthetic" acceptance, draft tokens are accepted regardless of the distribution.
        if _is_speculative(plain) and "synthetic" in f"{name} {value}".lower():
            raise ValueError(
                f"serve_vllm refuses {name}: synthetic acceptance accepts draft tokens that the "
                "policy did not sample"
            )
        moves_prefills = any(word in value.lower() for word in _MOVES_PREFILLS)
        if routes and moves_prefills and "kv_transfer_config".startswith(plain):
            raise ValueError(
                f"serve_vllm refuses {name}={value} with enable_return_routed_experts: vLLM 0.32 "
                "does not return the expert routes of a prefill that another server computed. "
                "Split prefill and decode by kv_transfer_config=serving.kv_folder(folder), or "
                "train without router replay"
            )
        for refused in _named(plain, refusals):
            refusal = refusals[refused]
            if value not in refusal.allowed and value not in ("", "None"):
                raise ValueError(f"serve_vllm refuses {refused}={value}: {refusal.why}")


def _is_speculative(plain: str) -> bool:
    """Return whether an argument configures speculative decoding; its name may be abbreviated."""
    return plain == "sc" or plain.startswith(("specu", "spec_"))


def refuse_drafts_on_cpu(engine_args: Mapping[str, Any], flags: Sequence[str]) -> None:
    """Refuse speculative decoding in vLLM's build for CPUs, which samples wrong tokens.

    Its replacement of a Triton kernel converts temperatures to integers and discards the result, so
    that drafts are verified at arbitrary temperatures (vLLM 0.32).

    Raises:
        ValueError: the arguments configure speculative decoding.
    """
    if _speculative_words(engine_args, flags):
        raise ValueError(
            "serve_vllm refuses speculative decoding on a CPU: vLLM's build for CPUs (0.32) loses "
            "the temperature when it verifies drafts, so that tokens and logprobs are wrong. Leave "
            "it out, or serve on a GPU"
        )


def _speculative_words(engine_args: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    return [
        f"{name}={value}"
        for name, value in given(engine_args, flags)
        if _is_speculative(plain_name(name)) and value not in ("", "None")
    ]


def _refuse_drafts_with_weights(engine_args: Mapping[str, Any], flags: Sequence[str]) -> None:
    words = _speculative_words(engine_args, flags)
    found = _DRAFT_METHOD.search(" ".join(words))
    if words and (found is None or found[1] not in _DRAFT_WITHOUT_WEIGHTS):
        method = f"the method {found[1]!r}" if found else "a draft model"
        raise ValueError(
            f"serve_vllm refuses speculative decoding with {method}: only the policy's weights are "
            "published, so the weights of the drafts would stay as they are, and fewer and fewer "
            "drafts would be accepted. Give the method 'ngram' or 'suffix', whose drafts need no "
            "weights; to serve weights that never change, add weight_transfer=None"
        )


def _named(name: str, refusals: Mapping[str, _RefusedArgument]) -> list[str]:
    """Return the refused arguments that a name may abbreviate."""
    name = "quantization" if name == "q" else name
    return [name] if name in refusals else [one for one in refusals if one.startswith(name)]


def given(engine_args: Mapping[str, Any], flags: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names and values of all arguments, given by name or as vLLM's flags.

    vLLM accepts ``--a-b`` and ``--a_b``, ``--no-a``, ``--a value`` and ``--a=value``,
    ``--a.key=value`` for a key of a JSON value, and any unique prefix of a name.
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
    """Return the Python name of a vLLM argument, given as a flag or by name."""
    return name.partition(".")[0].replace("-", "_").removeprefix("no_")
