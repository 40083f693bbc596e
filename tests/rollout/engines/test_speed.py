"""The comparison of engines, on a tiny model."""

import pytest

from primerl import testing
from primerl.rollout.engines.transformers.speed import measure_speed


def test_engines_are_measured_and_printed(tmp_path, capsys):
    testing.tiny_model("qwen3").save_pretrained(tmp_path)
    options = {"requests": [1, 3], "prompts": [5], "new_tokens": 4, "group": 2}

    speeds = measure_speed(
        str(tmp_path), dtype="float32", engines=["TransformersEngine", "generate"], **options
    )

    assert set(speeds) == {
        (engine, count, 5) for engine in ("TransformersEngine", "generate") for count in (1, 3)
    }
    assert min(speeds.values()) > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["engine", "requests", "prompt", "tokens/s", "seconds"]
    assert [line.split()[:3] for line in lines[1:]] == [
        [engine, str(count), "5"]
        for engine in ("TransformersEngine", "generate")
        for count in (1, 3)
    ]


@pytest.mark.thorough
def test_an_engine_that_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    testing.tiny_model("qwen3").save_pretrained(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    measure_speed(
        str(tmp_path),
        dtype="float32",
        engines=["vLLM"],
        requests=[1],
        prompts=[5],
        new_tokens=1,
        group=1,
    )

    assert capsys.readouterr().out.splitlines()[1].split() == ["vLLM", "not", "installed"]
