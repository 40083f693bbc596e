"""On-policy distillation: what it learns, and what becomes of teachers that return nothing.

`pytest -m slow tests/recipes/test_distill.py` runs the tests that CI leaves out (two minutes).
"""

import importlib.util
import itertools
import json
import random
import string

import attrs
import numpy as np
import pytest
import torch
from forked_ranks import forked_ranks
from scripted_vllm import ScriptedVLLM

from primerl import models, testing, track

pytestmark = pytest.mark.thorough

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def load(root, name, edits=()):
    """A recipe as a module, with the edits that a reader might make."""
    source = (root / "recipes" / f"{name}.py").read_text()
    for before, after in edits:
        assert before in source
        source = source.replace(before, after)
    spec = importlib.util.spec_from_loader(name, loader=None)
    module = importlib.util.module_from_spec(spec)
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module


def swap_recipe(root, name, edits=()):
    """A recipe with the task of swapping two letters, and a reward for the right reply alone."""
    module = load(root, name, edits)

    def build_tasks(seed):
        pairs = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]
        random.Random(0).shuffle(pairs)
        return [{"prompt": f"{pair}>", "answer": pair[::-1]} for pair in pairs]

    module.build_tasks = build_tasks
    module.reward = lambda task, reply: float(reply == task["answer"])
    return module


@pytest.fixture(scope="module")
def folder(root, tmp_path_factory):
    """A teacher that swaps letters, a student that knows nothing, and one that began to learn."""
    folder = tmp_path_factory.mktemp("distill")
    tokenizer = testing.character_tokenizer(LETTERS + ">")
    shape = {"vocab_size": len(tokenizer), "hidden_size": 64, "head_dim": 16}
    tasks = swap_recipe(root, "distill").build_tasks(0)[64:]
    draw = random.Random(0)
    torch.set_num_threads(1)
    for name, seed, lessons in [("teacher", 0, 200), ("student", 1, 0), ("pupil", 1, 40)]:
        model = testing.tiny_model("llama", seed=seed, intermediate_size=128, **shape)
        drawn = (draw.sample(tasks, 64) for _ in range(lessons))
        steps = ([(task["prompt"], task["answer"]) for task in some] for some in drawn)
        testing.imitate(model, tokenizer, steps)
        models.save_pretrained(model, folder / name, tokenizer=tokenizer)
    return folder


def run(recipe, folder, run_dir, *, steps, **options):
    """Run a recipe on swapping letters, in this process; returns its metrics and summary."""
    settings = {"model": str(folder / "student"), "steps": steps, "groups_per_step": 64}
    settings |= {"group_size": 1, "max_tokens": 4, "eval_tasks": 64, "eval_every": 0}
    settings |= {"run_dir": str(run_dir), **options}
    if "dtype" in attrs.fields_dict(recipe.Args):
        settings["dtype"] = "float32"
    recipe.main(recipe.Args(**settings))
    return lines(run_dir), json.loads((run_dir / "summary.json").read_text())


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_student_reaches_its_teacher_where_rewards_alone_teach_nothing(root, folder, tmp_path):
    """The same model, tasks, steps and rollouts. The rewards are too rare to begin with."""
    options = {"steps": 48, "eval_every": 48, "lr": 2e-3}
    metrics, summary = run(
        swap_recipe(root, "distill"),
        folder,
        tmp_path / "distilled",
        teacher=(str(folder / "teacher"),),
        top_k=8,
        max_staleness=0,
        **options,
    )
    all_groups = [("keep=[filters.has_signal]", "keep=[]")]  # as many rollouts as the other has
    _, rewarded = run(
        swap_recipe(root, "sync_grpo", all_groups),
        folder,
        tmp_path / "rewarded",
        groups_per_step=16,
        group_size=4,
        **options,
    )

    assert summary["eval_before"] < 0.1  # its last rollouts may go on with later weights
    assert summary["eval_after"] > 0.8  # the teacher's is 1; 18 runs gave 0.97 or more
    assert rewarded["eval_after"] < 0.1
    kl = [line["tokens/ref_kl"] for line in metrics]
    assert kl[0] > 5
    assert np.mean(kl[-5:]) < 0.5 * kl[0]
    assert metrics[-1]["loss"] < 0.3 * metrics[0]["loss"]
    assert metrics[-1]["reward"] > metrics[0]["reward"]


