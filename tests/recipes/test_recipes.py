"""Every recipe, for a few steps, on a CPU."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import torchrun

from primerl import track
from primerl._common.optional import MODULES

RL = ["async_grpo", "demo", "sync_grpo"]
TRAIN = sorted([*RL, "sft", "distill", "glm_swe"])
RECIPES = sorted([*TRAIN, "evaluate"])
NEEDED = {"async_grpo": {"model": "m"}, "sync_grpo": {"model": "m"}, "demo": {}}
NEEDED["distill"] = {"model": "m", "teacher": ("t",)}
NEEDED["glm_swe"] = {}
NEEDED["sft"] = {"model": "m", "data": ("chats.jsonl",)}
NEEDED["evaluate"] = {"model": "m", "env": ("reverse-words",)}
DEMO = ["--steps", "4", "--groups-per-step", "3", "--group-size", "4", "--warmup-steps", "30"]
DEMO += ["--lr", "0.3"]
SMALL = ["--steps", "2", "--groups-per-step", "2", "--group-size", "4"]


def run(*command, cwd, env=None, check=True):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        encoding="utf-8",
        timeout=400,
        check=check,
    )


def run_together(*commands, cwd):
    """Two at a time: most of each is the import of torch."""
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(lambda command: run(*command, cwd=cwd, check=False), commands)]


def load(root, name):
    spec = importlib.util.spec_from_file_location(name, root / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_run_folder(folder, *, steps=2):
    summary = json.loads((folder / "summary.json").read_text())
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    assert summary["steps"] == steps == len(metrics)
    documented = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    evaluations = (folder / "evaluations.jsonl").read_text().splitlines()
    for name in {name for line in [*metrics, *evaluations] for name in json.loads(line)} - {"step"}:
        assert f"`{name}`" in documented or f"`{name.split('/')[0]}/" in documented, name
    assert (folder / "report.html").is_file()
    if "save_every" in json.loads((folder / "args.json").read_text()):
        assert (folder / "checkpoints" / f"step-{steps:08d}").is_dir()  # to extend it
    assert 0 <= summary["eval_before"] <= 1
    assert 0 <= summary["eval_after"] <= 1
    assert (folder / "final" / "model.safetensors").is_file()
    assert (folder / "rollouts.jsonl").read_text()
    return summary


def test_the_recipes_are_these(root):
    assert sorted(path.stem for path in (root / "recipes").glob("*.py")) == RECIPES


def fields_of_args(source):
    (args,) = (one for one in ast.parse(source).body if getattr(one, "name", "") == "Args")
    return [one for one in args.body if isinstance(one, ast.AnnAssign)]


def own_comments(source):
    """The comment of each argument: behind it, or on the lines directly above it."""
    lines = source.splitlines()
    comments = {}
    for field in fields_of_args(source):
        row = field.lineno - 1
        words = [lines[row].partition("  # ")[2]]
        while lines[row - 1].lstrip().startswith("#"):
            row -= 1
            words.insert(0, lines[row].lstrip(" #:"))
        comments[field.target.id] = " ".join(words).strip()
    return comments


def shown_help(recipe, monkeypatch, capsys):
    """The help of each argument, without its default."""
    monkeypatch.setitem(sys.modules, recipe.__name__, recipe)  # where its source is looked for
    monkeypatch.setattr(sys, "argv", ["recipe", "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        track.command_line(recipe.Args, description=recipe.__doc__)
    shown = {}
    column = 0
    for row in capsys.readouterr().out.splitlines():
        if "-h, --help" in row:
            column = row.index("show this help")
        elif column and row[0] in " │":  # a border, where the output is UTF-8
            if found := re.match(r". {1,2}--([\w-]+)", row):
                name = found[1].replace("-", "_")
                shown[name] = ""
            if row[column - 2 : column] == "  ":  # or the names of choices reach beyond
                shown[name] += row[column - 1 :].rstrip(" │")
    return {
        name: re.sub(r"\((default: [^)]*|required)\)$", "", text).strip()
        for name, text in shown.items()
    }


@pytest.mark.parametrize("name", RECIPES)
def test_help_has_the_comment_of_each_argument(root, tmp_path, name, monkeypatch, capsys):
    source = (root / "recipes" / f"{name}.py").read_text()
    comments = own_comments(source)

    assert all(comments.values())
    assert shown_help(load(root, name), monkeypatch, capsys) == comments

    silent = fields_of_args(source)[1::2]  # those before keep their comments
    kept = source.splitlines()
    for field in reversed(silent):
        row = field.lineno - 1
        kept[row] = kept[row].partition("  # ")[0]
        while kept[row - 1].lstrip().startswith("#"):
            row -= 1
            del kept[row]
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / f"{name}.py").write_text("\n".join(kept))

    assert shown_help(load(tmp_path, name), monkeypatch, capsys) == comments | {
        field.target.id: "" for field in silent
    }


@pytest.mark.parametrize(
    ("name", "given", "extras"),
    [
        *((name, {}, []) for name in ["async_grpo", "distill", "sft"]),
        *((name, {"engine": "vllm"}, ["vllm"]) for name in ["async_grpo", "distill"]),
        *((name, {"env": "e"}, ["verifiers"]) for name in ["async_grpo", "sft"]),
        ("distill", {"env": ("e", "f")}, ["verifiers"]),
        ("async_grpo", {"engine": "vllm", "engine_urls": ("http://a",)}, []),
        ("sft", {"lora_rank": 4, "data": ("a.parquet",)}, ["lora", "data"]),
        ("evaluate", {}, ["verifiers"]),
        ("evaluate", {"engine": "vllm"}, ["verifiers", "vllm"]),
        *((name, {"wandb": "p"}, ["wandb"]) for name in ["async_grpo", "distill", "sft"]),
        ("glm_swe", {"wandb": "p"}, ["verifiers", "wandb"]),
        ("glm_swe", {}, ["verifiers"]),
        ("glm_swe", {"engine": "vllm"}, ["verifiers", "vllm"]),
        ("glm_swe", {"engine": "vllm", "dry_run": True}, []),
    ],
)
def test_a_recipe_names_the_optional_dependencies_of_its_arguments(root, name, given, extras):
    recipe = load(root, name)

    assert recipe.extras(recipe.Args(**NEEDED[name] | given)) == extras
    assert set(extras) <= MODULES.keys()


def test_a_folder_with_parquet_files_needs_datasets(root, tmp_path):
    (tmp_path / "a.jsonl").touch()
    recipe = load(root, "sft")
    args = recipe.Args(model="m", data=(str(tmp_path),))
    assert recipe.extras(args) == []
    (tmp_path / "b.parquet").touch()
    assert recipe.extras(args) == ["data"]


@pytest.fixture(scope="module")
def demo_run(root, tmp_path_factory):
    """One run of the demo, by one process, that records its groups beside its folder."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    record = ["--record", folder.parent / "groups", "--run-dir", folder]
    return run(root / "recipes" / "demo.py", *DEMO, *record, cwd=folder.parent), folder


