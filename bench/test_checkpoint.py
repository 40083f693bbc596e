"""Time to save and load 100M float32 parameters with AdamW (1.2 GB) in one process.

    python -m pytest bench/test_checkpoint.py -m "" --benchmark-only

``returns`` is the time for which an asynchronous save blocks training, once host memory is
allocated; the rows below it include writing and syncing the files. ``dcp`` is
``torch.distributed.checkpoint`` with its own files, which have no digests. ``torch.save`` writes
one pickle without syncing it.

    python -m pytest bench/test_checkpoint.py -m "" -s -o addopts=--import-mode=importlib -k ranks

``test_ranks`` saves, verifies and resumes a sharded model with AdamW of CHECKPOINT_GB (4) in all
and of half as much, on 1, 2 and 4 ranks. Ranks share this machine's cores and disk, so that seconds
fall only as far as there are cores; the bytes of a rank are what a cluster divides by. Each
figure is the least of two saves or three resumes. Files are removed from the page cache before they
are verified, and again before they are loaded.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import forked_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from primerl import checkpoint

WIDTH, LAYERS, ROUNDS = 1024, 96, 5
LARGE = float(os.environ.get("CHECKPOINT_GB", "4"))


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


@pytest.mark.parametrize("gigabytes", [LARGE / 2, LARGE])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks(tmp_path, gigabytes, ranks):
    program = Path(__file__).with_name("checkpointing_ranks.py")
    done = forked_ranks(program, tmp_path, gigabytes, ranks=ranks, cwd=tmp_path, timeout_s=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    shutil.rmtree(tmp_path / "checkpoints")
    first = found[0]

    def most(name):
        return max(one[name] for one in found)

    print(f"\n{gigabytes:.1f} GB, {ranks} ranks; bytes and CPU seconds of the busiest rank:")
    for phase, part in (("write", "written"), ("verify", "verify"), ("load", "load")):
        print(
            f"{phase:>8}: {most(f'{part}_mb'):6.0f} MB, {most(f'{phase}_cpu_s'):5.2f} s CPU,"
            f" {most(f'{phase}_s'):5.2f} s"
        )
    print(
        f"  save returns after {most('stall_s'):.2f} s; resume {most('resume_s'):.1f} s, in which "
        f"rank 0 grows by {first['grown_mb']:.0f} MB\n"
        f"  last_good {1000 * first['last_good_s']:.1f} ms, with digests {first['alone_s']:.1f} s"
    )
