"""Time to save and load 100M float32 parameters with AdamW (1.2 GB) in one process.

    python -m pytest bench/test_checkpoint.py -m "" --benchmark-only

``returns`` is the time for which an asynchronous save blocks training, once host memory is
allocated; the rows below it include writing and syncing the files. ``dcp`` is
``torch.distributed.checkpoint`` with its own files, which have no digests. ``torch.save`` writes
one pickle without syncing it.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from primerl import checkpoint

WIDTH, LAYERS, ROUNDS = 1024, 96, 5


@pytest.fixture(scope="module")
def training():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def saves(training, tmp_path):
    with checkpoint.Checkpoints(tmp_path, *training, keep=1) as saves:
        yield saves


def test_returns(benchmark, saves):
    saves.save(0)
    benchmark.pedantic(lambda: saves.save(1), setup=saves.close, rounds=ROUNDS)


def test_save(benchmark, saves):
    benchmark.pedantic(lambda: saves.save(1, wait=True), rounds=ROUNDS)


def test_save_by_dcp(benchmark, training, tmp_path):
    def save():
        state = dict(zip("mo", get_state_dict(*training), strict=True))
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)

    benchmark.pedantic(save, rounds=ROUNDS)


def test_save_by_torch(benchmark, training, tmp_path):
    model, optimizer = training

    def save():
        torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "state.pt")

    benchmark.pedantic(save, rounds=ROUNDS)


def test_last_good(benchmark, saves, tmp_path):
    saves.save(1, wait=True)
    benchmark.pedantic(lambda: checkpoint.last_good(tmp_path), rounds=ROUNDS)


def test_load(benchmark, saves, tmp_path):
    saves.save(1, wait=True)
    saved = checkpoint.last_good(tmp_path)
    benchmark.pedantic(lambda: saves.load(saved), rounds=ROUNDS)
