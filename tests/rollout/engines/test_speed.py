"""The comparison of engines, on a tiny model."""

import importlib.util
import runpy
import sys
import weakref
from types import SimpleNamespace

import pytest
import transformers

from primerl import testing
from primerl.rollout.engines.transformers.speed import measure_speed
from primerl.testing.families import tiny_family

FAKE_VLLM = """
import sys


class SamplingParams:
    def __init__(self, **settings):
        pass


class LLM:
    def __init__(self, *, model, dtype, max_model_len):
        for stream in (sys.stdout, sys.stderr):
            print("a line of the log\\n" * 100, file=stream, flush=True)
        if max_model_len == 13:
            raise ValueError("No memory.\\nTwo lines.")
        if max_model_len == 14:
            raise SystemExit(3)

    def generate(self, asked, params, use_tqdm):
        assert [len(one["prompt_token_ids"]) for one in asked] == [5] * 3
"""


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


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize(
    ("new_tokens", "last"),
    [(8, "vLLM No memory. Two lines. (log: "), (9, "vLLM ended with exit code 3 (log: "), (4, "")],
)
def test_vllm_is_measured_in_a_process_whose_output_goes_to_a_file(
    tmp_path, capfd, new_tokens, last
):
    testing.tiny_model("qwen3").save_pretrained(tmp_path)
    options = {"requests": [3], "prompts": [5], "new_tokens": new_tokens, "group": 2}
    speeds = measure_speed(str(tmp_path), dtype="float32", engines=["vLLM", "generate"], **options)

    assert set(speeds) - {("vLLM", 3, 5)} == {("generate", 3, 5)}
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert len(lines) == 3
    assert (("vLLM", 3, 5) in speeds) == (not last)
    assert lines[1].startswith(last or "vLLM 3 5 ")
    assert len(list(tmp_path.glob("primerl-vllm-*.log"))) == bool(last)


def test_what_an_engine_refuses_is_one_line_and_the_others_go_on(tmp_path, capfd):
    """Too long prompts, and a model that only ``generate`` can serve."""
    tiny_family("llama4_text").save_pretrained(tmp_path)
    positions = transformers.AutoConfig.from_pretrained(tmp_path).max_position_embeddings
    options = {"requests": [2], "prompts": [5, positions], "new_tokens": 4, "group": 2}
    speeds = measure_speed(
        str(tmp_path), dtype="float32", engines=["TransformersEngine", "generate"], **options
    )

    assert set(speeds) == {("generate", 2, 5)}
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()[1:]]
    too_long = f"{positions} {positions + 4} tokens, but {positions} positions"
    assert lines[0] == f"TransformersEngine {too_long}"
    assert lines[1].startswith("TransformersEngine llama4_text has chunked_attention layers")
    assert lines[2] == f"generate {too_long}"
    assert lines[3].startswith("generate 2 5 ")
    assert len(lines) == 4


def test_the_memory_of_an_engine_is_free_for_the_next(tmp_path, monkeypatch):
    testing.tiny_model("qwen3").save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded = []

    def load_one(*arguments, **settings):
        assert not [model for model in loaded if model() is not None]
        model = load(*arguments, **settings)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load_one)
    options = {"requests": [1], "prompts": [5], "new_tokens": 1, "group": 2}
    engines = ["generate", "TransformersEngine"]
    measure_speed(str(tmp_path), dtype="float32", engines=engines, **options)

    assert [model() for model in loaded] == [None, None]


@pytest.mark.parametrize("model", ["nowhere/at/all", "empty"])
def test_a_path_without_a_model_is_one_line(tmp_path, monkeypatch, capfd, model):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "argv", ["rollout", "speed", str(tmp_path / model)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("primerl.rollout", run_name="__main__")

    printed = capfd.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"no model was found under '{tmp_path / model}': ")


def test_the_help_explains_the_engines(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rollout", "speed", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("primerl.rollout", run_name="__main__")

    assert "the engines to measure, in this order" in " ".join(capsys.readouterr().out.split())


@pytest.mark.thorough
def test_an_engine_that_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    testing.tiny_model("qwen3").save_pretrained(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "vllm" else find_spec(name)
    )

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


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("recipe", ["async_grpo", "distill"])
def test_recipes_name_this_comparison_instead_of_claiming_a_speed(root, capsys, recipe):
    namespace = runpy.run_path(str(root / "recipes" / f"{recipe}.py"), run_name="recipe")
    args = SimpleNamespace(
        engine="transformers", engine_urls=(), dtype="float32", seed=0, model="folder"
    )
    with namespace["open_engine"](args, testing.tiny_model("qwen3")):
        printed = capsys.readouterr().out

    assert "faster" not in printed
    assert "`python -m primerl.rollout speed folder` compares" in printed