def test_the_demo_runs_and_reports(demo_run):
    done, folder = demo_run

    summary = check_run_folder(folder, steps=4)
    assert summary["mismatch_kl_mean"] < 1e-9
    report = done.stdout[done.stdout.rindex("evaluation") :]
    assert "->" in report
    assert "staleness 0" in report
    assert "mismatch_kl" in report
    assert str(folder) in report


@pytest.mark.thorough
def test_the_demo_replays_routes_and_says_what_that_changes(root, tmp_path):
    replay = ["--replay", "--engine-dtype", "bfloat16", "--warmup-steps", "0"]

    done = run(root / "recipes/demo.py", *SMALL, *replay, "--run-dir", tmp_path / "r", cwd=tmp_path)

    assert check_run_folder(tmp_path / "r")["mismatch_kl_own_routes_mean"] > 0
    assert re.search(r"^without replay +\d", done.stdout, re.MULTILINE)
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [one["routes_lost"] for one in metrics] == [0, 0]
    assert all(0 < one["routes_missing"] < 0.5 for one in metrics)  # last tokens have none


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def check_same_training(folder, reference):
    """The same loss at every step, and in the end the same weights, far from where they began."""
    from safetensors.torch import load_file

    assert losses(folder) == pytest.approx(losses(reference), abs=1e-6)
    assert max(map(abs, losses(reference))) > 1e-3
    ours, theirs = (load_file(path / "final" / "model.safetensors") for path in (folder, reference))
    assert max((ours[name] - theirs[name]).abs().max() for name in theirs) < 1e-5
    assert ours.keys() == theirs.keys()


