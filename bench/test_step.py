"""One RL step of SmolLM2 on a CPU: our loop with vLLM, compared with the GRPO trainer of ``trl``.

    PRIMERL_SMOLLM2=folder python -m pytest bench/test_step.py -m "" --benchmark-only -s \
        -o addopts=--import-mode=importlib

Needs vLLM, trl and 12 GB of memory. The work is the same on both sides: the same 8 prompts in 8
rollouts each, all of exactly 64 tokens, one optimizer step on all of them. Each side has its own
process; they take turns, and the one that waits sleeps. A turn is two steps, of which the second
is measured: the first warms up. CPU seconds are summed over a side's processes, server included,
and are disturbed least by other work; wall seconds are what a user sees.

Both compute in bfloat16, on all cores. ``trl`` has a bfloat16 model, its fastest option
here (in another run, under load, float32 took 2.4 times the CPU seconds), and updates bfloat16
parameters. Ours updates float32 master weights. Ours runs with the variables of ``ENVIRONMENT``,
trl with its defaults, without them; STEP_TRL_TUNED=1 gives them to both.

STEP_ROUNDS, STEP_PROMPTS: other sizes than 3 rounds of 8 prompts. STEP_DTYPE=float32: both sides
in it. STEP_TRL_BATCH: the rollouts in a micro-batch of trl. STEP_WARM=0: turns of one step.
"""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROUNDS = int(os.environ.get("STEP_ROUNDS", 3))
PROMPTS = int(os.environ.get("STEP_PROMPTS", 8))
DTYPE = os.environ.get("STEP_DTYPE", "bfloat16")
WARM = os.environ.get("STEP_WARM", "1") == "1"
TRL_BATCH = int(os.environ.get("STEP_TRL_BATCH", 16))
TRL_TUNED = os.environ.get("STEP_TRL_TUNED", "0") == "1"
GROUP, TOKENS, LEARNING_RATE = 8, 64, 1e-6
# Two pools of threads take turns on the same cores: one that waits spins for under a millisecond,
# enough to bridge the gaps within a step of decoding. And memory that was freed is kept, instead of
# being returned to the system and cleared again at each use.
ENVIRONMENT = {
    "GOMP_SPINCOUNT": "200000",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def prompts():
    return [f"What is {11 + n} + {23 + 3 * n}? Reply with the number." for n in range(PROMPTS)]


def reward(reply):
    return len(reply) % 7 / 7


class Clock:
    """Seconds by phase: of the wall, and of the CPU of this process and of a server's."""

    def __init__(self, server_pid=None):
        self.server_pid = server_pid
        self.seconds = {}

    def now(self):
        return time.perf_counter(), time.process_time() + self.server_s()

    def server_s(self):
        import psutil

        total = 0.0
        if self.server_pid is not None:
            for process in psutil.Process(self.server_pid).children(recursive=True):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    @contextlib.contextmanager
    def phase(self, name):
        before = self.now()
        yield
        self.add(name, before)

    def add(self, name, before):
        wall, cpu = (b - a for a, b in zip(before, self.now(), strict=True))
        of_phase = self.seconds.setdefault(name, [0.0, 0.0])
        of_phase[0] += wall
        of_phase[1] += cpu


def ours(folder):
    """Yields seconds by phase, a step at a time."""
    import torch

    from primerl import models, rollout, weights

    cores = os.cpu_count()
    torch.set_num_threads(cores)
    settings = {
        "dtype": DTYPE,
        "enforce_eager": False,
        "block_size": 32,  # a prompt is cached in blocks; by default they have 128 tokens on a CPU
        "max_model_len": 512,
        "max_num_seqs": 64,
    }
    with (
        rollout.serve_vllm(folder, env={"OMP_NUM_THREADS": str(cores)}, **settings) as server,
        contextlib.closing(rollout.VLLMEngine(server)) as engine,
    ):
        model, tokenizer = models.load_pretrained(folder, dtype=getattr(torch, DTYPE))
        for layer in model.model.layers:
            layer.compile(dynamic=True)
        optimizer = MasterWeights(model.parameters())
        tokenizer.eos_token = None  # so that no reply ends early
        transport = weights.transport_to(model, engine)
        transport.publish(0)
        step = 0
        while True:
            yield  # until it is this side's turn
            clock, step = Clock(server.pid), step + 1
            with clock.phase("whole"):
                our_step(clock, model, optimizer, engine, tokenizer)
                with clock.phase("publish"):
                    transport.publish(step)
            yield clock.seconds


def our_step(clock, model, optimizer, engine, tokenizer):
    from primerl import advantage, loss, packing, rollout
    from primerl.types import Group, SamplingParams

    environment = rollout.single_turn(tokenizer, reward=lambda _, reply: reward(reply))
    params = SamplingParams(max_tokens=TOKENS)

    async def play():
        calls = [
            environment({"prompt": p}, engine, params) for p in prompts() for _ in range(GROUP)
        ]
        return await asyncio.gather(*calls)

    with clock.phase("generate"):
        played = asyncio.run(play())
    with clock.phase("forward and backward"):
        groups = [
            Group(task_id=str(n), rollouts=played[n * GROUP : (n + 1) * GROUP])
            for n in range(PROMPTS)
        ]
        samples = advantage.assign(groups, advantage.centered)
        trained = sum(int(sample.loss_mask.sum()) for sample in samples)
        assert trained == PROMPTS * GROUP * TOKENS
        (batches,) = packing.pack(samples, max_tokens=2048, ranks=1, share_prefixes=True)
        for b in batches:
            how = {"temperature": b.temperature, "rows": b.loss_mask}
            logprobs = loss.model_logprobs(model, b.token_ids, b.position_ids, b.labels, **how)
            per_token, _ = loss.dppo(logprobs, b.behavior_logprobs, b.advantages)
            loss.token_mean(per_token, b.loss_mask, denom=trained).backward()
    with clock.phase("optimizer"):
        optimizer.step()


class MasterWeights:
    """AdamW on float32 copies of the parameters, with their gradients clipped to a norm of 1."""

    def __init__(self, parameters):
        import torch

        self.parameters = list(parameters)
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self):
        import torch

        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.inner.step()
        self.inner.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)


