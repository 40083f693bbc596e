"""The flagship recipe at the scale of a laptop.

`pytest -m slow tests/recipes/test_glm_swe.py` plays its environment in Ray actors (two minutes).
"""

import collections
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from bugfix import rehearsal
from conftest import make_sample
from descendants import descendants
from forked_ranks import forked_ranks
from glm_swe_trainer import load, step
from safetensors.torch import load_file
from sandboxed import needed
from waiting import until

from primerl import models, parallel, replay, testing, track
from primerl.types import Outcome, Rollout

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def recipe(root):
    return load(root / "recipes" / "glm_swe.py")


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm4_moe"])
def test_its_trainer_on_two_ranks_makes_the_step_of_one_process(root, recipe, tmp_path, family):
    folder = testing.tiny_chat_model(tmp_path / "model", family, max_position_embeddings=512)
    program = root / "tests/ranks/glm_swe_trainer.py"
    script = root / "recipes" / "glm_swe.py"

    done = forked_ranks(program, script, folder, tmp_path, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    with parallel.process_group() as world:
        loss, norm, weights = step(recipe, folder, world)

    found = json.loads((tmp_path / "found.json").read_text())
    assert abs(loss) > 1e-4
    assert found["loss"] == pytest.approx(loss, rel=1e-2)
    assert found["norm"] == pytest.approx(norm, rel=2e-2)
    theirs = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert theirs.keys() == weights.keys()


def test_routes_of_an_evaluation_are_discarded_once_it_is_logged(recipe, tmp_path):
    shape = replay.RouteShape(layers=(1, 2), decoder_layers=3, experts=256, k=8)
    rows = np.random.default_rng(0).permuted(np.tile(np.arange(256), (2000, 2, 1)), axis=-1)
    with replay.Store(shape) as store, track.Run(tmp_path) as run:
        (route,) = store.put(
            rows[..., :8].astype(np.uint8), start=0, versions=np.zeros(2000, np.int32)
        )
        played = Rollout(samples=[make_sample(routes=[route])], reward=1.0)
        outcomes = [
            Outcome(task={"id": "a"}, index=0, seconds=1.0, rollout=played),
            Outcome(task={"id": "b"}, index=0, seconds=1.0, error="E", message="m"),
        ]
        replay.read(route)
        recipe.log_evaluation(run, SimpleNamespace(version=3, outcomes=lambda: outcomes))
        with pytest.raises(FileNotFoundError, match="these routes were discarded"):
            replay.read(route)

    (line,) = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert (json.loads(line)["step"], json.loads(line)["evaluation"]) == (3, 0.5)


@pytest.mark.parametrize("changed", [{"nodes": ()}, {"nodes": (1, 0)}, {"server_gpus": (0,)}])
def test_numbers_of_nodes_and_gpus_are_at_least_one(recipe, changed):
    with pytest.raises(ValueError, match=r"--(nodes|server-gpus) is .*; expected one or more"):
        recipe.Args(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": "laptop", "model": None, "dry_run": True}, "--scale laptop has no default"),
        ({"model": "runs/models/none"}, "--model: there is no model folder runs/models/none"),
        ({"config": "glm6", "dry_run": True}, "--config is 'glm6'; expected one of .*glm5"),
        ({}, "--ep is 2 and --cp 2, on 1 ranks"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(recipe, changed, message):
    with pytest.raises(ValueError, match=message):
        recipe.check(recipe.Args(**changed))


def test_rehearsals_train_on_the_cpu_and_real_runs_on_gpus(recipe):
    found = {name: args.device for name, args in recipe.SCALES.items()}
    assert {found.pop("debug"), found.pop("fleet")} == {"cpu"}
    assert set(found.values()) == {"auto"}


def test_as_many_rollouts_are_in_flight_as_servers_sample_at_once(recipe):
    urls = ("http://a:8000", "http://b:8000")
    glm5 = attrs.evolve(recipe.SCALES["glm5"], engine_urls=urls)
    assert recipe.concurrency(glm5).cap == 2 * 32 * 6
    assert recipe.concurrency(recipe.SCALES["8xh200"]).cap == 4 * 64
    assert recipe.concurrency(recipe.SCALES["debug"]) is None
    many = attrs.evolve(glm5, max_num_seqs=256)
    assert recipe.concurrency(many).cap == recipe.concurrency(many).most == 16384


@pytest.mark.parametrize(
    ("urls", "towards"),
    [(("http://server-3:8000", "http://server-4:8000"), "server-3"), ((), "trainer-0")],
)
def test_on_several_hosts_servers_read_weights_from_the_trainers_memory(
    recipe, monkeypatch, urls, towards
):
    given = {}
    monkeypatch.setattr(recipe.weights, "transport_to", lambda *_, **named: given.update(named))
    monkeypatch.setenv("MASTER_ADDR", "trainer-0")
    args = attrs.evolve(recipe.SCALES["fleet"], shared_folder="/shared", engine_urls=urls)
    recipe.open_transport(args, None, None, None)
    assert [given["folder"], given["towards"]] == ["/shared", towards]
    recipe.open_transport(attrs.evolve(args, shared_folder=None), None, None, None)
    assert [given["folder"], given["towards"]] == [None, None]


def test_ranks_on_several_hosts_need_a_shared_folder(recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--shared-folder is not given, but 2 of 4 ranks are on"):
        recipe.check(recipe.Args())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    recipe.check(recipe.Args())


def test_the_taught_model_is_planned_without_being_taught(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = recipe.empty_model(recipe.Args())
    assert model.get_input_embeddings().weight.shape[0] == rehearsal.VOCABULARY
    assert recipe.extras(recipe.Args(dry_run=True)) == []
    assert all(tensor.is_meta for tensor in model.parameters())
    tiny = recipe.empty_model(recipe.Args(model="tiny:glm4_moe"))
    assert not [*tmp_path.iterdir()]

    folder = recipe.model_folder(recipe.Args(model="tiny:glm4_moe"))
    shapes = [
        {name: tensor.shape for name, tensor in one.state_dict().items()}
        for one in (models.empty_model(folder), tiny)
    ]
    assert shapes[0] == shapes[1]


def test_a_format_that_the_model_cannot_have_is_one_line_of_a_dry_run(recipe):
    with pytest.raises(
        SystemExit, match=r"^glm_swe.py: model.layers.1.mlp.experts .* a block of 7"
    ):
        recipe.main(recipe.Args(fp8_block=7, dry_run=True))


def test_under_torchrun_one_rank_prints_one_line_of_a_wrong_flag_and_one_help(root, tmp_path):
    process = start(root, tmp_path / "wrong", "--step", 3)
    assert process.wait(200) == 1  # torchrun's own
    said = tmp_path.joinpath("wrong.output").read_text()
    assert said.count("Unrecognized options: --step, 3") == 1
    codes = set(re.findall(r"exitcode  : (-?\d+)", said))
    assert "2" in codes
    assert codes <= {"2", "143", "-15"}  # torchrun may end the other rank first

    process = start(root, tmp_path / "help", "--help")
    assert process.wait(200) == 0
    assert tmp_path.joinpath("help.output").read_text().count("usage:") == 1


def test_a_server_of_another_checkpoint_than_the_trainers_is_refused(recipe, tmp_path):
    folder = testing.tiny_chat_model(tmp_path / "model", "glm4_moe")
    engine = recipe.open_engine(recipe.SCALES["glm5"], str(folder))
    with pytest.raises(ValueError, match="pass --server-model, the FP8 checkpoint"), engine:
        pass


def start(root, folder, *arguments):
    """The rehearsal on two ranks, in the background; its output is in ``folder.output``."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += [root / "recipes" / "glm_swe.py", *arguments]
    output = folder.with_suffix(".output").open("a")
    with output:
        return subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=folder.parent, stdout=output, stderr=output
        )


def steps_logged(folder):
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return text.count("\n")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder in which rehearsals are started; the first one teaches the policy of all."""
    return tmp_path_factory.mktemp("home")


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def recorded(folder):
    # Of bytes: a str has lines that end in U+0085, which a policy may say.
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]


def rewards_of_groups(folder):
    rewards = collections.defaultdict(list)
    for record in recorded(folder):
        rewards[record["step"], record["task_id"]].append(record["reward"])
    return rewards


def test_the_rehearsal_trains(root, home):
    """With ``--max-staleness 0``, all tokens are sampled from the weights of their step.

    An engine that claimed each version but kept the first weights had a mismatch_kl of 9e-6 and
    1e-4 in the second and third step.
    """
    needed()
    folder = home / "trains"
    process = start(root, folder, "--steps", 3, "--max-staleness", 0, "--run-dir", folder)
    try:
        assert process.wait(400) == 0, folder.with_suffix(".output").read_text()[-5000:]
    finally:
        process.kill()

    lines = logged(folder)
    assert len(lines) == 3
    for line in lines:
        assert line["reward_std"] > 0.1
        assert abs(line["loss"]) > 1e-3
        assert line["grad_norm"] > 1e-3
        assert line["skipped_updates"] == 0
        assert line["rollout/turns"] > 1  # some called a tool
        assert 0 <= line["mismatch_kl"] < 1e-6
    for rewards in rewards_of_groups(folder).values():
        assert set(rewards) == {0.0, 1.0}
    before = load_file(home / "runs/models/taught-glm4_moe-0/model.safetensors")
    after = load_file(folder / "final/model.safetensors")
    assert before["model.embed_tokens.weight"].shape[0] == rehearsal.VOCABULARY  # as planned
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    # The optimizer leaves out the router's bias, which has no gradient.
    assert all("e_score_correction_bias" in name for name in same)


@pytest.mark.slow
def test_the_rehearsal_plays_its_environment_in_ray_actors(root, home):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    needed()
    folder = home / "on-ray"
    process = start(
        root, folder, "--ray", "local", "--steps", 1, "--eval-tasks", 0, "--run-dir", folder
    )
    try:
        assert process.wait(400) == 0, folder.with_suffix(".output").read_text()[-5000:]
    finally:
        process.kill()

    (line,) = logged(folder)
    assert line["rollout/turns"] > 1
    assert abs(line["loss"]) > 1e-3
    assert {record["reward"] for record in recorded(folder)} == {0.0, 1.0}


def test_the_rehearsal_survives_its_sandboxes_and_is_resumed_when_a_rank_dies(root, home):
    needed()
    folder = home / "run"
    output = folder.with_suffix(".output")
    few = ["--eval-every", 0, "--save-every", 1, "--run-dir", folder]
    process = start(root, folder, "--scale", "debug", "--steps", 40, *few)
    try:

        def took(steps):
            assert process.poll() is None, output.read_text()[-5000:]
            return steps_logged(folder) >= steps

        until(lambda: took(1), within_s=400)
        pools = [
            one for one, words in descendants(process.pid).items() if "primerl.sandbox" in words
        ]
        assert pools
        for one in pools:
            with contextlib.suppress(ProcessLookupError):  # sandboxes come and go
                os.kill(one, signal.SIGKILL)
        before = steps_logged(folder)
        until(lambda: took(before + 3), within_s=400)  # new sandboxes

        ranks = [
            one
            for one, words in descendants(process.pid).items()
            if "glm_swe.py" in words and "torch.distributed" not in words
        ]
        os.kill(max(ranks), signal.SIGKILL)
        assert process.wait(200) != 0
    finally:
        process.terminate()
        process.wait(60)
    assert "SIGKILL" in output.read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert not summary["finished"]

    done = steps_logged(folder)
    process = start(root, folder, "--resume", folder, "--steps", done + 2)
    try:
        assert process.wait(400) == 0, output.read_text()[-5000:]
    finally:
        process.kill()
    check_rehearsal(folder, output.read_text(), steps=done + 2)


def check_rehearsal(folder, said, *, steps):
    assert "engine" in said.split("at glm5")[1].split("loading")[0]
    lines = logged(folder)
    assert [line["step"] for line in lines] == list(range(steps))
    assert lines[0]["routes_lost"] == 0  # those of a run that was killed end with it
    for line in lines:
        assert (line["mismatch_kl"] or 0.0) < 1e-6  # None: no token is of the step's version
        assert line["staleness_max"] <= 2
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"]
    assert (folder / "report.html").is_file()
    assert (folder / "final" / "config.json").is_file()
    assert {record["reward"] for record in recorded(folder)} == {0.0, 1.0}