@pytest.mark.thorough
def test_two_ranks_train_on_recorded_groups_as_one_process_did(root, demo_run, tmp_path):
    _, reference = demo_run

    replay = ["--groups", reference.parent / "groups", "--run-dir", tmp_path / "run"]
    torchrun(root / "recipes" / "demo.py", *DEMO, *replay, ranks=2, cwd=tmp_path)

    check_same_training(tmp_path / "run", reference)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["eval_before"] is None


@pytest.mark.thorough
def test_two_ranks_train_on_live_rollouts_of_the_weights_they_publish(root, tmp_path):
    groups, folder = tmp_path / "groups", tmp_path / "run"

    record = ["--record", groups, "--run-dir", folder]
    torchrun(root / "recipes" / "demo.py", *DEMO, *record, ranks=2, cwd=tmp_path)
    replay = ["--groups", groups, "--run-dir", tmp_path / "again"]
    run(root / "recipes" / "demo.py", *DEMO, *replay, cwd=tmp_path)

    assert check_run_folder(folder, steps=4)["mismatch_kl_mean"] < 1e-9
    check_same_training(tmp_path / "again", folder)


@pytest.mark.thorough
def test_without_a_learning_rate_the_weights_stay_bit_equal(root, tmp_path):
    """What is trained, published and saved is what the warm-up left."""
    from safetensors.torch import load_file

    demo = load(root, "demo")
    torch.set_num_threads(1)
    args = demo.Args(
        steps=2, warmup_steps=30, groups_per_step=2, group_size=4, lr=0.0, run_dir=str(tmp_path)
    )
    model, tokenizer = demo.build_policy(args.seed)
    tasks = [
        {"id": word, "prompt": f"{word}>", "answer": word[::-1]} for word in demo.testing.words()
    ]
    demo.random.Random(args.seed).shuffle(tasks)
    train = tasks[demo.HELD_OUT :]
    demo.warm_up(model, tokenizer, train, steps=args.warmup_steps, seed=args.seed)

    demo.main(args)

    saved = load_file(tmp_path / "final" / "model.safetensors")
    ours = model.state_dict()
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    assert saved
    assert set(loaded) == set(ours)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, ours[name]), name


def test_the_demos_reward_by_hand(root):
    reward = load(root, "demo").reward
    task = {"answer": "tac"}

    assert reward(task, "tac") == 1.0
    assert reward(task, "cat") == pytest.approx(0.5 / 3)
    assert reward(task, "tacs") == pytest.approx(0.5 * 3 / 4)
    assert reward(task, "") == 0.0


@pytest.mark.thorough
def test_sync_grpo_runs_on_a_real_model(root, smollm2_folder, tmp_path):
    arguments = ["--steps", 1, "--groups-per-step", 2, "--group-size", 4, "--eval-tasks", 2]
    arguments += ["--model", smollm2_folder, "--run-dir", tmp_path / "run"]
    run(root / "recipes" / "sync_grpo.py", *arguments, cwd=tmp_path)

    assert check_run_folder(tmp_path / "run", steps=1)["staleness_max"] == 0


