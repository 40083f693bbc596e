"""New weights in real vLLM servers: right logits after a reload; faults, and who catches them.

Issue 5, Shows 2 and 3.
"""

import contextlib
import itertools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forked_ranks import forked_ranks
from publishing import StoreMeeting, logprobs_of, train

from primerl import models, serving, weights
from primerl._common.shared_folder import shared_memory

CLOSE = 5e-5  # of logprobs in float32
VISIBLY_WRONG = 0.05


class Trainer:
    """A model that moves, and where it publishes."""

    versions = itertools.count(1)

    def __init__(self, folder, server):
        self.model, _ = models.load_pretrained(folder)
        self.engine = serving.VLLMEngine(server)
        self.tokens = torch.randint(
            3, 500, (40,), generator=torch.Generator().manual_seed(0)
        ).tolist()

    def publish(self, transport):
        train(self.model, scale=0.05, fraction=1.0, seed=(version := next(self.versions)))
        return transport.publish(version)

    def error(self):
        """The largest |difference| between the server's logprobs and the trainer's."""
        (answer,) = self.engine.probe([self.tokens], max_new_tokens=1).values()
        own = logprobs_of(self.model, self.tokens)
        return (torch.tensor(answer[0]["scores"]) - own).abs().max()

    @contextlib.contextmanager
    def fault(self, name):
        def tell(fault):
            self.engine.call("/collective_rpc", {"method": "set_fault", "args": [fault]})

        tell(name)
        try:
            yield
        finally:
            tell("")


@pytest.fixture
def trainer(tied_experts, faulty_server):
    trainer = Trainer(tied_experts, faulty_server)
    with contextlib.closing(trainer.engine):
        yield trainer


@pytest.fixture
def disk(trainer, tmp_path):
    return weights.Disk(trainer.model, trainer.engine, folder=tmp_path / "w", encoding="delta")


def test_a_reload_gives_the_logprobs_of_the_new_weights(trainer, tmp_path):
    for transport in (
        weights.SharedMemory(trainer.model, trainer.engine),
        weights.Disk(trainer.model, trainer.engine, folder=tmp_path / "w", encoding="delta"),
        weights.Network(trainer.model, trainer.engine, folder=tmp_path / "n", encoding="delta"),
    ):
        for _ in range(2):
            receipt = trainer.publish(transport)
            assert trainer.error() < CLOSE
            ((worker,),) = receipt.servers.values()
            assert worker["digest"] == receipt.digest
    assert receipt.kind == "delta"


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_a_server_that_was_restarted_after_it_had_prepared_a_version_loads_it(
    trainer, tmp_path, encoding
):
    transport = weights.Disk(
        trainer.model, trainer.engine, folder=tmp_path / "w", encoding=encoding
    )
    with trainer.fault("restarted"):
        for _ in range(2):
            trainer.publish(transport)
            assert trainer.error() < CLOSE


def test_a_server_that_cannot_read_a_delta_from_the_trainer_loads_the_full_version(
    trainer, tmp_path
):
    class Losing(Stale):
        def load_weights(self, update, *, version, timeout_s=600.0, send=None):
            for path in transport._parts.publisher.files.glob("*.delta.*"):
                path.unlink()
            return self.engine.load_weights(update, version=version, timeout_s=timeout_s)

    folder = tmp_path / "n"
    with weights.Network(
        trainer.model, Losing(trainer.engine), folder=folder, encoding="delta"
    ) as transport:
        assert trainer.publish(transport).fallback is None
        receipt = trainer.publish(transport)
        assert "the trainer no longer has the file" in receipt.fallback
        assert "127.0.0.1" in receipt.fallback
        assert trainer.error() < CLOSE


def test_smollm2_in_float32(server, smollm2):
    """Dense, with a tied head, 135M parameters; the change is that of 50 steps at 1e-5."""
    trainer = Trainer(smollm2, server)
    with contextlib.closing(trainer.engine):
        transport = weights.SharedMemory(trainer.model, trainer.engine)
        before = logprobs_of(trainer.model, trainer.tokens)
        train(trainer.model, scale=5e-4, fraction=1.0)
        transport.publish(1)
        moved = (logprobs_of(trainer.model, trainer.tokens) - before).abs().max()
        assert trainer.error() < CLOSE < 100 * CLOSE < moved


@pytest.mark.parametrize("remedy", ["no repacked head", "no repacked experts"])
def test_without_a_remedy_the_bytes_are_right_and_the_logprobs_are_not(trainer, disk, remedy):
    """Receipts cannot see this; the canary can."""
    with trainer.fault(remedy):
        trainer.publish(disk)
        assert trainer.error() > VISIBLY_WRONG
    trainer.publish(disk)
    assert trainer.error() < CLOSE


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ("lost", r"'missing': \['model.layers.1.self_attn.k_proj.weight'\]"),
        ("swapped", r"'differing': \['model.layers.0.*k_proj.weight', 'model.layers.1"),
        ("unreached", r"'unreached': \['model.layers.0.self_attn.qkv_proj \("),
        ("half", r"the file is gone"),
    ],
)
def test_an_incomplete_update_is_refused_and_the_next_version_repairs_it(
    trainer, disk, fault, caught
):
    with trainer.fault(fault), pytest.raises(RuntimeError, match=caught):
        trainer.publish(disk)
    trainer.publish(disk)
    assert trainer.error() < CLOSE


