"""Chat templates that models ship with, as the package trl holds them."""

import importlib.util
from pathlib import Path

TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"

# What ends replies, by the models' generation_config.json.
STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "gemma3": ["<eos>", "<end_of_turn>"],
    "gemma4": ["<eos>", "<turn|>", "<|tool_response>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|endoftext|>", "<|call|>"],
    "lfm2": ["<|im_end|>"],
    "lfm2_v2": ["<|im_end|>"],
    "llama3": ["<|end_of_text|>", "<|eot_id|>"],
    "llama3_1": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "phi3_5": ["<|endoftext|>", "<|end|>"],
    "qwen2_5": ["<|im_end|>", "<|endoftext|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "qwen3_instruct_2507": ["<|im_end|>", "<|endoftext|>"],
    "qwen3_8": ["<|im_end|>", "<|endoftext|>"],
    "smolvlm": ["<end_of_utterance>"],
}