@pytest.mark.thorough
def test_a_copy_of_async_grpo_runs_against_the_built_wheel(root, tiny_chat_model, tmp_path):
    wheels, site, elsewhere = (tmp_path / name for name in ("wheels", "site", "elsewhere"))
    elsewhere.mkdir()
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, root, cwd=tmp_path)
    (wheel,) = wheels.glob("primerl-*.whl")
    run("-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    (elsewhere / "mine.py").write_text((root / "recipes" / "async_grpo.py").read_text())
    env = {"PYTHONPATH": str(site)}

    used = run("-c", "import primerl; print(primerl.__file__)", cwd=elsewhere, env=env).stdout
    run(
        root / "tests/helpers/recipe_with_signal.py",
        "mine.py",
        *SMALL,
        "--model",
        tiny_chat_model,
        "--eval-tasks",
        "4",
        "--run-dir",
        "run",
        cwd=elsewhere,
        env=env,
    )

    assert used.startswith(str(site))
    assert (site / "primerl" / "py.typed").is_file()
    assert check_run_folder(elsewhere / "run")["staleness_max"] <= 2


@pytest.mark.thorough
def test_a_choice_that_there_is_not_is_refused_by_the_command_line(root, tmp_path):
    recipe = root / "recipes/async_grpo.py"

    done = run(recipe, "--model", "m", "--engine", "vlm", cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert "vlm" in done.stderr
    assert "transformers" in done.stderr


@pytest.mark.parametrize("name", ["async_grpo", "distill", "sync_grpo"])
def test_flags_can_be_read_at_a_glance(root, name):
    assert len(load(root, name).Args.__attrs_attrs__) <= 26


@pytest.mark.thorough
def test_minibatches_recomputation_and_no_evaluation(root, tiny_chat_model, tmp_path):
    arguments = ["--model", tiny_chat_model, "--steps", "2", "--groups-per-step", "2"]
    arguments += ["--group-size", "4", "--minibatches", "2", "--recompute", "--dtype", "bfloat16"]
    arguments += ["--eval-tasks", "0", "--run-dir", tmp_path / "run"]
    helper = root / "tests/helpers/recipe_with_signal.py"

    run(helper, root / "recipes/async_grpo.py", *arguments, cwd=tmp_path)

    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["eval_before"] is summary["eval_after"] is None
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert 1e-9 < first["mismatch_kl"] < 1e-2  # 16 bits


def test_the_grpo_recipes_reward_by_hand(root):
    reward = load(root, "async_grpo").reward
    task = {"answer": "57"}

    assert reward(task, "57") == reward(task, "57.") == 1.0
    assert reward(task, "It is 57.") == pytest.approx(1 / 3)
    assert reward(task, "75") == reward(task, "It is 570") == reward(task, "") == 0.0


def test_the_grpo_recipes_tasks_are_all_pairs_in_either_order(root):
    tasks = load(root, "sync_grpo").build_tasks(seed=0)
    pairs = [[int(word) for word in re.findall(r"\d+", task["prompt"])] for task in tasks]

    assert all(int(task["answer"]) == max(pair) for task, pair in zip(tasks, pairs, strict=True))
    assert len({frozenset(pair) for pair in pairs}) == len(tasks) == 90 * 89 / 2
    assert 0.4 < sum(first < second for first, second in pairs) / len(pairs) < 0.6


@pytest.mark.thorough
def test_a_mistake_is_one_clear_error_before_work_starts(root, smollm2_folder, tmp_path):
    recipe, model = root / "recipes" / "async_grpo.py", ["--model", smollm2_folder]
    messages = {
        ("--model", "/nowhere/model"): "--model: there is no model folder /nowhere/model",
        (*model, "--max-tokens", "100000"): "max_tokens=100000 leaves no room for a prompt",
        (*model, "--eval-tasks", "5000"): "--eval-tasks is 5000; expected less than 4005",
        (*model, "--resume", "mistyped"): "there is no folder mistyped to resume from",
    }

    all_done = run_together(*((recipe, *arguments) for arguments in messages), cwd=tmp_path)

    for done, (words, message) in zip(all_done, messages.items(), strict=True):
        of_flags = {"/nowhere/model", "mistyped"} & set(words)
        begins = {True: "async_grpo.py: ", False: "ValueError: "}[bool(of_flags)] + message
        assert done.returncode == (2 if of_flags else 1)
        assert done.stderr.splitlines()[-1].startswith(begins)
    assert not (tmp_path / "mistyped").exists()
    assert not list(tmp_path.glob("runs/*/*"))


def numbers(recipe):
    return [field for field in recipe.Args.__attrs_attrs__ if field.type in (int, float)]


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_is_checked_before_anything_starts(root, name):
    """Whatever numbers a recipe has: none is accepted that is negative, not finite or no number."""
    recipe = load(root, name)
    needed = NEEDED[name]

    assert len(numbers(recipe)) >= 5
    for field in numbers(recipe):
        flag = "--" + field.name.replace("_", "-")
        for wrong in (-1, -3, float("nan"), float("inf"), "2", True, None):
            with pytest.raises(ValueError, match=rf"{flag} is .*; expected an? \w+ (of at|above)"):
                recipe.Args(**needed, **{field.name: wrong})
        if field.type is int:
            with pytest.raises(ValueError, match=f"{flag} is 2.5; expected an integer"):
                recipe.Args(**needed, **{field.name: 2.5})


@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        *((name, "steps", 0) for name in TRAIN),
        *((name, "group_size", 1) for name in RL),
        *((name, "groups_per_step", 0) for name in [*RL, "distill"]),
        *((name, "seed", 2**32) for name in RECIPES),
        ("async_grpo", "eval_tasks", -1),
        ("async_grpo", "eval_every", -1),
        ("async_grpo", "minibatches", 0),
        ("async_grpo", "cp", 0),
    ],
)
def test_numbers_that_make_no_run_are_refused(root, name, field, wrong):
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} is {wrong}; expected"):
        load(root, name).Args(**NEEDED[name], **{field: wrong})


