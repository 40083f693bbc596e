"""The families that docs/families.md admits, and how often each is tested."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
_TABLE = PAGE.split("## Refused")[0]
ADMITTED = re.findall(r"^\| `([^`]+)` \| pass", _TABLE, re.MULTILINE)
MIXTURES = re.findall(r"^\| `([^`]+)` \| pass \| pass \| pass", _TABLE, re.MULTILINE)
# One or two for each kind of attention, mixer, experts, and layout of weights.
TYPICAL = [
    "afmoe", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v4", "diffllama", "falcon_h1",
    "gemma2", "gemma3_text", "Gemma3ForConditionalGeneration", "gemma4_text", "glm4_moe",
    "glm4v_moe", "glm_moe_dsa", "gpt2", "gpt_oss", "granitemoe", "granitemoehybrid", "hrm_text",
    "jamba", "kimi_k25", "kimi_linear", "lfm2", "llama4_text", "longcat_flash", "mimo_v2_flash",
    "minimax", "minimax_m2", "minimax_m3_vl_text", "mistral", "modernbert-decoder", "nemotron_h",
    "olmo3", "opt", "phi3", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "recurrent_gemma", "smollm3",
]  # fmt: skip


def often(families: Iterable[str], *, always: Iterable[str] = ()) -> list[object]:
    """Mark all families but those of ``always``: the typical ones as thorough, others as slow.

    The slow ones run before docs/families.md is written anew, which may change them.
    """
    always = {*always}
    marks = {True: pytest.mark.thorough, False: pytest.mark.slow}
    return [
        family if family in always else pytest.param(family, marks=marks[family in TYPICAL])
        for family in families
    ]
