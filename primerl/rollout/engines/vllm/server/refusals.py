"""Arguments of vLLM that a server for training is not started with, and why."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

_SAMPLED = "a trainer could not tell from the answers what was sampled from"


@attrs.frozen
class _Refusal:
    why: str
    allowed: tuple[str, ...] = ()
    """Values that change nothing."""


# What changes the distribution that is sampled, its logprobs, or which model it is of. What only
# rounds otherwise (dtype, kv_cache_dtype, backends) is no matter of arguments: the canary measures
# it. Nor is the tokenizer: token ids go in and out.
_REFUSED = {
    "logprobs_mode": _Refusal(
        "losses expect logprobs of the distribution that was sampled, after temperature",
        ("processed_logprobs",),
    ),
    "logits_processors": _Refusal(f"it changes what is sampled, and {_SAMPLED}"),
    "generation_config": _Refusal(
        f"its penalties, temperature and top_p would be defaults of requests, and {_SAMPLED}",
        ("auto", "vllm"),
    ),
    "override_generation_config": _Refusal(
        f"penalties, temperature and top_p would be defaults of requests, and {_SAMPLED}"
    ),
    "watermark": _Refusal(f"it changes what is sampled, and {_SAMPLED}"),
    "watermark_config": _Refusal(f"it changes what is sampled, and {_SAMPLED}"),
    "quantization": _Refusal(
        "the server would compute with other weights than those that were published"
    ),
    "quantization_config": _Refusal(
        "the server would compute with other weights than those that were published"
    ),
    "hf_overrides": _Refusal(
        "the trainer's model does not have them: write them into the config.json that both read"
    ),
    "hf_config_path": _Refusal("the trainer's model has the config.json of the model's own folder"),
    "model_class_overrides": _Refusal("it would be another model than the trainer's"),
    "model": _Refusal("the model is the first argument"),
    "config": _Refusal("what a file of arguments changes can't be seen: pass them by name"),
}
_SHORT = {"q": "quantization"}
# Draft tokens of a "synthetic" acceptance are of no distribution.
_SPECULATIVE = re.compile(r"synthetic", re.IGNORECASE)


def refuse_arguments(engine_args: Mapping[str, Any], flags_as_given: Sequence[str]) -> None:
    """See that no argument changes what is sampled or logged.

    vLLM takes ``--a-b`` and ``--a_b``, ``--no-a``, ``--a value`` and ``--a=value``, for a part of
    JSON ``--a.key=value``, and any beginning of a name that is unique.

    Raises:
        ValueError: one does; the message says which, and why it is refused.
    """
    given = [(name, "" if value is None else str(value)) for name, value in engine_args.items()]
    for name, value in [*given, *_flags(flags_as_given)]:
        plain = name.partition(".")[0].replace("-", "_").removeprefix("no_")
        if plain.startswith("spec") and _SPECULATIVE.search(f"{name} {value}"):
            raise ValueError(f"serve_vllm refuses {name}: it accepts draft tokens of no policy")
        for refused in _named(plain):
            refusal = _REFUSED[refused]
            if value not in refusal.allowed and value not in ("", "None"):
                raise ValueError(f"serve_vllm refuses {refused}={value}: {refusal.why}")


def _named(name: str) -> list[str]:
    """The refused arguments that a name may mean."""
    name = _SHORT.get(name, name)
    return [name] if name in _REFUSED else [one for one in _REFUSED if one.startswith(name)]


def _flags(words: Sequence[str]) -> list[tuple[str, str]]:
    """Names and values of flags."""
    found = []
    for index, word in enumerate(words):
        match = re.match(r"--?([A-Za-z][^=]*)(?:=(.*))?$", word, re.DOTALL)
        if match is None:
            continue
        following = words[index + 1 : index + 2]
        value = match[2] if match[2] is not None else " ".join(following)
        found.append((match[1], value or "true"))
    return found