@pytest.mark.slow
def test_judging_sampled_tokens_alone_the_kl_to_the_teacher_falls(root, folder, tmp_path):
    """From where the student samples some of what the teacher would."""
    options = {"teacher": (str(folder / "teacher"),), "model": str(folder / "pupil"), "lr": 1e-3}
    distill = swap_recipe(root, "distill")

    metrics, _ = run(
        distill, folder, tmp_path / "run", steps=24, groups_per_step=256, eval_tasks=0, **options
    )

    kl = [line["tokens/ref_kl"] for line in metrics]
    assert np.mean(kl[-4:]) < 0.7 * np.mean(kl[:4])
    assert np.mean([line["reward"] for line in metrics[-4:]]) > metrics[0]["reward"]
    assert max(line["staleness_max"] for line in metrics) <= 2
    assert all(line["teacher_missing"] == 0 for line in metrics)


# ---- what is logged, recomputed from the models and the recorded rollouts ----


def full_logprobs(path, token_ids):
    """Of every token of the vocabulary in each place but the first ``[t-1, v]``."""
    model, _ = models.load_pretrained(path)
    with torch.no_grad():
        return model(token_ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)


def check_first_step(run_dir, student, teacher_of, *, top_k):
    """Its KL and loss are those of the teacher that each environment has, by their own logits."""
    kl, losses = [], []
    for record in (one for one in track.read_rollouts(run_dir) if one["step"] == 0):
        ids = torch.from_numpy(record["arrays"]["token_ids"]).long()
        trained = torch.from_numpy(record["arrays"]["loss_mask"][1:])
        labels = ids[1:].unsqueeze(1)
        p = full_logprobs(student, ids)[trained]
        q = full_logprobs(teacher_of[record["environment"]], ids)[trained]
        lead = (p - q).gather(1, labels[trained]).squeeze(1)
        kl += lead.tolist()
        top, ids = q.topk(top_k or 1)
        p_top = p.gather(1, ids)
        q_rest, p_rest = (1 - x.exp().sum(1) for x in (top, p_top))
        forward = (top.exp() * (top - p_top)).sum(1) + q_rest * (q_rest / p_rest).log()
        losses += (forward if top_k else lead).tolist()
    first = lines(run_dir)[0]
    assert first["trained_tokens"] == len(kl) > 0
    assert first["tokens/ref_kl"] == pytest.approx(np.mean(kl), rel=1e-3, abs=1e-4)
    assert first["loss"] == pytest.approx(np.mean(losses), rel=1e-3, abs=1e-4)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """Models for environments of any text."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = testing.character_tokenizer(string.printable)
    tokenizer.chat_template = TEMPLATE
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    for seed, name in enumerate(["student", "words", "sums"]):
        model = testing.tiny_model("llama", seed=seed, initializer_range=0.2, **shape)
        models.save_pretrained(model, folder / name, tokenizer=tokenizer)
    return folder


SMALL = ["--groups-per-step", 6, "--eval-tasks", 2, "--eval-every", 0, "--dtype", "float32"]
SMALL += ["--lr", 1e-4, "--max-tokens", 6]


@pytest.mark.slow
def test_each_environment_has_its_teacher(root, chat_folder, tmp_path):
    words = ["--model", chat_folder / "student", *SMALL, "--steps", 2]
    words += ["--env", "reverse-words", "reasoning-gym:chain_sum"]
    words += ["--teacher", chat_folder / "words", chat_folder / "sums"]
    recipe, run_dir = root / "recipes/distill.py", tmp_path / "run"

    done = forked_ranks(recipe, *words, "--run-dir", run_dir, ranks=1, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    teacher_of = {
        "reverse-words": chat_folder / "words",
        "reasoning-gym:chain_sum": chat_folder / "sums",
    }
    check_first_step(run_dir, chat_folder / "student", teacher_of, top_k=0)
    # A step may have groups of one environment only: those that ended first.
    rewards = {name for line in lines(run_dir) for name in line if name.startswith("reward/")}
    assert rewards >= {"reward/reverse-words", "reward/reasoning-gym:chain_sum"}


@pytest.mark.parametrize("mesh", [(), ("--cp", 2)])
def test_ranks_score_and_train_the_top_tokens_together(root, chat_folder, tmp_path, mesh):
    words = ["--model", chat_folder / "student", *SMALL, "--steps", 2, "--save-every", 1, *mesh]
    words += ["--teacher", chat_folder / "words", "--top-k", 5]
    recipe, run_dir = root / "recipes/distill.py", tmp_path / "run"

    done = forked_ranks(recipe, *words, "--run-dir", run_dir, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_first_step(run_dir, chat_folder / "student", {"larger": chat_folder / "words"}, top_k=5)
    on_one = ["--resume", run_dir, "--steps", 3, "--cp", 1]
    resumed = forked_ranks(recipe, *on_one, ranks=1, cwd=tmp_path)

    assert resumed.returncode == 0, resumed.stderr
    assert [line["step"] for line in lines(run_dir)] == [0, 1, 2]
    assert 0 < lines(run_dir)[0]["tokens/ref_tail"] < 1
    assert (run_dir / "final" / "model.safetensors").is_file()


# ---- teachers that are not there, or return nothing ----


@pytest.fixture
def server(folder):
    """A stand-in for vLLM's server, of the student's tokenizer."""
    _, tokenizer = models.load_pretrained(folder / "student")
    with ScriptedVLLM(vocabulary=len(tokenizer)) as one:
        one.decode = tokenizer.decode
        yield one


GENERATE = "/inference/v1/generate"


@pytest.mark.parametrize("top_k", [0, 3])
def test_samples_without_scores_are_counted_and_not_trained(root, folder, server, tmp_path, top_k):
    server.faults[GENERATE] = [(400, "no such tokens")] * 3
    options = {"teacher": (server.url,), "eval_tasks": 0, "top_k": top_k}

    metrics, _ = run(
        swap_recipe(root, "distill"), folder, tmp_path, steps=2, groups_per_step=8, **options
    )

    assert [line["teacher_missing"] for line in metrics] == [3, 0]
    assert metrics[0]["teacher_missing/refused"] == 3
    first = [record for record in track.read_rollouts(tmp_path) if record["step"] == 0]
    assert len(first) == 8
    assert sum(record["trained"] == 0 for record in first) == 3
    assert metrics[0]["trained_tokens"] == sum(record["trained"] for record in first)
    check_scripted(metrics[0], first)


def check_scripted(line, records):
    """The KL of a step to the stand-in, which scores a token at minus an eighth of its id."""
    leads = []
    for record in records:
        arrays = record["arrays"]
        lead = arrays["logprobs"] + arrays["token_ids"] / 8
        leads += lead[arrays["loss_mask"]].tolist()
    assert line["tokens/ref_kl"] == pytest.approx(np.mean(leads), abs=1e-4)


def test_rank_0_asks_a_server_for_all_ranks(root, folder, server, tmp_path):
    words = ["--model", folder / "student", *SMALL, "--steps", 1, "--teacher", server.url]
    words += ["--top-k", 3, "--run-dir", tmp_path / "run"]

    done = forked_ranks(root / "recipes/distill.py", *words, ranks=2, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    records = list(track.read_rollouts(tmp_path / "run"))
    assert len(records) == 6
    check_scripted(lines(tmp_path / "run")[0], records)


def test_a_teacher_that_fails_stops_the_run_which_resumes_without_loss(
    root, folder, server, tmp_path
):
    options = {"teacher": (server.url,), "eval_tasks": 0, "groups_per_step": 8}
    recipe = swap_recipe(root, "distill")
    seen = []

    def until_the_third_step(body):
        return seen.append(body) or len(seen) > 16

    server.refuse = until_the_third_step
    with pytest.raises(RuntimeError, match=rf"{server.url} has no scores for 8 of 8 samples.*gone"):
        run(recipe, folder, tmp_path, steps=4, **options)

    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    server.refuse = lambda body: False
    metrics, summary = run(recipe, folder, tmp_path, steps=4, **options, resume=str(tmp_path))
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert summary["finished"]


def test_mistakes_are_errors_before_anything_is_sampled(
    root, folder, chat_folder, server, tmp_path
):
    impatient = [('run="teacher")', 'run="teacher", down_timeout_s=0.5)')]
    recipe = swap_recipe(root, "distill", impatient)
    server.decode = str
    with ScriptedVLLM() as stopped:
        pass
    for teachers, message in [
        (("/nowhere/teacher",), "there is no model folder /nowhere/teacher"),
        ((str(chat_folder / "words"),), "words has another tokenizer: its token"),
        ((server.url,), f"{server.url} has another tokenizer"),
        ((stopped.url,), f"{stopped.url} can't be reached"),
        (("a", "b"), "--teacher has 2 teachers for 1 environments"),
        ((), "--teacher has 0 teachers for 1 environments"),
    ]:
        with pytest.raises((ValueError, RuntimeError), match=message):
            run(recipe, folder, tmp_path / "run", steps=1, teacher=teachers)
    with pytest.raises(ValueError, match="--env has an environment twice"):
        run(recipe, folder, tmp_path / "run", steps=1, teacher=("a",), env=("x", "x"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
