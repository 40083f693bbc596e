"""The command line of a script, of a new run and of one that is resumed."""

import json
import sys
from typing import Literal

import attrs
import pytest

from primerl import track


@attrs.frozen
class Args:
    model: str
    size: Literal["small", "large"] = "small"
    lr: float = attrs.field(default=0.1, validator=track.number(at_least=0))
    dtype: Literal["float32", "bfloat16"] = "float32"
    urls: tuple[str, ...] = ()
    vllm: dict[str, bool | str] = attrs.field(factory=dict)
    env: str | None = None
    steps: int = 20
    run_dir: str | None = None
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))


def extras(args):
    needed = ["verifiers"] if args.env else []
    return [*needed, "lora"] if args.lr else needed


SIZES = {
    "small": Args(model="tiny"),
    "large": Args(model="huge", size="large", lr=0.0, env="e"),
}
BEGUN = Args(
    model="m", lr=0.5, dtype="bfloat16", urls=("http://a", "http://b"), vllm={"a": "1"}, env="e"
)


@pytest.fixture
def given(monkeypatch):
    def read(*words, presets=None):
        monkeypatch.setattr("sys.argv", ["script.py", *map(str, words)])
        return track.command_line(Args, presets=presets, extras=extras)

    return read


@pytest.fixture
def folder(tmp_path):
    with track.Run(tmp_path / "run", args=attrs.evolve(BEGUN, run_dir=str(tmp_path / "run"))):
        return tmp_path / "run"


def test_a_new_run_has_the_flags_and_the_defaults(given):
    assert given("--model", "n", "--lr", "0.2") == Args(model="n", lr=0.2)


@pytest.mark.parametrize("words", [["--size", "large"], ["--size=large"]])
def test_a_flag_picks_a_preset_that_other_flags_override(given, words):
    large = SIZES["large"]

    assert given("--lr", "0.2", *words, presets={"size": SIZES}) == attrs.evolve(large, lr=0.2)
    assert given(*words, "--vllm", "a", "True", presets={"size": SIZES}).vllm == {"a": True}
    assert given("--model", "n", presets={"size": SIZES}) == Args(model="n")
    assert given("--size", "small", *words, presets={"size": SIZES}) == large  # as the last says


def test_a_mapping_that_is_given_replaces_that_of_a_preset_or_of_the_resumed_run(given, folder):
    presets = {"size": {"small": attrs.evolve(SIZES["large"], size="small", vllm={"b": "2"})}}

    assert given("--size", "small", "--vllm", "a", "True", presets=presets).vllm == {"a": True}
    assert given("--size", "small", presets=presets).vllm == {"b": "2"}
    assert given("--resume", folder, "--vllm", "c", "3").vllm == {"c": "3"}
    assert given("--resume", folder).vllm == BEGUN.vllm


@pytest.mark.parametrize("words", [["--size", "medium"], ["--size"]])
def test_a_preset_that_there_is_not_is_refused_as_any_value(given, words, capsys):
    with pytest.raises(SystemExit) as ended:
        given("--model", "m", *words, presets={"size": SIZES})
    assert ended.value.code == 2
    assert "--size" in capsys.readouterr().err


def test_a_resumed_run_has_its_own_arguments_and_no_preset(given, folder):
    resumed = given("--resume", folder, "--size", "large", presets={"size": SIZES})
    assert resumed == attrs.evolve(BEGUN, size="large", resume=str(folder))


def test_a_run_that_lacks_an_argument_has_that_of_its_preset(given, folder):
    path = folder / "args.json"
    begun = json.loads(path.read_text()) | {"size": "large"}
    del begun["lr"]
    path.write_text(json.dumps(begun))
    assert given("--resume", folder, presets={"size": SIZES}).lr == SIZES["large"].lr


