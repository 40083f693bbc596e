"""``python -m primerl.data``: what it says of files before a run."""

import json
import subprocess
import sys

import pytest

from primerl import models, testing
from primerl.data.checking import main

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def chat(answer, **more):
    reply = {"role": "assistant", "content": answer, **more}
    return json.dumps({"messages": [{"role": "user", "content": "2+2?"}, reply]})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = testing.character_tokenizer("useraint:\n0123456789+?")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    tiny = testing.tiny_model("llama", vocab_size=len(tokenizer))
    models.save_pretrained(tiny, folder / "tiny", tokenizer=tokenizer)
    return folder / "tiny"


def test_what_is_trained_and_what_is_refused(model, tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    lines = [chat("4"), chat("4", reasoning="2"), "{", chat("44")]
    file.write_text("\n".join(lines))
    assert main(str(model), (file,), show=2) == 1
    said = capsys.readouterr().out
    assert f"refused: {file}:3: not valid JSON" in said
    assert f"refused: {file}:2" in said
    assert "leaves '2'" in said or "reasoning_content" in said
    assert f"{file}:1:\nuser:2+2?\nassistant:⟦4<eos>⟧" in said
    assert "2 conversations can be trained, 2 are refused" in said
    # "user:2+2?\nassistant:4<eos>" has 10 + 10 + 2 tokens, and that with "44" one more.
    assert "45 tokens, 5 of them trained (11%)" in said
    assert "the longest 23" in said


def test_without_refusals_the_exit_code_is_0(model, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(chat("4"))
    words = [sys.executable, "-m", "primerl.data", model, file, "--show", "0"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 conversations can be trained, 0 are refused")


def test_too_long_conversations_and_missing_files(model, tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    file.write_text(chat("4"))
    assert main(str(model), (file,), max_tokens=5) == 1
    assert "has 22 tokens, expected at most max_tokens=5" in capsys.readouterr().out
    assert main(str(model), (tmp_path / "missing.jsonl",)) == 1
    assert "there is no such file" in capsys.readouterr().err
