"""The recipe that measures, on a real vLLM server: by tokens and by messages."""

import importlib.util
import json

import pytest

from primerl import track


@pytest.fixture(scope="module")
def recipe(root):
    spec = importlib.util.spec_from_file_location("evaluate", root / "recipes/evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def greedy_replies(folder):
    return {one["task"]: one["messages"][-1]["content"] for one in track.read_evaluation(folder)}


def test_tokens_and_messages_have_the_same_greedy_replies(
    recipe, server, smollm2, tmp_path, monkeypatch
):
    args = {
        "env": ("reverse-words",),
        "tasks": 8,
        "max_tokens": 12,
        "temperature": 0.0,
        "rollout_timeout_s": 120.0,
    }
    monkeypatch.setenv("PRIMERL_API_KEY", server.api_key)
    recipe.main(
        recipe.Args(
            **args, model=smollm2, engine_urls=(server.url,), run_dir=str(tmp_path / "tokens")
        )
    )
    monkeypatch.setenv("OPENAI_API_KEY", server.api_key)
    recipe.main(
        recipe.Args(
            **args,
            endpoint=f"{server.url}/v1",
            run_dir=str(tmp_path / "messages"),
            against=str(tmp_path / "tokens"),
        )
    )

    tokens, messages = greedy_replies(tmp_path / "tokens"), greedy_replies(tmp_path / "messages")
    assert tokens.keys() == messages.keys()
    assert sum(tokens[task] == messages[task] for task in tokens) >= 7  # a tie may fall either way
    first, second = (summary(tmp_path / name)["scores"] for name in ("tokens", "messages"))
    assert first["reverse-words"]["errors"] == second["reverse-words"]["errors"] == {}
    # An endpoint does not count the token that ends a reply, or does: servers differ.
    assert abs(first["reverse-words"]["tokens"] - second["reverse-words"]["tokens"]) <= 1.0
    assert summary(tmp_path / "messages")["comparison"]["reverse-words"]["tasks"] == 8