def test_extras_of_a_preset_are_named_without_tyro(given, monkeypatch):
    for module in ("tyro", "verifiers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="tyro, verifiers;"):
        given("--size", "large", presets={"size": SIZES})


def test_without_flags_all_are_the_defaults(monkeypatch):
    @attrs.frozen
    class Defaults:
        steps: int = 20
        run_dir: str | None = None
        resume: str | None = None

    monkeypatch.setattr("sys.argv", ["demo.py"])

    assert track.command_line(Defaults) == Defaults()


@pytest.mark.parametrize("form", ["{}", "={}"])
def test_a_resumed_run_has_its_own_arguments(given, folder, form):
    words = ["--resume", folder] if form == "{}" else [f"--resume={folder}"]

    assert given(*words) == attrs.evolve(BEGUN, resume=str(folder))


def test_a_resumed_run_takes_what_is_given_again(given, folder):
    found = given("--lr", "0.7", "--resume", folder, "--urls", "http://c")

    assert found == attrs.evolve(BEGUN, lr=0.7, urls=("http://c",), resume=str(folder))


def test_a_folder_that_was_moved_is_resumed_where_it_is(given, folder, tmp_path):
    folder.rename(tmp_path / "moved")

    assert given("--resume", tmp_path / "moved").resume == str(tmp_path / "moved")


def test_what_is_no_run_of_this_script_is_refused(given, folder, tmp_path):
    with pytest.raises(ValueError, match="there is no folder mistyped to resume from"):
        given("--resume", "mistyped")
    with pytest.raises(ValueError, match=r"args\.json is missing"):
        given("--resume", tmp_path)
    arguments = json.loads((folder / "args.json").read_text())
    for wrong in ({"lr": "high"}, {"dtype": "int8"}):
        (folder / "args.json").write_text(json.dumps(arguments | wrong))
        with pytest.raises(
            ValueError, match=r"is not a run of this script: args\.json: .*\$\.(lr|dt)"
        ):
            given("--resume", folder)
    del arguments["model"]
    (folder / "args.json").write_text(json.dumps(arguments))
    with pytest.raises(ValueError, match="is not a run of this script.*`model`"):
        given("--resume", folder)


def test_flags_that_do_not_fit_end_the_script_with_status_2(given, folder):
    for words in (["--lr", "-1", "--model", "m"], ["--resume", folder, "--dtype", "int8"]):
        with pytest.raises(SystemExit) as ended:
            given(*words)
        assert ended.value.code == 2


def test_a_finished_run_is_resumed_with_more_steps_than_it_took(given, folder):
    (folder / "summary.json").write_text(json.dumps({"finished": True, "steps": 20}))

    with pytest.raises(ValueError, match=r"is finished: it took its 20 steps.*such as --steps 40"):
        given("--resume", folder)
    assert given("--resume", folder, "--steps", 21).steps == 21
    (folder / "summary.json").write_text(json.dumps({"finished": False, "steps": 20}))
    assert given("--resume", folder).steps == 20


@pytest.mark.parametrize("tyro", [True, False])
def test_all_that_is_missing_is_named_at_once(given, monkeypatch, tyro):
    for module in ("verifiers", "peft", "reasoning_gym_environment"):
        monkeypatch.setitem(sys.modules, module, None)
    expected = "verifiers, peft, the environment reasoning-gym; in a clone of primerl, run: "
    groups = "verifiers,lora"
    if not tyro:
        monkeypatch.setitem(sys.modules, "tyro", None)
        expected = f"tyro, {expected}"
        groups = f"recipes,{groups}"

    with pytest.raises(ImportError) as error:
        given("--model", "m", "--env", "reasoning-gym:chain_sum")
    assert str(error.value) == (
        f"not installed: {expected}pip install '.[{groups}]' ./recipes/environments/reasoning-gym"
    )
    with pytest.raises(ImportError, match=r"^not installed: (tyro, )?peft; .* '.\[(recipes,)?lora"):
        given("--model", "m")
    if tyro:
        assert given("--model", "m", "--lr", "0").model == "m"
