"""The command line of a script, of a new run and of one that is resumed."""

import json
import re
import signal
import sys
import threading
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
    urls: tuple[str, ...] = attrs.field(default=(), validator=track.urls)
    sizes: tuple[int, ...] = attrs.field(default=(1,), validator=track.number(at_least=1))
    vllm: dict[str, bool | str] = attrs.field(factory=dict)
    env: str | None = None
    steps: int = 20
    run_dir: str | None = None
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))


def check(args):
    if args.model == "none":
        raise ValueError("--model is 'none'; expected another")


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
        return track.command_line(Args, presets=presets, extras=extras, check=check)

    return read


@pytest.fixture
def refused(given, capsys):
    """The one line with which the script refuses its flags."""

    def read(*words, presets=None):
        with pytest.raises(SystemExit) as ended:
            given(*words, presets=presets)
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        [line] = said.err.splitlines()
        assert line.startswith("script.py: ")
        return line.removeprefix("script.py: ")

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
def test_a_preset_that_there_is_not_is_refused_as_any_value(refused, words):
    assert "--size" in refused("--model", "m", *words, presets={"size": SIZES})


def test_a_resumed_run_has_its_own_arguments_and_no_preset(given, folder):
    resumed = given("--resume", folder, "--size", "large", presets={"size": SIZES})
    assert resumed == attrs.evolve(BEGUN, size="large", resume=str(folder))


def test_a_run_that_lacks_an_argument_has_that_of_its_preset(given, folder):
    path = folder / "args.json"
    begun = json.loads(path.read_text()) | {"size": "large"}
    del begun["lr"]
    path.write_text(json.dumps(begun))
    assert given("--resume", folder, presets={"size": SIZES}).lr == SIZES["large"].lr


def test_extras_of_a_preset_are_named_without_tyro(refused, monkeypatch):
    for module in ("tyro", "verifiers"):
        monkeypatch.setitem(sys.modules, module, None)
    assert "tyro, verifiers;" in refused("--size", "large", presets={"size": SIZES})


def test_without_flags_all_are_the_defaults(monkeypatch):
    @attrs.frozen
    class Defaults:
        steps: int = 20
        run_dir: str | None = None
        resume: str | None = None

    monkeypatch.setattr("sys.argv", ["demo.py"])

    assert track.command_line(Defaults) == Defaults()


def test_a_mapping_that_is_given_replaces_that_of_the_defaults(monkeypatch):
    @attrs.frozen
    class Defaults:
        options: dict[str, str] = attrs.field(factory=lambda: {"tier": "easiest"})

    def given(*words):
        monkeypatch.setattr("sys.argv", ["script.py", *words])
        return track.command_line(Defaults).options

    assert given() == {"tier": "easiest"}
    assert given("--options") == {}
    assert given("--options", "split", "eval") == {"split": "eval"}


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


def test_what_is_no_run_of_this_script_is_refused(refused, folder, tmp_path):
    assert refused("--resume", "mistyped") == "there is no folder mistyped to resume from"
    assert "args.json is missing" in refused("--resume", tmp_path)
    arguments = json.loads((folder / "args.json").read_text())
    for wrong in ({"lr": "high"}, {"dtype": "int8"}):
        (folder / "args.json").write_text(json.dumps(arguments | wrong))
        assert re.search(
            r"is not a run of this script: args\.json: .*\$\.(lr|dt)", refused("--resume", folder)
        )
    del arguments["model"]
    (folder / "args.json").write_text(json.dumps(arguments))
    assert re.search("is not a run of this script.*`model`", refused("--resume", folder))


ALL = "; --help lists all flags"
EACH = "expected one or more numbers, each an integer of at least 1"
EMPTY = "--urls has no value; expected at least one, or leave the flag out"
URLS = "expected URLs such as http://host:8000, or leave the flag out"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lr", "-1"], "--lr is -1.0; expected a number of at least 0" + ALL),
        (["--lr", "x"], "Error parsing --lr: could not convert string to float: 'x'" + ALL),
        (["--lr"], "Missing value for argument '--lr'. Expected 1 values" + ALL),
        (["--sizes", "2", "0"], f"--sizes is 2 0; {EACH}{ALL}"),
        (["--step", "3"], "Unrecognized options: --step, 3; perhaps you meant --steps" + ALL),
        (["--urls"], EMPTY),
        (["--urls", "--steps", "3"], EMPTY),
        (["--urls", ""], f"--urls has ''; {URLS}{ALL}"),
        (["--model", "none"], "--model is 'none'; expected another"),
    ],
)
def test_a_wrong_flag_is_one_line(refused, words, line):
    assert refused("--model", "m", "--size", "small", *words) == line


