"""The output formats of model families, in which the scripted engine writes its replies."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from byte_tokenizer import byte_tokenizer
from toy_families import toy_renderer

TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
LLAMA = ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]


@attrs.frozen(kw_only=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@attrs.frozen(kw_only=True)
class Family:
    """A model family: ``load`` returns a renderer and a tokenizer; ``write`` writes a reply.

    The renderer is None where the library chooses it. ``write`` takes the reasoning, the text and
    the calls.
    """

    name: str
    load: Callable[[], tuple[Any, Any]]
    write: Callable[[str, str, Sequence[Call]], str]


def hermes(reasoning, text, calls):
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    wire = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    said = [f"<tool_call>\n{one}\n</tool_call>" for one in wire]
    return thought + "\n".join(filter(None, [text, *said]))


def glm(reasoning, text, calls):
    """Write a reply of GLM-4.5, which has a block for reasoning even where there is none."""
    said = [f"\n<think>{reasoning}</think>"]
    if text:
        said.append(f"\n{text}")
    for call in calls:
        said.append(f"\n<tool_call>{call.name}")
        for key, value in call.arguments.items():
            written = value if isinstance(value, str) else json.dumps(value)
            said.append(f"\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>")
        said.append("\n</tool_call>")
    return "".join(said) + ("<|observation|>" if calls else "<|user|>")


def templated(special_tokens, template):
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    return None, byte_tokenizer(special_tokens, text)


FAMILIES = [
    Family(name="qwen3", load=lambda: toy_renderer("qwen3"), write=hermes),
    Family(name="glm-4.5", load=lambda: toy_renderer("glm-4.5"), write=glm),
    # The next two have no renderer of their own, so that the library uses their templates.
    Family(
        name="chatml",
        load=lambda: templated(["<|im_end|>", "<|im_start|>"], "qwen3.jinja"),
        write=hermes,
    ),
    Family(name="llama", load=lambda: templated(LLAMA, "llama3.jinja"), write=hermes),
]