def test_a_wrong_number_is_an_error_of_the_command_line(root, tmp_path):
    demo = root / "recipes" / "demo.py"

    done = run(demo, "--steps", "-3", "--run-dir", tmp_path / "run", cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert "--steps is -3; expected an integer of at least 1" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_recording_is_a_new_file_in_a_folder_that_exists(root, tmp_path):
    demo = load(root, "demo")
    (tmp_path / "mine").write_text("kept")

    with pytest.raises(ValueError, match="--record is .*, which exists already"):
        demo.Args(record=str(tmp_path / "mine"))
    with pytest.raises(ValueError, match="expected a file in a folder that exists"):
        demo.Args(record=str(tmp_path / "nowhere" / "groups"))
    assert demo.Args(record=str(tmp_path / "groups")).record


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("async_grpo", "weights_folder"),
        ("distill", "weights_folder"),
        ("glm_swe", "shared_folder"),
    ],
)
def test_a_folder_for_weights_that_cannot_be_written_is_refused(root, name, field, tmp_path):
    recipe = load(root, name)
    needed = NEEDED[name] | {"model": str(tmp_path)} | {"ep": 1, "cp": 1}
    if name == "distill":
        needed["teacher"] = ("http://teacher:8000",)
    (tmp_path / "a-file").touch()
    (tmp_path / "config.json").touch()

    def check(folder):
        recipe.check(recipe.Args(**needed, **{field: str(folder)}))

    flag = f"--{field.replace('_', '-')} is {tmp_path}"
    with pytest.raises(
        ValueError, match=f"{flag}/no/weights, but {tmp_path}/no does not exist; pa"
    ):
        check(tmp_path / "no" / "weights")
    with pytest.raises(ValueError, match=f"but {tmp_path}/a-file is not a folder that may be writ"):
        check(tmp_path / "a-file" / "weights")
    with pytest.raises(ValueError, match=f"but {tmp_path}/a-file is not a folder that may be writ"):
        check(tmp_path / "a-file")
    check(tmp_path / "weights")
    check(tmp_path)
    assert not (tmp_path / "weights").exists()  # the run makes it


@pytest.mark.parametrize("name", ["async_grpo", "sync_grpo"])
def test_a_run_folder_and_another_to_resume_are_refused(root, name, tmp_path):
    args = load(root, name).Args

    with pytest.raises(ValueError, match="--resume is 'b', but --run-dir is 'a'"):
        args(model="m", run_dir="a", resume="b")
    assert args(model="m", run_dir="a", resume="./a").resume == "./a"


@pytest.mark.parametrize("name", ["async_grpo", "distill", "sync_grpo"])
def test_what_a_resumed_run_keeps_are_arguments(root, name):
    recipe = load(root, name)

    assert set(recipe.FIXED) <= {field.name for field in recipe.Args.__attrs_attrs__}
