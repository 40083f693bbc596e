"""The canary and the wiring test on real vLLM: what passes, and what each of them catches.

Issue 5, Shows 2 and 3.
"""

import contextlib
import copy
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from primerl import models, serving, weights
from primerl.serving.protocol import requests

LR = 1e-6
TINY = {"count": 3, "length": 64, "new_tokens": 6}


def step(model, optimizer, seed):
    """A policy gradient step on text that the model finds likely enough."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.vocab_size
    rows = torch.randint(size // 16, size - size // 16, (2, 48), generator=generator)
    logprobs = model(rows).logits[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
    (logprobs * torch.tensor([[1.0], [-1.0]])).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class Trainer:
    """A model, its optimizer, and a canary that has been calibrated on the server's weights."""

    def __init__(self, folder, servers, *, lr=LR, on_update="recompute", **canary):
        self.model, _ = models.load_pretrained(folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        self.run = secrets.token_hex(4)
        self.engine = serving.VLLMEngine(servers, on_update=on_update, run=self.run)
        self.transport = weights.SharedMemory(self.model, self.engine)
        self.canary = weights.Canary(self.model, self.engine, **canary)
        self.version = 0

    def __enter__(self):
        self.transport.publish(0)
        verdict = self.canary.check(0)
        assert verdict.passed, verdict.reason
        return self

    def __exit__(self, *error):
        self.engine.close()

    def step(self):
        self.version += 1
        step(self.model, self.optimizer, self.version)
        self.transport.publish(self.version)
        return self.canary.check(self.version)


@contextlib.contextmanager
def fault(engine, name):
    engine.call("/collective_rpc", {"method": "set_fault", "args": [name]})
    try:
        yield
    finally:
        engine.call("/collective_rpc", {"method": "set_fault", "args": [""]})


def test_updates_of_smollm2_at_1e_6_pass_and_are_seen(server, smollm2):
    with Trainer(smollm2, server, count=2) as trainer:
        for _ in range(2):
            verdict = trainer.step()
            print(verdict.reason, verdict.tolerance)
            assert verdict.passed, verdict.reason
            (one,) = verdict.servers
            assert one.moved == pytest.approx(1, abs=0.1)


def test_a_prefix_cache_that_stays_over_an_update_at_1e_6_is_caught(server, smollm2, monkeypatch):
    """The engine neither clears its cache nor salts it: the continuation tells, scores do not."""

    def unsalted(plain):
        return lambda *args, **options: plain(*args, **options | {"salt": "always the same"})

    for name in ("generate_body", "score_body"):  # which reads the cache, and which writes to it
        monkeypatch.setattr(requests, name, unsalted(getattr(requests, name)))
    with Trainer(smollm2, server, count=2, on_update="keep") as trainer:
        verdict = trainer.step()
        print(verdict.reason)
        assert not verdict.passed
        (one,) = verdict.servers
        assert one.difference < verdict.tolerance < one.continuation
        assert one.moved == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("remedy", ["no repacked head", "no repacked experts"])
def test_without_a_remedy_the_canary_fails_where_the_receipt_does_not(
    faulty_server, tied_experts, remedy
):
    with Trainer(tied_experts, faulty_server, lr=1e-4, **TINY) as trainer:
        with fault(trainer.engine, remedy):
            verdict = trainer.step()
            print(verdict.reason)
            assert not verdict.passed
        verdict = trainer.step()
        assert verdict.passed, verdict.reason


def test_one_of_two_servers_that_stays_old_is_named(pair, tied_experts):
    first, second = pair
    with Trainer(tied_experts, pair, lr=1e-4, **TINY) as trainer:
        one = serving.VLLMEngine(first, run=trainer.run)
        with contextlib.closing(one):
            trainer.transport = weights.SharedMemory(trainer.model, one)
            trainer.engine.learn(trainer.version + 1)  # or it believes its own publications alone
            verdict = trainer.step()
    found = {one.server: one for one in verdict.servers}
    print(verdict.reason)
    assert not verdict.passed
    assert found[first.url].passed
    assert found[second.url].moved == pytest.approx(0, abs=0.1)


def test_the_wiring_of_a_tied_mixture_of_experts(faulty_server, tied_experts):
    with Trainer(tied_experts, faulty_server, **TINY) as trainer:
        arguments = (trainer.model, trainer.transport, trainer.canary)
        report = weights.wiring_test(*arguments, version=0)
        print(report)
        assert report.missing == report.unseen == ()
        with fault(trainer.engine, "no repacked experts"):
            with pytest.raises(RuntimeError):
                weights.wiring_test(*arguments, version=0)
        trainer.transport.publish(0)
        assert trainer.canary.check(0).passed


FAULTS = {
    "every norm x 1.001": ("norm", lambda one: one * 1.001),
    "embedding x 1.001": ("embed_tokens", lambda one: one * 1.001),
    "one k_proj: one row": ("layers.0.self_attn.k_proj", lambda one: one.index_fill(0, ONE, 0)),
    "one q_proj transposed in part": ("layers.1.self_attn.q_proj", lambda one: one.flip(0)),
    "router: noise of 0.1%": ("mlp.gate.weight", lambda one: one + 1e-3 * one.roll(1)),
    "one expert": ("layers.1.mlp.experts.down_proj", lambda one: one.index_fill(0, ONE, 0.1)),
    "cut off to bfloat16": (
        "o_proj",
        lambda one: (one.view(torch.int32) & ~0xFFFF).view(one.dtype),
    ),
}
ONE = torch.tensor([1])


def test_faults_of_each_kind_are_read_back(faulty_server, tied_experts):
    """The bytes tell, whatever the scores do; tools/canary_table.py has the sizes that matter."""
    with Trainer(tied_experts, faulty_server, **TINY) as trainer:
        faulty = copy.deepcopy(trainer.model)
        wrong = weights.SharedMemory(faulty, trainer.engine)
        for version, (name, (pattern, change)) in enumerate(FAULTS.items(), start=1):
            with torch.no_grad():
                for (key, own), held in zip(
                    trainer.model.named_parameters(), faulty.parameters(), strict=True
                ):
                    held.copy_(change(own.clone()) if pattern in key else own)
            wrong.publish(version)
            verdict = trainer.canary.check(version)
            print(name, verdict.reason)
            assert not verdict.passed, name
            assert verdict.servers[0].wrong_tensors, name
        trainer.transport.publish(len(FAULTS) + 1)
        verdict = trainer.canary.check(len(FAULTS) + 1)
        assert verdict.passed, verdict.reason
        (one,) = verdict.servers
        assert one.compared_tensors == one.tensors


@contextlib.contextmanager
def logprobs_mode(engine, mode):
    """The server logs logprobs of another kind meanwhile."""
    body = {"method": "set_logprobs_mode", "args": [mode]}
    engine.call("/collective_rpc", body)
    try:
        yield
    finally:
        body["args"] = ["processed_logprobs"]
        engine.call("/collective_rpc", body)


def test_logprobs_of_another_mode_fail_the_first_check(faulty_server, tied_experts):
    trainer = Trainer(tied_experts, faulty_server, **TINY)
    with contextlib.closing(trainer.engine):
        trainer.transport.publish(0)
        with logprobs_mode(trainer.engine, "raw_logprobs"):
            verdict = trainer.canary.check(0)
        print(verdict.reason)
        assert not verdict.passed
        assert "logprobs that are not processed" in verdict.reason

        with logprobs_mode(trainer.engine, "raw_logits"):
            with pytest.raises(RuntimeError, match="expected finite logprobs of at most 0"):
                trainer.canary.check(0)
        assert trainer.canary.check(0).passed


def test_an_untied_trainer_is_not_published_to_a_tied_server(faulty_server, tied_experts):
    tied, _ = models.load_pretrained(tied_experts)
    config = tied.config.to_dict() | {"tie_word_embeddings": False}
    untied = type(tied)(type(tied.config)(**config))
    untied.load_state_dict(tied.state_dict())  # equal, but of its own from the first step on
    with serving.VLLMEngine(faulty_server) as engine:
        with pytest.raises(RuntimeError, match=r"lm_head.weight was sent to .*tied"):
            weights.SharedMemory(untied, engine).publish(0)


@pytest.mark.slow
def test_the_table_of_faults():
    tool = Path(__file__).parents[2] / "tools" / "canary_table.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--dtype", "float32", "--correct", "2"],
        capture_output=True,
        encoding="utf-8",
        timeout=3000,
        check=True,
    )
    print(done.stdout)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 30
    assert all("yes" in row for row in rows)
    assert "0 false alarms" in done.stdout
