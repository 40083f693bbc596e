"""The asynchronous recipe, told to stop and resumed: on two ranks, then on one."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from primerl import track

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def model(tiny_chat_model):
    return tiny_chat_model


def command(root, model, folder, *, steps, ranks, more=()):
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [*(launch if ranks > 1 else []), root / "tests/helpers/recipe_with_signal.py"]
    words += [root / "recipes" / "async_grpo.py", "--steps", steps]
    if folder.exists():
        words += ["--resume", folder, *more]  # the other arguments are the run's
    else:
        words += ["--model", model, "--groups-per-step", 2, "--group-size", 4, "--eval-tasks", 4]
        words += ["--lr", 1e-3, "--save-every", 1000, "--run-dir", folder, *more]
    return [sys.executable, *map(str, words)]


def steps_logged(folder):
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line[-1] == "\n"]


def stop(arguments, folder, *, after, how):
    """Run until ``after`` steps are logged, send a signal, and return the exit code and output.

    SIGINT goes to the process group, as a terminal sends it.
    """
    with (folder.parent / "output").open("w+") as output:
        process = subprocess.Popen(
            arguments, stdout=output, stderr=output, cwd=folder.parent, start_new_session=True
        )
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while len(steps_logged(folder)) < after:
                assert process.poll() is None, output.seek(0) or output.read()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            send = os.killpg if how == signal.SIGINT else os.kill
            send(process.pid, how)
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        output.seek(0)
        return code, output.read()


@pytest.fixture(scope="module")
def told(root, model, tmp_path_factory):
    """What a run left at each stop: SIGTERM to torchrun of two ranks, SIGUSR1 to one process."""
    folder, found = tmp_path_factory.mktemp("runs") / "run", []
    for ranks, more, how in [(2, 3, signal.SIGTERM), (1, 2, signal.SIGUSR1)]:
        arguments = command(root, model, folder, steps=10_000, ranks=ranks)
        code, output = stop(arguments, folder, after=len(steps_logged(folder)) + more, how=how)
        found.append(
            {
                "code": code,
                "output": output,
                "steps": steps_logged(folder),
                "summary": json.loads((folder / "summary.json").read_text()),
                "checkpoints": sorted(p.name for p in (folder / "checkpoints").iterdir()),
            }
        )
    last = len(found[-1]["steps"])
    subprocess.run(
        command(root, model, folder, steps=last + 2, ranks=1),
        check=True,
        timeout=TIMEOUT_S,
        capture_output=True,
        cwd=folder.parent,
    )
    return folder, found


@pytest.mark.thorough
def test_a_run_that_is_told_to_stop_saves_after_its_step(told):
    _, (two, one) = told

    for left in (two, one):
        taken = len(left["steps"])
        assert left["steps"] == list(range(taken)), left["output"]
        assert left["summary"]["error"].startswith(f"Stopped: told to stop after step {taken}")
        assert left["checkpoints"][-1] == f"step-{taken:08d}"
        assert left["summary"]["steps"] == taken
    assert two["code"] != 0  # torchrun's own
    assert "stopped: " not in two["output"]  # no rank failed because of another
    assert one["code"] == 143
    for left in (two, one):
        taken = len(left["steps"])
        assert f"stopped; step {taken} is saved. To continue: --resume run\n" in left["output"]


@pytest.mark.thorough
def test_a_run_that_is_resumed_goes_on_at_the_same_step_with_the_same_worker(told):
    folder, (two, one) = told

    assert len(one["steps"]) >= len(two["steps"]) + 2
    steps = steps_logged(folder)
    assert steps == list(range(len(one["steps"]) + 2))
    lines = list(track.read_rollouts(folder))
    trained = {(line["step"], line["task_id"]) for line in lines}
    assert {step for step, _ in trained} == set(steps)
    assert len({task for _, task in trained}) == len(trained)  # a new worker would begin again
    staleness = {
        line["step"] - version
        for line in lines
        for version in line["arrays"]["versions"][line["arrays"]["loss_mask"]]
    }
    assert min(staleness) >= 0
    assert max(staleness) <= 2


@pytest.mark.thorough
def test_the_summary_is_of_the_whole_run(told):
    folder, (two, one) = told
    summary = json.loads((folder / "summary.json").read_text())

    assert summary["steps"] == len(one["steps"]) + 2
    assert summary["wall_s"] > one["summary"]["wall_s"] > two["summary"]["wall_s"]
    assert summary["eval_before"] == two["summary"]["eval_before"]
    assert summary["eval_after"] is not None
    assert "error" not in summary
    assert summary["finished"]
    assert (folder / "final" / "model.safetensors").is_file()


@pytest.mark.thorough
def test_ctrl_c_saves_the_step_and_ends_with_one_line(root, model, tmp_path):
    folder = tmp_path / "run"
    arguments = command(root, model, folder, steps=10_000, ranks=1, more=("--eval-every", 0))
    code, output = stop(arguments, folder, after=2, how=signal.SIGINT)

    taken = len(steps_logged(folder))
    assert code == 143
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last == f"stopped; step {taken} is saved. To continue: --resume run"
    assert (folder / "checkpoints" / f"step-{taken:08d}").is_dir()
    # The worker's own process ended in peace: no group was lost.
    assert "KeyboardInterrupt" not in output


def test_ctrl_c_while_torch_is_imported_is_one_line(root, tmp_path):
    words = [sys.executable, root / "recipes" / "sync_grpo.py", "--model", "m"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "importing torch\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()

    assert errors == "stopped by Ctrl-C; to start again, run the same command\n"
    assert process.returncode == 130


@pytest.mark.thorough
def test_ctrl_c_ends_the_demo_with_one_line(root, tmp_path):
    folder = tmp_path / "run"
    words = [sys.executable, root / "recipes" / "demo.py", "--warmup-steps", 1, "--steps", 1000]
    words += ["--groups-per-step", 2, "--group-size", 4, "--run-dir", folder]
    code, output = stop([str(word) for word in words], folder, after=1, how=signal.SIGINT)

    assert code == 130
    again = f"to start again, pass another folder than {folder}"
    assert output.splitlines()[-1] == f"stopped by Ctrl-C; {again}"
    assert "Traceback" not in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["error"] == "KeyboardInterrupt: this process was told to stop (SIGINT)"


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.fixture
def resume(root, model, told, monkeypatch):
    """Resume the finished run in this process, as ``command`` does; expect an error.

    Returns what it says, once nothing in the folder has changed.
    """
    spec = importlib.util.spec_from_file_location("recipe", root / "recipes" / "async_grpo.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    # a run is of the script that began it
    monkeypatch.setattr("sys.argv", ["recipe_with_signal.py"])
    folder, _ = told
    usual = {"model": str(model), "groups_per_step": 2, "group_size": 4, "eval_tasks": 4}
    usual |= {"lr": 1e-3, "steps": 10_000, "resume": str(folder)}

    def refused(**changes):
        before = contents(folder)
        with pytest.raises(ValueError) as error:  # noqa: PT011
            recipe.main(recipe.Args(**usual | changes))
        assert contents(folder) == before
        return str(error.value)

    return refused


@pytest.mark.thorough
def test_a_finished_run_is_not_trained_again(told, resume):
    folder, _ = told
    taken = len(steps_logged(folder))

    assert resume(steps=taken).startswith(
        f"{folder} is finished: it took its {taken} steps, and {taken} are planned. To train it "
        "further, resume it with more steps"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "now", "begun"),
    [
        ("seed", 3, 0),
        ("lr", 1e-4, 1e-3),
        ("eval_tasks", 5, 4),
        ("group_size", 8, 4),
        ("groups_per_step", 3, 2),
    ],
)
def test_a_resumed_run_keeps_its_tasks_and_what_its_checkpoint_decides(resume, name, now, begun):
    said = resume(**{name: now})

    assert f"was started with {name}={begun}, and is resumed with {name}={now}" in said


@pytest.mark.thorough
def test_another_script_s_run_is_not_resumed(resume, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sync_grpo.py"])

    assert "is a run of the script recipe_with_signal, but this script is sync_grpo" in resume()


@pytest.mark.thorough
def test_a_folder_with_another_s_metrics_is_not_resumed(resume, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "accuracy": 0.9}\n')

    assert "has no checkpoint to resume from" in resume(resume=str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "accuracy": 0.9}\n'


@pytest.mark.thorough
def test_a_run_is_not_begun_in_the_folder_of_another(told, resume):
    folder, _ = told

    assert "holds a run already" in resume(resume=None, run_dir=str(folder))


@pytest.mark.thorough
def test_told_to_stop_before_the_first_step_it_leaves_a_summary(root, model, tmp_path):
    """In the background, where a shell lets it ignore Ctrl-C."""
    folder = tmp_path / "run"
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    arguments = background + command(root, model, folder, steps=10, ranks=1)
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output, cwd=tmp_path)
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while not (folder / "checkpoints").exists():  # before it evaluates
                assert process.poll() is None, output.seek(0) or output.read()
                assert time.monotonic() < deadline
                time.sleep(0.002)
            process.send_signal(signal.SIGTERM)
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        output.seek(0)
        said = output.read()

    assert code == 143
    assert "Traceback" not in said
    again = f"to start again, pass another folder than {folder}"
    assert said.splitlines()[-1] == f"stopped by SIGTERM; {again}"
    assert f"to stop: kill {process.pid}\n" in said
    summary = json.loads((folder / "summary.json").read_text())
    assert "this process was told to stop (SIGTERM)" in summary["error"]
    assert not summary["finished"]
