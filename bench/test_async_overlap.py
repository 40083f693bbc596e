"""Effect of the staleness bound K on the step time, with a sleeping trainer and slow rollouts.

    python -m pytest bench/test_async_overlap.py -m "" --benchmark-only -s

The length of a reply is lognormal, with a 99th percentile of 10 times the median, and its duration
is proportional to its length. A group has 8 rollouts and a step 8 groups, so at most 8 (K + 1)
groups are in flight. A training step takes 3 times the median duration of a reply. Each row shows:

- the mean time of a step over its ideal time (step/ideal): the larger of the trainer's time and the
  time in which the groups in flight generate the rollouts of a step;
- the mean time of a step over the trainer's time;
- the fraction of groups dropped for staleness;
- the mean length, in tokens, of the groups dropped, trained and generated.

A second benchmark evaluates 64 held-out tasks every second step: training waits for that, or goes
on beside it. Each row shows the seconds of 20 steps, those that the trainer waited for evaluations,
and the mean number of steps that were taken until the results of an evaluation arrived.

Everything but the model is real: worker process, admission, buffer and cancellation.
"""

import math
import random
import time
from collections import defaultdict

import attrs
import pytest

from primerl import rollout, testing
from primerl.types import NOT_SAMPLED, Rollout, Sample, SamplingParams

MEDIAN_TOKENS, MEDIAN_S = 50, 0.1
TRAINER_S = 3 * MEDIAN_S
GROUPS, SIZE = 8, 8
SIGMA = math.log(10) / 2.3263
WARM_UP, STEPS = 10, {0: 20, 1: 60, 2: 60, 4: 80, 8: 100}
MAX_TOKENS = 10_000
EVALUATED_STEPS, EVALUATE_EVERY, HELD_OUT, EVALUATION_WARM_UP = 20, 2, 64, 4
rows: dict[int, dict[str, float]] = {}
evaluated: dict[str, str] = {}


def tasks():
    """Return tasks with fixed rollout lengths, which are then known for dropped groups too."""
    draw, tasks = random.Random(0), []
    for number in range(4000):
        lengths = [
            min(MAX_TOKENS, max(1, round(draw.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))))
            for _ in range(SIZE)
        ]
        tasks.append({"id": str(number), "lengths": lengths, "next": 0})
    return tasks


def environment_of_known_lengths():
    calls = defaultdict(int)

    async def environment(task, engine, params):
        length = task["lengths"][calls[task["id"]]]
        calls[task["id"]] += 1
        reply = await engine.generate([2], attrs.evolve(params, max_tokens=length))
        return Rollout(
            samples=[
                Sample(
                    token_ids=[2, *reply.token_ids],
                    loss_mask=[False] + [True] * length,
                    behavior_logprobs=[0.0, *reply.logprobs],
                    versions=[NOT_SAMPLED, *reply.versions],
                )
            ],
            reward=length,
        )

    return environment


def mean_tokens(groups):
    return sum(sum(task["lengths"]) for task in groups) / max(1, len(groups))


