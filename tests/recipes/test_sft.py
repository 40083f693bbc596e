"""Supervised fine-tuning against a plain loop, and resumed against uninterrupted."""

import importlib.util
import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from forked_ranks import forked_ranks

from primerl import checkpoint, data, models, rollout, testing
from primerl.types import SamplingParams

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
FAMILIES = ("llama", "qwen3_moe")
MESHES = {"one": (1, 1, 1), "two": (2, 1, 1), "ep": (2, 2, 1), "cp": (2, 1, 2)}  # ranks, ep, cp
STEPS = 3
BATCH = 8
LR = 2e-5  # AdamW makes the rounding of a gradient near 0 a share of a step


def write_conversations(path, count, *, seed):
    generator = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            messages = [{"role": "system", "content": "reverse"}] * generator.randint(0, 1)
            for _ in range(generator.randint(1, 3)):
                letters = "".join(generator.choices("abcdefgh", k=generator.randint(2, 9)))
                messages.append({"role": "user", "content": letters})
                messages.append({"role": "assistant", "content": letters[::-1]})
            file.write(json.dumps({"messages": messages}) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and files of conversations."""
    folder = tmp_path_factory.mktemp("sft")
    tokenizer = testing.character_tokenizer("system user assistant:\nabcdefghijklmnopqrstuvwxyz")
    tokenizer.chat_template = TEMPLATE
    for family in FAMILIES:
        config = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
        model = testing.tiny_model(family, **config)
        models.save_pretrained(model, folder / family, tokenizer=tokenizer)
    write_conversations(folder / "train.jsonl", 40, seed=0)
    write_conversations(folder / "eval.jsonl", 7, seed=1)
    return folder


def flags(folder, family, *, steps=STEPS, lr=LR, warmup=0):
    """The recipe's, but for what a test varies."""
    words = ["--model", folder / family, "--steps", steps, "--batch-size", BATCH]
    words += ["--data", folder / "train.jsonl", "--eval-data", folder / "eval.jsonl"]
    words += ["--max-tokens", 128, "--pack-tokens", 256]
    return [*words, "--lr", lr, "--warmup", warmup, "--dtype", "float32"]


def check_ended(done):
    assert done.returncode == 0, done.stderr


def plain_loop(folder, family):
    """Losses and weights of the textbook loop: padded, unpacked, with transformers' own loss."""
    model, tokenizer = models.load_pretrained(folder / family)
    stream = rollout.Shuffled(data.Conversations(folder / "train.jsonl"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        texts, spans = [], []
        for _ in range(BATCH):
            text, replies = "", []
            for message in stream.draw()["messages"]:
                text += message["role"] + ":"
                start = len(text)
                text += message["content"]
                if message["role"] == "assistant":
                    replies.append((start, len(text) + 1))  # with the token that stops it
                    text += "\0"
                text += "\n"
            texts.append(text[:-1])
            spans.append(replies)
        longest = max(map(len, texts))
        token_ids = torch.zeros(BATCH, longest, dtype=torch.long)
        labels = torch.full((BATCH, longest), -100)
        for row, (text, replies) in enumerate(zip(texts, spans, strict=True)):
            codes = [
                tokenizer.eos_token_id if letter == "\0" else tokenizer.encode(letter)[0]
                for letter in text
            ]
            token_ids[row, : len(codes)] = torch.tensor(codes)
            for start, end in replies:
                labels[row, start:end] = token_ids[row, start:end]
        lengths = torch.tensor([len(text) for text in texts])
        attention_mask = (torch.arange(longest) < lengths[:, None]).long()
        loss = model(input_ids=token_ids, attention_mask=attention_mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 + torch.cos(torch.tensor(torch.pi * step / STEPS)).item()) / 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.fixture(scope="module")
def plain(folder):
    return {family: plain_loop(folder, family) for family in FAMILIES}


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "mesh"),
    [(family, mesh) for family in FAMILIES for mesh in MESHES if (family, mesh) != ("llama", "ep")],
)
def test_three_steps_are_those_of_a_plain_loop(root, folder, plain, tmp_path, family, mesh):
    ranks, ep, cp = MESHES[mesh]
    words = [*flags(folder, family), "--ep", ep, "--cp", cp, "--run-dir", tmp_path / "run"]
    check_ended(forked_ranks(root / "recipes/sft.py", *words, ranks=ranks, cwd=tmp_path))

    losses, weights = plain[family]
    assert [line["loss"] for line in lines(tmp_path / "run")] == pytest.approx(losses, abs=1e-6)
    before = models.load_pretrained(folder / family)[0].state_dict()
    after = models.load_pretrained(tmp_path / "run" / "final")[0].state_dict()
    for name, value in after.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
        moved = (weights[name] - before[name]).norm()
        assert moved > 0
        assert (value - weights[name]).norm() < 1e-3 * moved, name


@pytest.mark.thorough
def test_the_evaluation_is_the_loss_of_the_held_out_conversations(root, folder, tmp_path):
    words = [*flags(folder, "llama", steps=2), "--eval-every", 1, "--run-dir", tmp_path / "run"]
    done = forked_ranks(root / "recipes/sft.py", *words, ranks=2, cwd=tmp_path)
    check_ended(done)

    def mean_loss(path):
        model, tokenizer = models.load_pretrained(path)
        losses = []
        for conversation in data.Conversations(folder / "eval.jsonl"):
            sample = data.training_sample(conversation, tokenizer, max_tokens=128)
            token_ids = torch.tensor(sample.token_ids).long()
            with torch.no_grad():
                logprobs = model(token_ids[None]).logits[0].log_softmax(-1)
            own = logprobs[:-1].gather(1, token_ids[1:, None])[:, 0]
            losses.append(-own[torch.tensor(sample.loss_mask[1:])])
        return torch.cat(losses).mean().item()

    first, second = (line["evaluation_loss"] for line in lines(tmp_path / "run"))
    assert first == pytest.approx(mean_loss(folder / "llama"), abs=1e-5)
    assert second < first
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    expected = mean_loss(tmp_path / "run" / "final")
    assert summary["evaluation_loss"] == pytest.approx(expected, abs=1e-5)
    assert summary["evaluation_loss"] < second
    assert f"held-out conversations: {expected:.4f}" in done.stderr  # which holds both streams


@pytest.fixture(scope="module")
def uninterrupted(root, folder):
    """The batches, losses and weights of nine steps."""
    record, run = folder / "uninterrupted.jsonl", folder / "uninterrupted"
    words = [root / "recipes/sft.py", record, 0, *flags(folder, "llama", steps=9)]
    program = root / "tests/helpers/recorded_sft.py"
    check_ended(forked_ranks(program, *words, "--run-dir", run, ranks=1, cwd=folder))
    return run, record.read_text().splitlines()


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 2)])
def test_killed_and_resumed_it_draws_the_same_batches(
    root, folder, uninterrupted, tmp_path, before, after
):
    whole, batches = uninterrupted
    program, run = root / "tests/helpers/recorded_sft.py", tmp_path / "run"
    words = [root / "recipes/sft.py", tmp_path / "killed.jsonl", 6]
    words += [*flags(folder, "llama", steps=9), "--save-every", 2, "--run-dir", run]
    done = forked_ranks(program, *words, ranks=before, cwd=tmp_path)
    assert done.returncode != 0
    assert len(lines(run)) == 5
    assert (tmp_path / "killed.jsonl").read_text().splitlines() == batches[:6]
    start = checkpoint.last_good(run).step
    assert start in (2, 4)  # the save of step 4 may have been under way

    words = [root / "recipes/sft.py", tmp_path / "resumed.jsonl", 0, "--resume", run]
    check_ended(forked_ranks(program, *words, ranks=after, cwd=tmp_path))
    resumed = (tmp_path / "resumed.jsonl").read_text().splitlines()
    assert len(resumed) >= 5
    assert resumed == batches[start:]
    losses = [line["loss"] for line in lines(run)]
    assert losses == pytest.approx([line["loss"] for line in lines(whole)], abs=1e-5)