def theirs(folder, turns):
    """Train with trl; ``turns`` yields when a step may begin, and is sent its seconds by phase."""
    import tempfile

    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(os.cpu_count())
    clock = Clock()

    class Timed(trl.GRPOTrainer):
        def _generate(self, *args, **kwargs):
            with clock.phase("generate"):
                return super()._generate(*args, **kwargs)

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            next(turns)
            clock.seconds.clear()
            self.began = clock.now()

        def on_pre_optimizer_step(self, *_, **__):
            self.optimizer_began = clock.now()

        def on_optimizer_step(self, *_, **__):
            clock.add("optimizer", self.optimizer_began)

        def on_step_end(self, *_, **__):
            clock.add("whole", self.began)
            known = [clock.seconds[name] for name in ("generate", "optimizer")]
            whole = clock.seconds["whole"]
            clock.seconds["forward and backward"] = [
                whole[i] - sum(k[i] for k in known) for i in (0, 1)
            ]
            turns.send(dict(clock.seconds))

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE))
    settings = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=min(TRL_BATCH, PROMPTS * GROUP),
        gradient_accumulation_steps=max(1, PROMPTS * GROUP // TRL_BATCH),
        num_generations=GROUP,
        max_completion_length=TOKENS,
        generation_kwargs={"min_new_tokens": TOKENS},
        learning_rate=LEARNING_RATE,
        max_steps=ROUNDS * (1 + WARM),
        use_cpu=True,
        bf16=DTYPE == "bfloat16",
        beta=0.0,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts()]
    Timed(
        model=model,
        reward_funcs=lambda completions, **_: [reward(c[0]["content"]) for c in completions],
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": chats}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        callbacks=[Turns()],
    ).train()


def child(side, folder):
    """Steps of one side: one for each line that comes in, answered by a line of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def turns():
        while True:
            print("ready", file=out, flush=True)  # and asleep
            if not sys.stdin.readline():
                sys.exit()
            seconds = yield
            print(json.dumps(seconds), file=out, flush=True)
            yield

    if side == "theirs":
        theirs(folder, turns())
        return
    steps, asked = ours(folder), turns()
    for _ in steps:
        next(asked)
        asked.send(next(steps))


class Side:
    def __init__(self, name, folder):
        self.log = open(Path(os.environ.get("STEP_LOGS", "/tmp")) / f"step-{name}.log", "w")  # noqa: SIM115
        tuned = name == "ours" or TRL_TUNED
        self.process = subprocess.Popen(
            [sys.executable, __file__, name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(ENVIRONMENT if tuned else {})},
        )

    def step(self):
        assert self.process.stdout.readline() == "ready\n", f"see {self.log.name}"
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"exit {self.process.wait(60)}, see {self.log.name}"
        return json.loads(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.log.close()


def report(name, steps):
    phases = list(steps[0])
    medians = {p: [statistics.median(step[p][i] for step in steps) for i in (0, 1)] for p in phases}
    row = "  ".join(f"{p} {wall:.1f} ({cpu:.1f})" for p, (wall, cpu) in medians.items())
    print(f"{name}: wall (CPU) seconds: {row}", flush=True)
    return medians


@pytest.mark.benchmark(group="one step of GRPO", warmup=False)
def test_a_step_against_trl(benchmark, tmp_path):
    for module in ("vllm", "trl", "psutil"):
        pytest.importorskip(module)
    from primerl import testing

    folder = os.environ.get("PRIMERL_SMOLLM2") or str(testing.smollm2(tmp_path / "smollm2"))
    with contextlib.ExitStack() as stack:
        sides = {}
        for name in ("ours", "theirs"):
            sides[name] = Side(name, folder)
            stack.callback(sides[name].close)
        steps = {name: [] for name in sides}

        def turn(name):
            for counts in (False, True) if WARM else (True,):
                seconds = sides[name].step()
                print(f"\n{name}{'' if counts else ' (warm-up)'}", seconds, flush=True)
            steps[name].append(seconds)

        benchmark.pedantic(
            turn, args=("ours",), setup=lambda: turn("theirs"), rounds=ROUNDS, iterations=1
        )
    print()
    medians = {name: report(name, of_side) for name, of_side in steps.items()}
    wall, cpu = (
        statistics.median(t["whole"][i] / o["whole"][i] for t, o in zip(*both, strict=True))
        for i in (0, 1)
        for both in [(steps["theirs"], steps["ours"])]
    )
    print(f"trl over ours: {wall:.2f} of wall time, {cpu:.2f} of CPU time")
    benchmark.extra_info.update(medians=medians, wall_ratio=wall, cpu_ratio=cpu)
    assert wall >= 3


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2])