def test_an_interrupted_update_does_not_corrupt_the_next(trainer, disk):
    """Why half-loaded layers are put back first: the next delta would not arrive either."""
    for remedy_out in (True, False):
        with trainer.fault("half"), pytest.raises(RuntimeError, match="the file is gone"):
            trainer.publish(disk)
        with trainer.fault("kept" if remedy_out else ""):
            receipt = trainer.publish(disk)
        assert (receipt.fallback is not None) == remedy_out
        assert trainer.error() < CLOSE


def test_requests_are_served_while_an_update_is_prepared(trainer, disk):
    trainer.publish(disk)
    with trainer.fault("slow"), ThreadPoolExecutor(1) as pool:
        published, waits = pool.submit(trainer.publish, disk), []
        while not published.done():
            started = time.monotonic()
            trainer.engine.probe([trainer.tokens], max_new_tokens=1)
            waits.append(time.monotonic() - started)
    assert published.result().seconds["load"] > 3
    assert len(waits) > 5
    assert max(waits) < 1.5
    assert trainer.error() < CLOSE


def test_a_trainer_that_dies_between_start_and_finish(trainer, disk):
    trainer.engine.call("/pause?mode=keep&clear_cache=true")
    trainer.engine.call("/start_weight_update")
    trainer.publish(disk)
    assert trainer.error() < CLOSE


def test_a_flipped_bit_in_a_delta_and_a_truncated_file(trainer, disk, tmp_path, monkeypatch):
    trainer.publish(disk)
    load = disk._load
    damaged = []

    def flip(path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))

    def damaging(receipt):
        (path,) = disk._folder.glob(f"{receipt.version:08d}.{receipt.kind}.safetensors")
        damaged.append(receipt.kind)
        flip(path) if receipt.kind == "delta" else os.truncate(path, 1000)
        return load(receipt)

    monkeypatch.setattr(disk, "_load", damaging)
    with pytest.raises(RuntimeError, match=r"full.safetensors in .*is truncated: 1000 bytes"):
        trainer.publish(disk)
    assert damaged == ["delta", "full"], "the delta was sent again whole, and that was cut off"
    monkeypatch.undo()
    trainer.publish(disk)
    assert trainer.error() < CLOSE


def test_one_of_two_engines_has_an_old_version(trainer, pair, tmp_path):
    """It reports what it loaded last, whatever the client believes that it told it."""
    engine = serving.VLLMEngine(pair[1])
    with contextlib.closing(engine):
        both = weights.Disk(trainer.model, trainer.engine, engine, folder=tmp_path / "w")
        trainer.publish(both)
        stale = Stale(engine)
        one = weights.Disk(trainer.model, trainer.engine, stale, folder=tmp_path / "v")
        with pytest.raises(
            RuntimeError, match=rf"version: still serves version \d+ on {pair[1].url}"
        ):
            trainer.publish(one)
        assert trainer.error() < CLOSE


class Stale:
    """An engine whose update got lost on the way."""

    def __init__(self, engine):
        self.engine = engine

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        answers = self.engine.call("/collective_rpc", {"method": "weight_receipt"})
        return {url: answer["results"] for url, answer in answers.items()}


@pytest.fixture
def other_transfer(trainer):
    def switch():
        trainer.engine.call("/collective_rpc", {"method": "other_transfer"})

    switch()
    yield
    switch()


def test_broadcast_weights_arrive(trainer, other_transfer, tmp_path):
    """All of the NCCL path but NCCL: a file carries the bytes."""
    store = StoreMeeting(tmp_path)
    transport = weights.NCCL(
        trainer.model, trainer.engine, connect=store.connect, unique_id=store.unique_id
    )
    for _ in range(2):
        receipt = trainer.publish(transport)
        assert trainer.error() < CLOSE
        ((worker,),) = receipt.servers.values()
        assert worker["digest"] == receipt.digest


def test_weights_that_two_ranks_broadcast_arrive(
    trainer, faulty_server, other_transfer, root, tmp_path
):
    """The worker is in two groups, and receives the layers of both in turns."""
    version = next(trainer.versions)
    train(trainer.model, scale=0.05, fraction=1.0, seed=version)
    trainer.model.save_pretrained(tmp_path / "model")
    (tmp_path / "tokens.json").write_text(json.dumps(trainer.tokens))
    program = root / "tests/ranks/broadcasts_to_vllm.py"
    arguments = [trainer.engine.servers()[0]["url"], faulty_server.api_key, version, tmp_path]
    done = forked_ranks(program, *arguments, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    receipt, sent = json.loads((tmp_path / "found-0.json").read_text())
    assert receipt["workers"] == [receipt["digest"]]
    assert 0 < sent < receipt["bytes"]
    own = logprobs_of(trainer.model, trainer.tokens)
    assert (torch.tensor(receipt["scores"]) - own).abs().max() < CLOSE


def test_nothing_is_left_in_shared_memory(trainer, disk):
    trainer.publish(disk)
    left = {path.name.split("-")[2] for path in shared_memory().glob(f"primerl-{os.getuid()}-*")}
    assert left <= {"copy", "publications", "adapters"}  # of this process, which still runs