def test_a_finished_run_is_extended_to_what_a_longer_one_is(root, folder, tmp_path):
    recipe = root / "recipes/sft.py"
    whole, run = tmp_path / "whole", tmp_path / "run"
    for steps, kept in ((4, whole), (2, run)):
        words = flags(folder, "llama", steps=steps, warmup=100)  # the same rates, however long
        check_ended(forked_ranks(recipe, *words, "--run-dir", kept, ranks=1, cwd=tmp_path))
    refused = forked_ranks(recipe, "--resume", run, ranks=1, cwd=tmp_path)
    words = ["--resume", run, "--steps", 4]
    check_ended(forked_ranks(recipe, *words, ranks=1, cwd=tmp_path))

    assert refused.returncode != 0
    assert "run is finished: it took its 2 steps, and 2 are planned" in refused.stderr
    assert "--steps 4" in refused.stderr
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(whole)]
    expected = models.load_pretrained(whole / "final")[0].state_dict()
    for name, value in models.load_pretrained(run / "final")[0].state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert checkpoint.last_good(run).step == 4


@pytest.fixture(scope="module")
def stopped(root, folder):
    """A run of two files that took two steps, and a function that resumes it with other flags."""
    train = folder / "before"
    train.mkdir()
    for name, seed in (("a", 2), ("b", 3)):
        write_conversations(train / f"{name}.jsonl", 20, seed=seed)
    run = folder / "stopped"
    words = ["--model", folder / "llama", "--data", train / "a.jsonl", train / "b.jsonl"]
    words += ["--steps", 2, "--batch-size", 4, "--max-tokens", 128, "--dtype", "float32"]
    recipe = root / "recipes/sft.py"
    check_ended(forked_ranks(recipe, *words, "--run-dir", run, ranks=1, cwd=folder))

    def resume(*words):
        return forked_ranks(recipe, "--resume", run, "--steps", 3, *words, ranks=1, cwd=folder)

    return run, resume


