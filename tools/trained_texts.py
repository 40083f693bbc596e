"""Write docs/trained-texts.md: what SFT trains of some conversations, by chat template.

python tools/trained_texts.py docs/trained-texts.md
"""

import json
import re
import sys
from pathlib import Path

from primerl import data

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests/helpers"))

from byte_tokenizer import byte_tokenizer
from chat_templates import STOPS, TEMPLATES

HEAD = """# Trained texts

Made by `python tools/trained_texts.py docs/trained-texts.md`. This page is for those who want to
see what [supervised fine-tuning](fine-tuning.md) makes of conversations with tools, reasoning,
content in parts and parallel calls. It shows the text as the model gets it, with the trained text
between ⟦ and ⟧. The conversations are those of `tests/data/files/agentic.jsonl`. All replies are
trained (`--replies all`) where the template allows it, else the last one (`--replies last`). A
conversation is refused rather than trained without something that it says; then the page shows
the error.
"""
DATE = "Current date: 2026-11-28"  # gpt-oss's template writes today's
MODELS = {"qwen3": "Qwen3", "glm4moe": "GLM-4.5", "gptoss": "gpt-oss", "llama3_1": "Llama 3.1"}


def page() -> str:
    """Return the page."""
    conversations = data.Conversations(ROOT / "tests/data/files/agentic.jsonl")
    parts = [HEAD]
    for conversation in conversations:
        messages = "\n".join(
            json.dumps(message, ensure_ascii=False) for message in conversation["messages"]
        )
        parts.append(f"## {conversation['id'].capitalize()}\n\n```json\n{messages}\n```\n")
        for name, model in MODELS.items():
            heading = f"### {conversation['id'].capitalize()}: {model}"
            parts.append(f"{heading}\n\n{_shown(conversation, name)}\n")
    return "\n".join(parts)


def _shown(conversation: dict, name: str) -> str:
    """Return the marked text under a template, or why it is refused."""
    tokenizer = byte_tokenizer(STOPS[name], (TEMPLATES / f"{name}.jinja").read_text())
    stops = tokenizer.convert_tokens_to_ids(STOPS[name])
    for replies in ("all", "last"):
        try:
            sample = data.training_sample(
                conversation,
                tokenizer,
                max_tokens=100_000,
                stop_token_ids=stops,
                replies=replies,
            )
        except data.ConversationError as error:
            refusal = str(error).replace(f"{ROOT}/", "")
            continue
        text = re.sub(r"Current date: [0-9-]+", DATE, data.marked_text(sample, tokenizer))
        return f"`--replies {replies}`:\n\n```text\n{text}\n```"
    return f"Refused: `{refusal}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
