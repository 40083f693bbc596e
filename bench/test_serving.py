"""Tokens per second of the whole rollout path, compared with ``LLM.generate`` on the same prompts.

    PRIMERL_SMOLLM2=folder python -m pytest bench/test_serving.py -m "" --benchmark-only -s \
        -o addopts=--import-mode=importlib

The benchmark needs vLLM. The path is ``Worker.evaluate``, the worker's process, a single-turn
environment, ``VLLMEngine``, HTTP, vLLM's server, and rollouts back to this process. Both sides
sample 64 tokens for each of 64 prompts, with the logprob of each token and without text. Each side
has its own process with an engine on all cores. The sides take turns, and the waiting side sleeps.
Ratios compare successive runs.

The environment variables SERVING_ROUNDS, SERVING_PROMPTS, SERVING_TOKENS and SERVING_DTYPE set
other sizes.
"""

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROUNDS = int(os.environ.get("SERVING_ROUNDS", 5))
PROMPTS = int(os.environ.get("SERVING_PROMPTS", 64))
TOKENS = int(os.environ.get("SERVING_TOKENS", 64))
DTYPE = os.environ.get("SERVING_DTYPE", "bfloat16")
SETTINGS = {
    "dtype": DTYPE,
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": PROMPTS,
    "logprobs_mode": "processed_logprobs",
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "GOMP_SPINCOUNT": "200000",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run vLLM's worker in the engine's process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def prompts():
    draw = random.Random(0)
    return [[draw.randrange(100, 40_000) for _ in range(46)] for _ in range(PROMPTS)]


async def environment(task, engine, params):
    from primerl.types import NOT_SAMPLED, Rollout, Sample

    prompt = task["token_ids"]
    reply = await engine.generate(prompt, params)
    sample = Sample(
        token_ids=[*prompt, *reply.token_ids],
        loss_mask=[False] * len(prompt) + [True] * len(reply.token_ids),
        behavior_logprobs=[0.0] * len(prompt) + [*reply.logprobs],
        versions=[NOT_SAMPLED] * len(prompt) + [*reply.versions],
    )
    return Rollout(samples=[sample], reward=0.0)


@contextlib.contextmanager
def path(folder):
    """Yield a function that samples once, and one that returns CPU seconds by component."""
    import psutil

    from primerl import models, rollout, serving, weights
    from primerl.types import SamplingParams

    model, _ = models.load_pretrained(folder)
    tasks = [{"id": str(n), "token_ids": prompt} for n, prompt in enumerate(prompts())]
    params = SamplingParams(max_tokens=TOKENS)
    plan = {"params": params, "group_size": 1, "groups_per_step": 1, "max_staleness": 0}
    with (
        serving.serve_vllm(folder, **SETTINGS) as server,
        contextlib.closing(serving.VLLMEngine(server)) as engine,
        rollout.worker(engine, environment, tasks, **plan) as rollouts,
    ):
        weights.SharedMemory(model, engine).publish(0)

        def sample():
            played = rollouts.evaluate(tasks, params)
            return sum(int(one.samples[0].loss_mask.sum()) for one in played)

        def cpu_s():
            parts = {"caller": time.process_time(), "API server": 0.0, "engine": 0.0}
            parts["worker"] = seconds_of(psutil.Process(rollouts.members()[0]["pid"]))
            for process in psutil.Process(server.pid).children(recursive=True):
                is_engine = "VLLM::" in " ".join(process.cmdline())
                parts["engine" if is_engine else "API server"] += seconds_of(process)
            return parts

        yield sample, cpu_s


def seconds_of(process):
    times = process.cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def bare(folder):
    import vllm

    llm = vllm.LLM(folder, **SETTINGS)
    params = vllm.SamplingParams(
        max_tokens=TOKENS, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]

    def sample():
        done = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    yield sample, lambda: {"all": time.process_time()}


def child(side, folder):
    """Run one round per input line, and answer with a line of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect the output of libraries to stderr
    with {"path": path, "bare": bare}[side](folder) as (sample, cpu_s):
        print("ready", file=out, flush=True)
        for _ in sys.stdin:
            before, began = cpu_s(), time.perf_counter()
            tokens = sample()
            wall = time.perf_counter() - began
            used = {name: after - before[name] for name, after in cpu_s().items()}
            print(json.dumps({"wall": wall, "tokens": tokens, "cpu": used}), file=out, flush=True)


class Side:
    def __init__(self, name, folder, logs):
        self.log = open(Path(logs) / f"{name}.log", "w", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, __file__, name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            encoding="utf-8",
            env={**os.environ, **ENVIRONMENT},
        )
        assert self.process.stdout.readline() == "ready\n", f"see {self.log.name}"

    def round(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        done = json.loads(self.process.stdout.readline())
        assert done["tokens"] == PROMPTS * TOKENS
        return done

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.log.close()


@pytest.mark.benchmark(group="64 prompts by vLLM", warmup=False)
def test_the_path_against_bare_generate(benchmark, tmp_path):
    for module in ("vllm", "psutil"):
        pytest.importorskip(module)
    from primerl import testing

    folder = os.environ.get("PRIMERL_SMOLLM2") or str(testing.smollm2(tmp_path / "smollm2"))
    rounds = {"bare": [], "path": []}
    with contextlib.ExitStack() as stack:
        sides = {}
        for name in rounds:
            sides[name] = Side(name, folder, os.environ.get("BENCH_LOGS", tmp_path))
            stack.callback(sides[name].close)
            sides[name].round()  # warm up

        def turn(name):
            rounds[name].append(sides[name].round())

        benchmark.pedantic(
            turn, args=("path",), setup=lambda: turn("bare"), rounds=ROUNDS, iterations=1
        )
    for name, done in rounds.items():
        wall = statistics.median(one["wall"] for one in done)
        parts = {p: statistics.median(one["cpu"][p] for one in done) for p in done[0]["cpu"]}
        row = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
        tokens_s = PROMPTS * TOKENS / wall
        print(f"\n{name}: {wall:.2f} s, {tokens_s:.0f} tokens/s; CPU seconds: {row}", end="")
    pairs = list(zip(rounds["bare"], rounds["path"], strict=True))
    ratios = [b["wall"] / p["wall"] for b, p in pairs]
    cpu = [sum(b["cpu"].values()) / sum(p["cpu"].values()) for b, p in pairs]
    ratio = statistics.median(ratios)
    print(
        f"\npath over bare: {ratio:.2f} of tokens/s {[round(r, 2) for r in sorted(ratios)]}", end=""
    )
    print(f"; {statistics.median(cpu):.2f} of tokens per CPU second")
    benchmark.extra_info.update(ratio=ratio, rounds=rounds)
    assert ratio >= 0.75


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2])