@pytest.mark.benchmark(group="async overlap", warmup=False)
@pytest.mark.parametrize("bound", sorted(STEPS))
def test_a_step(benchmark, bound):
    dataset, steps = tasks(), STEPS[bound]
    engine = testing.ScriptedEngine([[3]], seconds_per_token=MEDIAN_S / MEDIAN_TOKENS)
    trained: list[str] = []
    version = 0

    with rollout.worker(
        engine,
        environment_of_known_lengths(),
        dataset,
        params=SamplingParams(max_tokens=MAX_TOKENS),
        group_size=SIZE,
        groups_per_step=GROUPS,
        max_staleness=bound,
    ) as rollouts:

        def step():
            nonlocal version
            trained.extend(group.task_id for group in rollouts.take(version=version))
            time.sleep(TRAINER_S)
            version += 1
            engine.update_weights({}, version=version)

        for _ in range(WARM_UP):
            step()
        before = rollouts.stats()
        began = time.perf_counter()
        benchmark.pedantic(step, rounds=steps, iterations=1)
        step_s = (time.perf_counter() - began) / steps
        after = rollouts.stats()

    # Among the groups that have certainly ended, those that were not trained were dropped.
    ended = dataset[: after["started"] - after["in_flight"] - after["buffered"] - 2 * GROUPS]
    done = set(trained)
    dropped = [task for task in ended if task["id"] not in done]
    span_s = [max(task["lengths"]) * MEDIAN_S / MEDIAN_TOKENS for task in ended]
    generation_s = GROUPS * sum(span_s) / len(span_s) / (GROUPS * (bound + 1))
    started = after["started"] - before["started"]
    share = sum(
        after["dropped_by"].get(name, 0) - before["dropped_by"].get(name, 0)
        for name in ("stale", "cancelled")
    ) / max(1, started)
    rows[bound] = {
        "step/ideal": step_s / max(TRAINER_S, generation_s),
        "step/trainer": step_s / TRAINER_S,
        "dropped": share,
        "tokens dropped": mean_tokens(dropped),
        "tokens trained": mean_tokens([task for task in ended if task["id"] in done]),
        "tokens generated": mean_tokens(ended),
        "lag p99 ms": 1e3 * after["loop_lag_p99_s"],
    }
    benchmark.extra_info.update(rows[bound])
    if bound == max(STEPS):
        report()
        assert rows[bound]["step/ideal"] <= 1.10
        assert rows[bound]["dropped"] <= 0.01


@pytest.mark.benchmark(group="evaluation", warmup=False)
@pytest.mark.parametrize("how", ["never", "waiting", "beside"])
def test_evaluation_every_second_step(benchmark, how):
    dataset = tasks()
    held_out = [
        task | {"lengths": task["lengths"] * EVALUATED_STEPS} for task in dataset[-HELD_OUT:]
    ]
    for task in held_out:
        random.Random(task["id"]).shuffle(task["lengths"])
    params = SamplingParams(max_tokens=MAX_TOKENS)
    engine = testing.ScriptedEngine([[3]], seconds_per_token=MEDIAN_S / MEDIAN_TOKENS)
    late = []

    with rollout.worker(
        engine,
        environment_of_known_lengths(),
        dataset[:-HELD_OUT],
        params=params,
        group_size=SIZE,
        groups_per_step=GROUPS,
        max_staleness=4,
    ) as rollouts:

        def step(version, how):
            if how == "waiting" and version % EVALUATE_EVERY == 0:
                late.append(0)
                rollouts.evaluate(held_out, params)
            if rollouts.evaluation_due(version, every=EVALUATE_EVERY if how == "beside" else 0):
                rollouts.start_evaluation(held_out, params, version=version)
            late.extend(version - ended.version for ended in rollouts.ended_evaluations())
            rollouts.take(version=version)
            time.sleep(TRAINER_S)
            engine.update_weights({}, version=version + 1)

        def train():
            for version in range(EVALUATION_WARM_UP, EVALUATION_WARM_UP + EVALUATED_STEPS):
                step(version, how)
            late.extend(
                EVALUATION_WARM_UP + EVALUATED_STEPS - one.version
                for one in rollouts.ended_evaluations(60)
            )

        for version in range(EVALUATION_WARM_UP):
            step(version, "never")
        began = time.perf_counter()
        benchmark.pedantic(train, rounds=1, iterations=1)
        seconds = time.perf_counter() - began
        waited = rollouts.stats()["evaluation_wait_s"]

    mean_late = sum(late) / max(1, len(late))
    evaluated[how] = f"{seconds:.1f} s, waited {waited:.1f} s, {mean_late:.1f} steps late"
    assert len(late) == (0 if how == "never" else EVALUATED_STEPS // EVALUATE_EVERY)
    if how == "beside":
        print("", *(f"{name}: {row}" for name, row in evaluated.items()), sep="\n")


def report():
    names = list(rows[0])
    print("\n   K " + "".join(f"{name:>18}" for name in names))
    for bound, row in sorted(rows.items()):
        print(f"{bound:>4} " + "".join(f"{row[name]:>18.3f}" for name in names))
