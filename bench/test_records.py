"""Cost of a run's records: in the training thread, on the disk, on resume and in the report.

Run `make bench ARGS=bench/test_records.py`, with `-s` for the numbers. BENCH_TOKENS sets the length
of the history (10 million tokens by default), which takes some minutes to write.
"""

import os
import time

import numpy as np
import pytest

from primerl import advantage, packing, track
from primerl.types import Group, Rollout, Sample

HISTORY = int(os.environ.get("BENCH_TOKENS", 10_000_000))
LONG, SHORT = 32_768, 200


def decode(ids):
    return " ".join(map(str, ids))


def step_of(groups, size, tokens, *, version, seed=0):
    """Groups of one step, and arrays that the trainer computed for them."""
    draw = np.random.default_rng([seed, version])
    mask = np.arange(tokens) >= tokens // 4

    def play():
        sample = Sample(
            token_ids=draw.zipf(1.2, tokens) % 150_000,
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -draw.exponential(0.4, tokens), 0.0),
            versions=np.where(mask, version, -1),
        )
        return Rollout(samples=[sample], reward=float(draw.random()))

    taken = [
        Group(task_id=f"task {n}", rollouts=[play() for _ in range(size)]) for n in range(groups)
    ]
    samples = advantage.assign(taken, advantage.centered)
    per_token = [
        {
            "logprobs": np.where(mask, one.behavior_logprobs + draw.normal(0, 1e-3, tokens), 0.0),
            "entropy": np.where(mask, draw.exponential(0.5, tokens), 0.0),
        }
        for one in samples
    ]
    return taken, samples, per_token


def loops_for(seconds):
    """Count how often a loop in Python runs in a time, as a measure of its share of the GIL."""
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        count += 1
    return count


@pytest.mark.parametrize(("groups", "size", "tokens"), [(8, 8, LONG), (128, 16, SHORT)])
def test_log(benchmark, tmp_path, groups, size, tokens):
    """Print costs per token of steps with long and short sequences, all of which are recorded."""
    step = step_of(groups, size, tokens, version=0)
    total = groups * size * tokens
    alone = loops_for(1.0)
    numbers = iter(range(100))
    shares = []

    with track.Run(tmp_path / "run", decode=decode, record_tokens=total) as run:

        def drained():
            run.state()
            return (next(numbers), *step[:2]), {"per_token": step[2]}

        benchmark.pedantic(run.log, setup=drained, rounds=10, warmup_rounds=1)
        arguments, more = drained()
        run.log(*arguments, **more)
        began = time.perf_counter()
        shares.append(1 - loops_for(0.3) / (0.3 * alone))
        run.state()
        written_s = time.perf_counter() - began
        size = sum((run.folder / f"rollouts.{name}").stat().st_size for name in ("bin", "jsonl"))
    print(
        f"\n{tokens} tokens a sequence: {benchmark.stats.stats.median / total * 1e6:.3f} us/token "
        f"in the training thread, {size / total / (arguments[0] + 1):.1f} bytes/token; "
        f"{written_s:.2f} s to write {total / 1e6:.1f}M tokens, while a loop in Python is "
        f"{shares[0]:.0%} slower"
    )


def written(folder, steps):
    with track.Run(folder, decode=decode, name="bench") as run:
        for step in range(steps):
            taken, samples, per_token = step_of(128, 16, SHORT, version=step)
            run.log(step, taken, samples, per_token=per_token)
        state = run.state()
        run.summary["error"] = "left unfinished, to be resumed"
    return state


@pytest.mark.parametrize("times", [1, 2])
def test_history(benchmark, tmp_path, times):
    """Time to resume a run of a length, and of twice that, and to write its report."""
    steps = times * HISTORY // (128 * 16 * SHORT)
    state = written(tmp_path / "run", steps)

    began = time.perf_counter()
    run = track.Run(tmp_path / "run", state=state, name="bench")
    with run:
        taken, samples, per_token = step_of(2, 2, SHORT, version=steps)
        run.log(steps, taken, samples, per_token=per_token)
        resumed_s = time.perf_counter() - began
    report = benchmark.pedantic(track.write_report, args=([tmp_path / "run"],), rounds=3)

    print(
        f"\n{steps * 128 * 16 * SHORT / 1e6:.0f}M tokens: resumed in {1e3 * resumed_s:.0f} ms, "
        f"report of {report.stat().st_size / 2**20:.0f} MiB in {benchmark.stats.stats.median:.1f} s"
    )


def test_unpack(benchmark):
    """8,192 samples in packs of 524,288 tokens."""
    samples = step_of(512, 16, 512, version=0)[1]
    packed = packing.pack(samples, max_tokens=1 << 19, ranks=1)
    rows = [[{"logprobs": b.behavior_logprobs, "entropy": b.advantages} for b in packed[0]]]

    found = benchmark.pedantic(packing.unpack, args=(packed, rows, samples), rounds=3)

    assert len(found) == len(samples) == 8192
    np.testing.assert_array_equal(found[-1]["logprobs"], samples[-1].behavior_logprobs)
