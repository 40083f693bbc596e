"""Adapters that are published alone into real vLLM: values, isolation, and injected faults."""

import asyncio
import copy
import json
import os
import pickle
import secrets
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from page_edits import edited, section
from publishing import logprobs_of

from primerl import models, serving, weights
from primerl.serving.names import LOAD_ADAPTER, UNLOAD_ADAPTER
from primerl.types import SamplingParams

TINY = {"count": 1, "length": 70, "new_tokens": 4}
CLOSE = 1e-5
P = SamplingParams


def run(coroutine, timeout_s=120):
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


def prompt(seed, length=70):
    return np.random.default_rng(seed).integers(40, 460, length).tolist()


def adapted(dense, seed, *, rank=4, **config):
    """The trainer's model, with an adapter that changes its logprobs by tenths of nats."""
    model, _ = models.load_pretrained(dense)
    settings = {"r": rank, "lora_alpha": 3, "target_modules": "all-linear"} | config
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def step(model):
    """Some change of the adapter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.02 * parameter.roll(1))


class Between:
    """An engine whose updates a test changes on their way, between folder and server."""

    def __init__(self, engine):
        self.engine = engine
        self.adapter = engine.adapter
        self.change = lambda folder: None

    def load_weights(self, update, **options):
        self.change(Path(update["adapter"]))
        return self.engine.load_weights(update, **options)


class Policy:
    """A model with an adapter, the engine that samples under it, its transport and its canary."""

    def __init__(self, server, dense, seed, *, name, folder=None, **config):
        self.run = secrets.token_hex(4)
        self.server = server
        self.model = adapted(dense, seed, **config)
        self.engine = serving.VLLMEngine(server, adapter=name, run=self.run, down_timeout_s=3.0)
        self.between = Between(self.engine)
        self.transport = weights.Adapter(self.model, self.between, folder=folder)
        self.canary = weights.Canary(self.model, self.engine, **TINY)
        self.folders = {}
        self.between.change = self.remember

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.engine.close()

    def remember(self, folder):
        self.folders[int(folder.name.split("-")[0])] = folder

    def post(self, path, **body):
        """By another client than the engine."""
        headers = {"Authorization": f"Bearer {self.server.api_key}"}
        request = urllib.request.Request(
            self.server.url + path,
            data=json.dumps(body).encode(),
            headers={**headers, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200

    def name(self, version):
        """Of a version of the adapter on the server."""
        return f"{self.engine.adapter}-{self.run}-{version}"

    def publish(self, version):
        receipt = self.transport.publish(version)
        verdict = self.canary.check(version)
        assert verdict.passed, verdict.reason
        return receipt

    def expected(self, tokens):
        return logprobs_of(self.model, tokens).numpy()

    def gap(self, tokens):
        """The largest difference of the engine's scores from the trainer's."""
        scores = run(self.engine.score(tokens))
        return np.abs(scores - self.expected(tokens)).max()

    def sampled_gap(self, tokens, **params):
        """The same of what the engine samples, and the versions of the tokens."""
        answer = run(self.engine.generate(tokens, P(max_tokens=24, **params)))
        own = self.expected([*tokens, *answer.token_ids])[len(tokens) :]
        return np.abs(answer.logprobs - own).max(), set(answer.versions.tolist())


@pytest.fixture
def policy(lora_server, dense):
    with Policy(lora_server, dense, 1, name="policy") as one:
        one.publish(0)
        yield one


@pytest.fixture
def other(lora_server, dense):
    with Policy(lora_server, dense, 2, name="other") as one:
        one.publish(7)
        yield one


# ---- values ----


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rank": 8, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
        {"alpha_pattern": {"v_proj": 7}, "rank_pattern": {"up_proj": 2}},
    ],
    ids=["every layer", "rsLoRA of two", "patterns"],
)
def test_logprobs_under_the_adapter_are_those_of_the_trainer(lora_server, dense, config):
    with Policy(lora_server, dense, 3, name="policy", **config) as policy:
        receipt = policy.publish(0)
        tokens = prompt(0)

        assert policy.gap(tokens) < CLOSE
        gap, versions = policy.sampled_gap(tokens)
        assert gap < CLOSE
        assert versions == {0}
        plain = logprobs_of(models.load_pretrained(dense)[0].eval(), tokens).numpy()
        assert np.abs(policy.expected(tokens) - plain).max() > 0.1
        assert receipt.kind == "adapter"
        assert receipt.tensors == sum("lora_" in name for name in policy.model.state_dict())
        (verdict,) = policy.canary.check(0).servers
        assert verdict.tensors == verdict.compared_tensors > 0


def test_prompts_that_are_scored_at_once(policy):
    """In one step of vLLM, which a CPU did not survive before the head was unwrapped."""

    async def score_all():
        return await asyncio.gather(*(policy.engine.score(prompt(n, 30)) for n in range(6)))

    for number, scores in enumerate(run(score_all())):
        assert np.abs(scores - policy.expected(prompt(number, 30))).max() < CLOSE


def test_the_base_model_stays_what_it_was(policy, lora_server, dense):
    model = models.load_pretrained(dense)[0].eval()
    with serving.VLLMEngine(lora_server) as engine:
        engine.adopt(0)
        scores = run(engine.score(prompt(0)))
    assert np.abs(scores - logprobs_of(model, prompt(0)).numpy()).max() < CLOSE


def test_each_version_replaces_the_one_before(policy):
    for version in (1, 2):
        step(policy.model)
        policy.publish(version)
        assert policy.gap(prompt(1)) < CLOSE
        gap, versions = policy.sampled_gap(prompt(1))  # of which the cache has the older versions'
        assert gap < CLOSE
        assert versions == {version}
    assert policy.engine.version == 2


def test_the_wiring_of_every_factor(lora_server, dense):
    targets = {"target_modules": ["k_proj", "down_proj"]}
    with Policy(lora_server, dense, 4, name="policy", **targets) as policy:
        report = weights.wiring_test(policy.model, policy.transport, policy.canary, version=1)
        assert report.missing == report.unseen == ()
        assert len(report.groups) == 4


# ---- several adapters, and requests in flight ----


def test_two_adapters_of_a_server_do_not_see_each_other(policy, other):
    tokens = prompt(2)
    before = run(other.engine.score(tokens))
    for version in (1, 2):
        step(policy.model)
        policy.publish(version)

        assert np.array_equal(run(other.engine.score(tokens)), before)
        assert (policy.engine.version, other.engine.version) == (version, 7)

    async def both():
        requests = [
            engine.generate(tokens, P(max_tokens=24, seed=seed))
            for seed in range(3)
            for engine in (policy.engine, other.engine)
        ]
        return await asyncio.gather(*requests)

    for one, answer in zip([policy, other] * 3, run(both()), strict=True):
        own = one.expected([*tokens, *answer.token_ids])[len(tokens) :]
        assert np.abs(answer.logprobs - own).max() < CLOSE
        assert set(answer.versions.tolist()) == {2 if one is policy else 7}
    gap = np.abs(policy.expected(tokens) - other.expected(tokens)).max()
    assert gap > 0.1, "two adapters that are hardly different prove nothing"


def test_requests_in_flight_end_with_the_version_that_they_began_with(policy):
    tokens, old = prompt(3), copy.deepcopy(policy.model)

    async def sample_while_publishing():
        long = asyncio.create_task(policy.engine.generate(tokens, P(max_tokens=600)))
        while not policy.engine.servers()[0]["in_flight"]:
            await asyncio.sleep(0.01)
        for version in (1, 2):
            step(policy.model)
            await asyncio.to_thread(policy.transport.publish, version)
        assert not long.done()
        return await policy.engine.generate(tokens, P(max_tokens=8)), await long

    short, long = run(sample_while_publishing())
    assert set(long.versions.tolist()) == {0}
    assert set(short.versions.tolist()) == {2}
    for model, answer in ((old, long), (policy.model, short)):
        own = logprobs_of(model, [*tokens, *answer.token_ids]).numpy()[len(tokens) :]
        assert np.abs(answer.logprobs - own).max() < 2 * CLOSE


def test_a_copy_of_the_engine_follows_the_versions(policy):
    with pickle.loads(pickle.dumps(policy.engine)) as copied:
        step(policy.model)
        policy.publish(1)
        answer = run(copied.generate(prompt(4), P(max_tokens=4)))
        assert set(answer.versions.tolist()) == {1}
        assert copied.version == 1


# ---- injected faults: each is caught, and by what ----


def wrong_scale(folder, policy, other):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))


def old_version(folder, policy, other):
    shutil.copytree(policy.folders[0], folder, dirs_exist_ok=True)


def other_adapter(folder, policy, other):
    shutil.copytree(other.folders[7], folder, dirs_exist_ok=True)


FAULTS = [wrong_scale, old_version, other_adapter]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_receipt_catches(policy, other, fault):
    """The server keeps the version that it had, and a publication without a fault succeeds."""
    before = run(policy.engine.score(prompt(5)))
    step(policy.model)
    policy.between.change = lambda folder: fault(folder, policy, other)
    with pytest.raises(RuntimeError, match=r"version 1 did not arrive: digest: \w+ of the loaded"):
        policy.transport.publish(1)

    assert policy.engine.version == 0
    assert np.array_equal(run(policy.engine.score(prompt(5))), before)
    assert policy.sampled_gap(prompt(5))[1] == {0}
    policy.between.change = policy.remember
    policy.publish(1)
    assert policy.gap(prompt(5)) < CLOSE


@pytest.mark.parametrize("fault", FAULTS)
def test_the_canary_catches(lora_server, policy, other, fault, tmp_path):
    """What is loaded behind the back of the transport, which has made its receipt."""
    step(policy.model)
    policy.publish(1)
    folder = tmp_path / "faulty"
    shutil.copytree(policy.folders[1], folder)
    fault(folder, policy, other)
    policy.engine.close()  # or it would give it back
    policy.post(UNLOAD_ADAPTER, lora_name=policy.name(1))
    policy.post(LOAD_ADAPTER, lora_name=policy.name(1), lora_path=str(folder))

    with serving.VLLMEngine(lora_server, adapter="policy", run=policy.run) as engine:
        verdict = weights.Canary(policy.model, engine, tolerance=3 * CLOSE, **TINY).check(1)
    print(verdict.reason)
    assert not verdict.passed
    assert "scores differ by" in verdict.reason


def test_a_changed_base_is_caught(policy):
    """By the scores; the receipt, which is of the adapter, is right."""
    scale = {"method": "scale_norm", "args": [1.01]}
    policy.engine.call("/collective_rpc", scale)
    try:
        step(policy.model)
        policy.transport.publish(1)
        verdict = policy.canary.check(1)
        fresh = weights.Canary(policy.model, policy.engine, tolerance=1.0, **TINY).check(1)
    finally:
        policy.engine.call("/collective_rpc", {"method": "scale_norm", "args": [1 / 1.01]})
    print(verdict.reason, fresh.reason)
    assert not verdict.passed
    assert "scores differ by" in verdict.reason
    assert fresh.servers[0].wrong_tensors == ("model.norm.weight",)  # at the first check


def test_an_adapter_that_was_dropped_is_never_replaced_by_the_base(policy):
    """The engine that published gives it back; without that one, requests and the canary fail."""
    with pickle.loads(pickle.dumps(policy.engine)) as copied:
        assert copied.version == 0
        policy.post(UNLOAD_ADAPTER, lora_name=policy.name(0))
        assert policy.sampled_gap(prompt(6))[0] < CLOSE
        assert policy.gap(prompt(6)) < CLOSE

        policy.engine.close()
        policy.post(UNLOAD_ADAPTER, lora_name=policy.name(0))
        lost = r"without the adapter 'policy'|The model `policy-\w+-0` does not exist"
        with pytest.raises(RuntimeError, match=lost):
            run(copied.generate(prompt(6), P(max_tokens=4)))
        with pytest.raises(RuntimeError, match=lost):
            weights.Canary(policy.model, copied, **TINY).check(0)


# ---- refusals ----


def test_what_a_server_cannot_take_is_refused_before_it_is_sent(lora_server, dense, policy):
    with Policy(lora_server, dense, 1, name="large", rank=16) as large:
        with pytest.raises(RuntimeError, match=r"no server was changed: .* takes up to rank 8"):
            large.transport.publish(0)
    with serving.VLLMEngine(lora_server) as engine:
        merged = weights.SharedMemory(policy.model, engine)
        with pytest.raises(RuntimeError, match="no server was changed: .* can't reload its base"):
            merged.publish(0)
    assert policy.gap(prompt(7)) < CLOSE


def test_the_recipe_publishes_adapters_alone(lora_server, dense, root, tmp_path):
    """After the edits that the documentation shows."""
    script = root / "tests/helpers/recipe_with_signal.py"
    page = section(root, "LoRA") + section(root, "Adapters alone")
    recipe = edited(root, tmp_path, page)
    words = [script, recipe, "--model", dense, "--engine-urls", lora_server.url, "--steps", 2]
    words += ["--dtype", "float32", "--lr", 1e-3]
    words += ["--groups-per-step", 2, "--group-size", 4, "--eval-tasks", 2]
    done = subprocess.run(
        [sys.executable, *map(str, words), "--run-dir", tmp_path / "run"],
        env={**os.environ, "PRIMERL_API_KEY": lora_server.api_key, "OMP_NUM_THREADS": "2"},
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    merged = sum(path.stat().st_size for path in Path(dense).glob("*.safetensors"))
    for line in lines:
        assert 0 < line["publish_bytes"] < merged / 3
        assert 0 <= line["mismatch_kl"] < 1e-9
        assert line["grad_norm"] > 0