def test_a_flag_that_is_missing_or_does_not_fit_a_resumed_run_is_one_line(refused, folder):
    assert re.fullmatch(r"Missing from .*: --model STR .*", refused("--lr", "1"))
    assert "int8" in refused("--resume", folder, "--dtype", "int8")


def test_ranks_but_the_first_refuse_in_silence_once_torchrun_ends_them(given, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    threading.Timer(0.5, signal.pthread_kill, [threading.get_ident(), signal.SIGTERM]).start()
    with pytest.raises(SystemExit) as ended:
        given("--model", "m", "--step", "3")
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        given("--help")
    assert ended.value.code == 0
    assert capsys.readouterr() == ("", "")


def test_a_new_run_in_the_folder_of_another_is_refused_by_the_first_rank(
    given, refused, folder, monkeypatch, tmp_path
):
    words = ["--model", "m", "--lr", "0", "--run-dir"]
    assert f"{folder} holds a run already" in refused(*words, folder)
    file = tmp_path / "file"
    file.touch()
    assert f"{file} is not a folder" in refused(*words, file)
    assert given(*words, tmp_path / "new").run_dir == str(tmp_path / "new")
    monkeypatch.setenv("RANK", "1")  # the first rank may have begun the run already
    assert given(*words, folder).run_dir == str(folder)


def test_numbers_of_a_field_with_several():
    with pytest.raises(ValueError, match=f"--sizes is empty; {EACH}"):
        Args(model="m", sizes=())
    for wrong in ((1, 0), (1.5,), (True,), (1, "2")):
        with pytest.raises(ValueError, match=f"--sizes is .*; {EACH}"):
            Args(model="m", sizes=wrong)


def test_a_model_is_a_folder_or_could_be_of_the_hub(tmp_path):
    (tmp_path / "config.json").touch()
    for right in (str(tmp_path), "org/name"):
        track.require_model(right, flag="--model")
    for wrong in ("runs/models/x", "name", "./a/b", "", str(tmp_path / "x")):
        with pytest.raises(ValueError, match="--teacher: there is no model folder|not a model"):
            track.require_model(wrong, flag="--teacher")


def test_a_folder_to_publish_into_or_its_parent_may_be_written(tmp_path, monkeypatch):
    for right in (tmp_path, tmp_path / "new"):
        track.require_shared_folder(right, flag="--weights-folder")
    with pytest.raises(ValueError, match="--weights-folder is .*/new/new, but .*/new does not exi"):
        track.require_shared_folder(tmp_path / "new" / "new", flag="--weights-folder")
    (tmp_path / "file").touch()
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    for wrong in ("file", ".", "new"):
        with pytest.raises(ValueError, match="is not a folder that may be written; pass a folder"):
            track.require_shared_folder(tmp_path / wrong, flag="--shared-folder")


def test_a_finished_run_is_resumed_with_more_steps_than_it_took(given, refused, folder):
    (folder / "summary.json").write_text(json.dumps({"finished": True, "steps": 20}))

    assert re.search(
        r"is finished: it took its 20 steps.*such as --steps 40", refused("--resume", folder)
    )
    assert given("--resume", folder, "--steps", 21).steps == 21
    (folder / "summary.json").write_text(json.dumps({"finished": False, "steps": 20}))
    assert given("--resume", folder).steps == 20


@pytest.mark.parametrize("tyro", [True, False])
def test_all_that_is_missing_is_named_at_once(given, refused, monkeypatch, tyro):
    for module in ("verifiers", "peft", "reasoning_gym_environment"):
        monkeypatch.setitem(sys.modules, module, None)
    expected = "verifiers, peft, the environment reasoning-gym; in a clone of primerl, run: "
    groups = "verifiers,lora"
    if not tyro:
        monkeypatch.setitem(sys.modules, "tyro", None)
        expected = f"tyro, {expected}"
        groups = f"recipes,{groups}"

    assert refused("--model", "m", "--env", "reasoning-gym:chain_sum") == (
        f"not installed: {expected}pip install '.[{groups}]' ./recipes/environments/reasoning-gym"
    )
    assert re.match(
        r"not installed: (tyro, )?peft; .* '.\[(recipes,)?lora", refused("--model", "m")
    )
    if tyro:
        assert given("--model", "m", "--lr", "0").model == "m"