def test_a_run_is_not_resumed_with_other_data_or_shares(folder, stopped):
    run, resume = stopped
    begun = lines(run)
    changed = resume("--shares", 3, 1)
    assert changed.returncode != 0
    assert "was started with shares=[], and is resumed with shares=[3.0, 1.0]" in changed.stderr

    edited = folder / "edited"
    shutil.copytree(folder / "before", edited)
    text = (edited / "b.jsonl").read_text()
    (edited / "b.jsonl").write_text(text.replace("reverse", "esrever", 1))
    changed = resume("--data", edited)
    assert changed.returncode != 0
    assert "b.jsonl has changed. Resume with the same tasks, or begin a new run" in changed.stderr
    changed = resume("--data", edited / "a.jsonl")
    assert "b.jsonl is missing" in changed.stderr
    assert lines(run) == begun


def test_a_run_is_resumed_with_the_same_files_in_another_folder(folder, stopped):
    run, resume = stopped
    shutil.move(folder / "before", folder / "moved")
    check_ended(resume("--data", folder / "moved"))
    assert len(lines(run)) == 3
    assert json.loads((run / "args.json").read_text())["data"] == [str(folder / "moved")]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.thorough)])
def test_adapters_alone_are_trained_and_saved_in_the_weights(root, folder, tmp_path, family):
    run = tmp_path / "run"
    words = [*flags(folder, family, lr=1e-2), "--lora-rank", 4, "--run-dir", run]
    check_ended(forked_ranks(root / "recipes/sft.py", *words, ranks=1, cwd=tmp_path))
    before = models.load_pretrained(folder / family)[0].state_dict()
    after = models.load_pretrained(run / "final")[0].state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapted = "proj" if family == "llama" else "self_attn."  # in a mixture, without its MLPs
    assert changed == {name for name in before if adapted in name and "norm" not in name}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["evaluation_loss"] < lines(run)[0]["evaluation_loss"]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_the_saved_model_evaluates_as_the_one_with_adapters(root, folder, tmp_path, family):
    """``final`` has the adapters merged; ``sft.py --env`` samples from the model with adapters."""
    pytest.importorskip("verifiers")
    run = tmp_path / "run"
    words = [*flags(folder, family, steps=4, lr=1e-2), "--lora-rank", 4, "--run-dir", run]
    words += ["--env", "reverse-words", "--env-tasks", 64, "--env-tokens", 6]
    check_ended(forked_ranks(root / "recipes/sft.py", *words, ranks=1, cwd=tmp_path))

    words = ["--model", run / "final", "--env", "reverse-words", "--tasks", 64]
    words += ["--max-tokens", 6, "--temperature", 0, "--dtype", "float32"]
    words += ["--run-dir", tmp_path / "evaluation"]
    check_ended(forked_ranks(root / "recipes/evaluate.py", *words, ranks=1, cwd=tmp_path))

    scores = json.loads((tmp_path / "evaluation" / "summary.json").read_text())["scores"]
    expected = json.loads((run / "summary.json").read_text())["eval_after"]
    # Rewards are added in the order in which rollouts end, so the last digit may differ.
    assert scores["reverse-words"]["reward"]["mean"] == pytest.approx(expected)
    assert expected > 0


