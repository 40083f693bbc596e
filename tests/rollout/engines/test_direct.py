"""Engines that a child samples from: what the parent records, with a pool of local processes."""

import asyncio
import itertools
import os

import numpy as np
import pytest

from primerl import rollout
from primerl.rollout.collection.groups import Progress
from primerl.rollout.engines.health import EngineHealth
from primerl.rollout.processes.pickling import pickle_arguments
from primerl.rollout.processes.supervised import SupervisedProcess
from primerl.rollout.ray_actors.environment import RayEnvironment
from primerl.types import NOT_SAMPLED, Completion, Rollout, Sample, SamplingParams

PARAMS = SamplingParams(max_tokens=3)


class Scripted:
    """A portable engine that fails or answers as its script says, call by call."""

    portable = True
    context_length = 100

    def __init__(self, *script):
        self.version = 0
        self.script = script
        self.calls = itertools.count()

    def learn(self, version):
        self.version = version

    async def generate(self, prompt_ids, params, *, session=None):
        number = next(self.calls)
        match self.script[number] if number < len(self.script) else "answer":
            case "fail":
                raise ConnectionError("lost")
            case "refuse":
                raise ValueError("refused")
            case "long":
                count = params.max_tokens + 1
            case _:
                count = params.max_tokens
        return Completion(
            token_ids=np.arange(count),
            logprobs=np.full(count, -1.0),
            versions=np.full(count, self.version),
            finish_reason="length",
            routes=(f"file:{os.getpid()}:{number}:{session}",),
        )

    def close(self):
        self.closed = True


async def one_turn(task, engine, params):
    reply = await engine.generate([2, 3], params, session="mine")
    return Rollout(
        samples=[
            Sample(
                token_ids=[2, 3, *reply.token_ids],
                loss_mask=[False, False, True, True, True],
                behavior_logprobs=[0, 0, *reply.logprobs],
                versions=[NOT_SAMPLED] * 2 + reply.versions.tolist(),
            )
        ],
        reward=1.0,
        metrics={"pid": os.getpid()},
    )


class OnThisHost(RayEnvironment):
    """The environment with processes of this host in the place of actors."""

    def __init__(self):
        super().__init__(
            pickle_arguments(environment=one_turn),
            actors=(1, 1),
            rollouts_per_actor=4,
            resources={},
            address=None,
            timeout_s=60.0,
            start_timeout_s=60.0,
            drain_timeout_s=60.0,
            idle_s=60.0,
            threads=1,
        )
        self._pool._make = SupervisedProcess

    async def _connected(self):
        pass


def play(engine, *, version=0, health=None):
    """Play one rollout; return it, or its error, the engine's observer and the recorded counts."""
    progress = Progress(name="group")
    counts = {}

    async def run():
        environment = OnThisHost()
        observed = progress.observe(engine, 0, health and EngineHealth("scripted", timeout_s=60.0))
        try:
            result = await environment({}, observed, PARAMS)
        except Exception as error:
            result = error
        finally:
            await environment.aclose()
        if observed._health is not None:
            counts.update(observed._health.errors)
        return result, observed

    engine.version = version
    return *asyncio.run(run()), progress, counts


def test_a_completion_is_sampled_in_the_child_and_recorded_by_the_parent():
    engine = Scripted()

    played, observed, progress, _ = play(engine, version=7)

    assert next(engine.calls) == 0  # the original was never called
    assert played.samples[0].versions.tolist() == [-1, -1, 7, 7, 7]
    pid = int(played.metrics["pid"])
    assert pid != os.getpid()
    assert observed.routes_of_calls == {f"file:{pid}:0:group.0.0"}
    assert progress.tokens == 3
    assert progress.oldest == {0: 7}


def test_an_outage_waits_and_is_counted_by_the_engines_health():
    played, observed, progress, errors = play(Scripted("fail", "fail"), health=True)

    assert played.reward == 1.0
    assert errors == {"ConnectionError": 2}
    assert observed.outage is None
    assert progress.tokens == 3


@pytest.mark.parametrize(
    ("script", "kind"), [("refuse", ValueError), ("long", rollout.BadCompletion)]
)
def test_refusals_and_bad_completions_are_raised_and_recorded(script, kind):
    played, observed, progress, _ = play(Scripted(script), health=True)

    assert type(played) is kind
    assert (observed.bad is not None) == (kind is rollout.BadCompletion)
    assert progress.tokens == 0
