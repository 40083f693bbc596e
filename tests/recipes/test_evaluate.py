"""The recipe that measures: on a model in this process, on an endpoint, interrupted and resumed."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("verifiers")
from scripted_chat import ScriptedChat

from primerl import track

HERE = Path(__file__).parents[1] / "helpers/verifiers_environments"


@pytest.fixture(scope="module")
def recipe(root):
    spec = importlib.util.spec_from_file_location("evaluate", root / "recipes/evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _environments(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def word_of(messages):
    return messages[-1]["content"].split()[-1]


def backwards(messages):
    return word_of(messages)[::-1]


def plays(folder):
    return [(play["task"], play["index"]) for play in track.read_evaluation(folder)]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_model_in_this_process(recipe, tiny_chat_model, tmp_path, capsys):
    args = recipe.Args(
        env=("reverse-words", "reasoning-gym:chain_sum"),
        model=str(tiny_chat_model),
        tasks=3,
        samples=2,
        max_tokens=4,
        run_dir=str(tmp_path / "run"),
    )
    recipe.main(args)

    lines = track.read_evaluation(tmp_path / "run")
    assert len(lines) == len(set(plays(tmp_path / "run"))) == 12
    for line in lines:
        assert [one["role"] for one in line["messages"]][-2:] == ["user", "assistant"]
        assert 1 <= line["tokens"] <= 4
        assert line["error"] is None
    scores = summary(tmp_path / "run")["scores"]
    assert list(scores) == ["reverse-words", "reasoning-gym:chain_sum"]
    for name, one in scores.items():
        rewards = [line["reward"] for line in lines if line["environment"] == name]
        assert one["reward"]["mean"] == pytest.approx(sum(rewards) / 6)
        assert (one["tasks"], one["rollouts"], list(one["pass_at"])) == (3, 6, ["1", "2"])
    shown = capsys.readouterr().out
    assert "pass@2" in shown
    assert str(tmp_path / "run") in shown


def test_it_plays_what_async_grpo_holds_out(recipe, tmp_path):
    with ScriptedChat(backwards) as chat:
        args = recipe.Args(
            env=("reverse-words",), endpoint=chat.url, tasks=5, run_dir=str(tmp_path / "run")
        )
        recipe.main(args)
    environment = recipe.rollout.verifiers("reverse-words", tokenizer=None)
    held_out, _ = environment.tasks.split(5)
    assert {task for task, _ in plays(tmp_path / "run")} == {task["id"] for task in held_out}
    assert summary(tmp_path / "run")["scores"]["reverse-words"]["pass_at"]["1"]["mean"] == 1.0


class Interrupted(Exception):
    """What ends the process in place of a signal."""


def test_what_was_played_is_not_repeated_after_an_interruption(recipe, tmp_path):
    """Nor is it lost: the replies of the first run are among the results of the second."""
    asked = []

    def reply(messages):
        asked.append(word_of(messages))
        return backwards(messages)

    class StopsAfterFive(track.EvaluationLog):
        def add(self, record):
            super().add(record)
            if len(self.records) == 5:
                raise Interrupted

    with ScriptedChat(reply) as chat:
        args = {"env": ("reverse-words",), "endpoint": chat.url, "concurrency": 1, "tasks": 4}
        args |= {"samples": 2}
        recipe.track.EvaluationLog, whole = StopsAfterFive, track.EvaluationLog
        try:
            with pytest.raises(Interrupted) as error:
                recipe.main(recipe.Args(**args, run_dir=str(tmp_path / "run")))
        finally:
            recipe.track.EvaluationLog = whole
        assert "--resume" in "".join(error.value.__notes__)
        assert not (tmp_path / "run/summary.json").exists()
        first = plays(tmp_path / "run")
        assert len(first) == 5
        asked_before = len(asked)

        recipe.main(recipe.Args(**args, resume=str(tmp_path / "run")))

    everything = plays(tmp_path / "run")
    assert everything[:5] == first
    assert len(everything) == len(set(everything)) == 8
    # The request that was cancelled may have reached the server late.
    assert len(asked) - asked_before in (3, 4)
    assert summary(tmp_path / "run")["scores"]["reverse-words"]["rollouts"] == 8


def test_an_environment_that_raises_is_counted_by_name(recipe, tmp_path, capsys):
    args = {"env": ("moody", "reverse-words"), "tasks": 4, "retries": 0}
    with ScriptedChat(backwards) as chat:
        recipe.main(recipe.Args(**args, endpoint=chat.url, run_dir=str(tmp_path / "run")))
        scores = summary(tmp_path / "run")["scores"]
        assert scores["moody"]["errors"] == {"LookupError": 1, "OSError": 1}
        assert scores["moody"]["reward"]["mean"] == pytest.approx(0.5)
        assert scores["reverse-words"]["errors"] == {}
        failed = [one for one in track.read_evaluation(tmp_path / "run") if one["error"]]
        assert "no such mood" in {one["task"]: one["message"] for one in failed}["moody/1"]
        assert "LookupError" in capsys.readouterr().out

        recipe.main(recipe.Args(**args, endpoint=chat.url, resume=str(tmp_path / "run")))
        assert len(track.read_evaluation(tmp_path / "run")) == 8
        recipe.main(
            recipe.Args(**args, endpoint=chat.url, resume=str(tmp_path / "run"), retry_errors=True)
        )
    assert len(track.read_evaluation(tmp_path / "run")) == 10
    assert summary(tmp_path / "run")["scores"]["moody"]["rollouts"] == 4


def test_two_results_are_compared_on_the_same_tasks(recipe, tmp_path, capsys):
    with ScriptedChat(word_of) as chat:
        args = {"env": ("reverse-words",), "endpoint": chat.url, "tasks": 12}
        recipe.main(recipe.Args(**args, run_dir=str(tmp_path / "before")))
        chat.reply = backwards
        recipe.main(
            recipe.Args(**args, run_dir=str(tmp_path / "after"), against=str(tmp_path / "before"))
        )
        result = summary(tmp_path / "after")
        again = {"resume": str(tmp_path / "after"), "against": str(tmp_path / "before")}
        recipe.main(recipe.Args(**args, **again, reward_bounds=(-1.0, 1.0)))
    found = result["comparison"]["reverse-words"]
    rewards = {
        name: {one["task"]: one["reward"] for one in track.read_evaluation(tmp_path / name)}
        for name in ("before", "after")
    }
    differences = [rewards["after"][task] - rewards["before"][task] for task in rewards["before"]]
    assert found["difference"] == pytest.approx(sum(differences) / 12)
    assert found["difference"] > 0.5
    assert found["p_value"] < 0.001
    assert result["against"] == str(tmp_path / "before")
    wider = summary(tmp_path / "after")["comparison"]["reverse-words"]
    assert wider["difference"] == found["difference"]
    assert wider["low"] < found["low"] < found["high"] <= 1 < wider["high"]
    assert "compared with" in capsys.readouterr().out


def test_what_makes_no_evaluation_is_refused_before_anything_loads(recipe, tmp_path):
    with pytest.raises(ValueError, match="nothing to evaluate: pass --model MODEL, or --endpoint"):
        recipe.Args(env=("reverse-words",))
    with pytest.raises(ValueError, match="does not contain an evaluation"):
        recipe.main(
            recipe.Args(
                env=("reverse-words",),
                model="m",
                against=str(tmp_path),
                run_dir=str(tmp_path / "run"),
            )
        )
    with pytest.raises(ValueError, match="there is no environment 'reverse-wrods'"):
        recipe.main(recipe.Args(env=("reverse-wrods",), model="m", run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