@pytest.mark.thorough
def test_rollouts_show_what_was_learned(root, folder, tmp_path):
    """On two ranks, with adapters: the engine samples from the weights as they are trained."""
    pytest.importorskip("verifiers")
    run = tmp_path / "run"
    words = [*flags(folder, "llama", steps=4, lr=1e-2), "--lora-rank", 4, "--run-dir", run]
    words += ["--env", "reverse-words", "--env-tasks", 64, "--env-tokens", 6, "--eval-every", 2]
    done = forked_ranks(root / "recipes/sft.py", *words, ranks=2, cwd=tmp_path)
    check_ended(done)
    summary = json.loads((run / "summary.json").read_text())
    evaluations = (run / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [0, 2, 4]
    assert summary["eval_before"] == json.loads(evaluations[0])["evaluation"]

    model, tokenizer = models.load_pretrained(run / "final")
    environment = rollout.verifiers("reverse-words", tokenizer=tokenizer)
    tasks, _ = environment.tasks.split(64)
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    with rollout.TransformersEngine(model) as engine:
        ends = list(rollout.evaluate_tasks(engine, environment, tasks, greedy))
    rewards = [end.rollout.reward for end in ends]
    assert summary["eval_after"] == pytest.approx(sum(rewards) / 64)
    assert summary["eval_before"] != summary["eval_after"] > 0


@pytest.fixture(scope="module")
def recipe(root):
    spec = importlib.util.spec_from_file_location("sft", root / "recipes/sft.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_shuffled_together_or_drawn_by_shares(recipe, folder):
    paths = (str(folder / "train.jsonl"), str(folder / "eval.jsonl"))
    together = recipe.open_stream(recipe.Args(model="", data=paths))
    ids = [together.draw()["id"] for _ in range(47)]
    assert len(set(ids)) == 47
    assert ids != sorted(ids)
    shared = recipe.open_stream(recipe.Args(model="", data=paths, shares=(1.0, 3.0)))
    origins = [shared.draw()["environment"] for _ in range(40)]
    assert origins.count("1") == 30
    with pytest.raises(ValueError, match="--shares has 1 numbers, --data 2 paths"):
        recipe.open_stream(recipe.Args(model="", data=paths, shares=(1.0,)))


def test_the_learning_rate_rises_and_falls(recipe):
    args = recipe.Args(model="", data=(), lr=2.0, warmup=2, steps=6)
    rates = [recipe.learning_rate(step, args) for step in range(6)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.7071067811865475, 1.0, 0.2928932188134524])


def test_conversations_that_are_too_long_are_skipped_but_not_forever(recipe, folder):
    model, tokenizer = models.load_pretrained(folder / "llama")
    path = str(folder / "train.jsonl")
    args = recipe.Args(model="", data=(path,), max_tokens=40, too_long="skip", batch_size=10)
    samples = recipe.draw_samples(recipe.open_stream(args), tokenizer, model, args)
    assert len(samples) == 10
    assert max(len(sample.token_ids) for sample in samples) <= 40
    args = recipe.Args(model="", data=(path,), max_tokens=10, too_long="skip", batch_size=10)
    with pytest.raises(ValueError, match=r"1,000 conversations in a row.*--max-tokens \(10\)"):
        recipe.draw_samples(recipe.open_stream(args), tokenizer, model, args)


BAD = [
    {"messages": [{"role": "bot", "content": "a"}]},
    # The template has no place for it.
    {"messages": [{"role": "user", "content": "ab"}]},
    {
        "messages": [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "ba", "reasoning": "abba"},
        ]
    },
]


def test_bad_conversations_end_the_run_or_are_left_out_and_named(root, folder, tmp_path):
    mixed, run = tmp_path / "mixed.jsonl", tmp_path / "run"
    rows = [json.dumps(one) for one in BAD]
    mixed.write_text("\n".join([*rows, *(folder / "eval.jsonl").read_text().splitlines()]))
    words = [*flags(folder, "llama", steps=2), "--data", mixed, "--run-dir", run]
    recipe = root / "recipes/sft.py"
    refused = forked_ranks(recipe, *words, ranks=1, cwd=tmp_path)
    assert refused.returncode != 0
    assert f"{mixed}:1: messages[0].role is 'bot'" in refused.stderr

    check_ended(forked_ranks(recipe, *words, "--skip-bad", ranks=1, cwd=tmp_path))
    named = (run / "left_out.txt").read_text().splitlines()
    reasons = ("messages[0].role is 'bot'", "no message has the role", "leaves 'abba'")
    for number, (line, reason) in enumerate(zip(named, reasons, strict=True), start=1):
        assert line.startswith(f"{mixed}:{number}: ")
        assert reason in line
    assert [line["left_out"] for line in lines(run)] == [3, 3]
    check_ended(forked_ranks(recipe, "--resume", run, "--steps", 3, ranks=1, cwd=tmp_path))
    assert (run / "left_out.txt").read_text().splitlines() == named
    assert lines(run)[2]["left_out"] == 3


def test_more_tokens_than_the_context_are_refused(root, folder, tmp_path):
    words = ["--model", folder / "llama", "--data", folder / "train.jsonl", "--max-tokens", 257]
    words += ["--run-dir", tmp_path / "run"]
    done = forked_ranks(root / "recipes/sft.py", *words, ranks=1, cwd=tmp_path)
    assert done.returncode != 0
    assert "--max-tokens is 257; the model's context is 256" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_broken_line_ends_the_run_before_it_begins(root, folder, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text((folder / "eval.jsonl").read_text() + '{"messages": [{"role": "bot"}]}\n')
    words = ["--model", folder / "llama", "--data", broken, "--run-dir", tmp_path / "run"]
    done = subprocess.run(
        [sys.executable, root / "recipes/sft.py", *words],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: {broken}:8: messages[0].role is 'bot'; expected one of")
    assert not (tmp_path / "run").exists()
