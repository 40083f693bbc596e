"""The task of all drivers: two tools, and what the environment says about the run."""

import os
from pathlib import Path

STREAMED = os.environ["AGENT_STREAMED"] == "yes"
API = os.environ["AGENT_API"]
TASK = os.environ["AGENT_TASK"]
MODEL = "policy"
STRING = {"type": "string"}
PARAMETERS = {
    "look": {"type": "object", "properties": {"path": STRING}, "required": ["path"]},
    "write": {
        "type": "object",
        "properties": {"path": STRING, "text": STRING},
        "required": ["path", "text"],
    },
}
DESCRIPTIONS = {"look": "Read a file.", "write": "Write a file, in capitals."}


def look(path: str) -> str:
    """Read a file."""
    return Path(path).read_text(encoding="utf-8")


def write(path: str, text: str) -> str:
    """Write a file, in capitals."""
    Path(path).write_text(text.upper(), encoding="utf-8")
    return f"It now says {text.upper()}."


TOOLS = {"look": look, "write": write}
