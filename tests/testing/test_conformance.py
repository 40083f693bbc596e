"""The checks of an engine: good engines pass, and each broken one fails where it is broken."""

import asyncio
import re
import time

import attrs
import numpy as np
import pytest

from primerl import rollout, testing, weights
from primerl.testing import engine_checks

NAMES = [check.__name__ for check in engine_checks.CHECKS]


def publisher(engine):
    return lambda version: engine.update_weights({}, version=version)


def failures(engine, **settings):
    """The names of the checks that an engine fails."""
    settings = {"update": publisher(engine)} | settings
    try:
        testing.check_engine(engine, **settings)
    except AssertionError as error:
        return re.findall(r"^- (\w+) failed", str(error), re.MULTILINE)
    return []


@pytest.mark.parametrize("latency", [0.0, testing.lognormal(median_s=0.003)])
def test_the_scripted_engine_passes(latency):
    engine = testing.ScriptedEngine(
        [[n, n + 1, 9] for n in range(2, 20)], latency=latency, context_length=500
    )

    outcomes = testing.check_engine(engine, update=publisher(engine))

    assert list(outcomes) == NAMES
    assert set(outcomes.values()) == {"passed"}
    assert engine.in_flight == 0


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_the_transformers_engine_passes(mode):
    model = testing.tiny_model("qwen3")
    with rollout.TransformersEngine(model, on_update=mode, seed=0) as engine:
        publish = weights.SharedMemory(model, engine).publish
        outcomes = testing.check_engine(engine, update=publish)

    assert set(outcomes.values()) == {"passed"}


def test_the_engine_of_the_documentation_passes_its_test(root):
    page = (root / "docs" / "engines.md").read_text()
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)

    names["test_the_contract"]()


def test_checks_of_updates_are_skipped_and_a_long_context_is_not_filled():
    outcomes = testing.check_engine(testing.ScriptedEngine())

    skipped = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    assert skipped.pop("full_context").startswith("skipped: the context of 32768 tokens")
    assert skipped == dict.fromkeys(
        ["update", "update_in_flight", "update_back"], "skipped: no update= was given"
    )


class Broken(testing.ScriptedEngine):
    """Breaks one rule, by changing what it is asked or what it answers."""

    def __init__(self, **settings):
        super().__init__([[2, 3, 4, 5, 6, 7]], **settings)

    def change(self, params):
        return params

    def corrupt(self, completion, params):
        return completion

    async def generate(self, prompt_ids, params, *, session=None):
        completion = await super().generate(prompt_ids, self.change(params), session=session)
        return self.corrupt(completion, params)


class PositiveLogprobs(Broken):
    def corrupt(self, completion, params):
        return attrs.evolve(completion, logprobs=-completion.logprobs)


class NotANumber(Broken):
    def corrupt(self, completion, params):
        return attrs.evolve(completion, logprobs=completion.logprobs * np.nan)


class OldVersions(Broken):
    """Every token is said to be of the first version: known at once to be wrong after an update."""

    def corrupt(self, completion, params):
        return attrs.evolve(completion, versions=np.zeros_like(completion.versions))


class NextVersion(Broken):
    def corrupt(self, completion, params):
        return attrs.evolve(completion, versions=completion.versions + 1)


class TooLong(Broken):
    def corrupt(self, completion, params):
        if completion.finish_reason == "stop" or params.temperature == 0:
            return completion
        return doubled(completion)


def doubled(completion):
    twice = {
        name: np.repeat(getattr(completion, name), 2)
        for name in ("token_ids", "logprobs", "versions")
    }
    return attrs.evolve(completion, **twice)


class OwnStop(Broken):
    """Ends where the model's own end-of-text token comes, though nobody asked for it."""

    def change(self, params):
        return attrs.evolve(params, stop_token_ids=[*params.stop_token_ids, 7])


class WrongReason(Broken):
    def corrupt(self, completion, params):
        return attrs.evolve(completion, finish_reason="length")


class LosesTheStopToken(Broken):
    def corrupt(self, completion, params):
        if completion.finish_reason == "length":
            return completion
        shorter = {n: getattr(completion, n)[:-1] for n in ("token_ids", "logprobs", "versions")}
        return attrs.evolve(completion, **shorter)


class IgnoresTemperature(Broken):
    def __init__(self):
        super().__init__()
        self.turn = 0

    def corrupt(self, completion, params):
        self.turn += 1
        if params.stop_token_ids:
            return completion
        return attrs.evolve(completion, token_ids=np.roll(completion.token_ids, self.turn))


class MixesAnswers(Broken):
    """Hands a request the answer of the one that ended before it."""

    async def generate(self, prompt_ids, params, *, session=None):
        answer = await super().generate(prompt_ids, params, session=session)
        if self.peak_in_flight > 1 and self.in_flight > 0:
            other = attrs.evolve(params, max_tokens=params.max_tokens + 1)
            return await super().generate(prompt_ids, other)
        return answer


class Forever(Broken):
    """Long requests, such as those that are cancelled, never end."""

    async def generate(self, prompt_ids, params, *, session=None):
        completion = await super().generate(prompt_ids, params)
        if params.max_tokens > 1000:
            await asyncio.sleep(3600)
        return completion


class SwallowsCancellation(Forever):
    async def generate(self, prompt_ids, params, *, session=None):
        try:
            return await super().generate(prompt_ids, params)
        except asyncio.CancelledError:
            return await super().generate(prompt_ids, attrs.evolve(params, max_tokens=1))


class CancelsLate(Broken):
    """Keeps sampling for three seconds after a cancellation."""

    async def generate(self, prompt_ids, params, *, session=None):
        completion = await super().generate(prompt_ids, params)
        end = time.monotonic() + 3
        while params.max_tokens > 1000 and time.monotonic() < end:
            try:
                await asyncio.sleep(3)
            except asyncio.CancelledError:
                continue
        return completion


class LeaksSlots(Forever):
    """A request that is cancelled keeps its slot for good."""

    free = 16

    async def generate(self, prompt_ids, params, *, session=None):
        while self.free == 0:
            await asyncio.sleep(0.001)
        self.free -= 1
        completion = await super().generate(prompt_ids, params)
        self.free += 1
        return completion


class NoSession(Broken):
    async def generate(self, prompt_ids, params):
        return await super().generate(prompt_ids, params)


class AnyPrompt(Broken):
    async def generate(self, prompt_ids, params, *, session=None):
        return await super().generate(prompt_ids or [0], params)


class OtherError(Broken):
    async def generate(self, prompt_ids, params, *, session=None):
        if not prompt_ids:
            raise IndexError("list index out of range")
        return await super().generate(prompt_ids, params)


class CutsPrompts(Broken):
    async def generate(self, prompt_ids, params, *, session=None):
        room = self.context_length - params.max_tokens
        return await super().generate(prompt_ids[-room:], params)


class OneTokenLess(Broken):
    async def generate(self, prompt_ids, params, *, session=None):
        if len(prompt_ids) + params.max_tokens >= self.context_length and len(prompt_ids) > 3:
            raise ValueError("too long")
        return await super().generate(prompt_ids, params)


class NeverUpdates(Broken):
    def update_weights(self, tensors, *, version, timeout_s=1.0):
        if version < self.version:
            raise ValueError("older")


class GoesBack(Broken):
    def update_weights(self, tensors, *, version, timeout_s=1.0):
        self._updates.append((time.monotonic(), version))


class WaitsForUpdates(Broken):
    """The long requests of the check with updates end when one has come."""

    async def generate(self, prompt_ids, params, *, session=None):
        before = self.version
        completion = await super().generate(prompt_ids, params)
        while 16 < params.max_tokens < 1000 and self.version == before:
            await asyncio.sleep(0.001)
        return self.break_update(completion, before)

    def break_update(self, completion, before):
        return completion


class FailsInFlight(WaitsForUpdates):
    def break_update(self, completion, before):
        if self.version != before:
            raise ConnectionError("the server restarted")
        return completion


class VersionsGoBack(WaitsForUpdates):
    def break_update(self, completion, before):
        versions = completion.versions.copy()
        versions[0] = self.version
        versions[1:] = before
        return attrs.evolve(completion, versions=versions)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Broken, []),
        (PositiveLogprobs, ["logprobs", "every_answer"]),
        (NotANumber, ["logprobs", "every_answer"]),
        (OldVersions, ["update", "update_in_flight", "every_answer"]),
        (NextVersion, ["versions", "update", "update_in_flight", "every_answer"]),
        (TooLong, ["max_tokens", "concurrency", "every_answer"]),
        (OwnStop, ["max_tokens", "concurrency", "every_answer"]),
        (WrongReason, ["stop_tokens", "every_answer"]),
        (LosesTheStopToken, ["stop_tokens", "every_answer"]),
        (IgnoresTemperature, ["greedy", "stop_tokens"]),
        (MixesAnswers, ["concurrency", "every_answer"]),
        (SwallowsCancellation, ["cancellation", "every_answer"]),
        (NoSession, ["session"]),
        (AnyPrompt, ["empty_prompt"]),
        (OtherError, ["empty_prompt"]),
        (lambda: CutsPrompts(context_length=200), ["too_long", "every_answer"]),
        (lambda: OneTokenLess(context_length=200), ["full_context"]),
        (NeverUpdates, ["update"]),
        (GoesBack, ["update_back"]),
        (Forever, []),
        (WaitsForUpdates, []),
        (FailsInFlight, ["update_in_flight"]),
        (VersionsGoBack, ["update_in_flight", "every_answer"]),
    ],
)
def test_a_broken_engine_fails_where_it_is_broken(make, expected):
    assert failures(make()) == expected


class NoGenerate:
    version = 0
    context_length = 100


class TextVersion(Broken):
    version = "latest"


class Synchronous(Broken):
    def generate(self, prompt_ids, params, *, session=None):
        return {"token_ids": [3]}


class ReturnsADict(Broken):
    def corrupt(self, completion, params):
        return {"token_ids": completion.token_ids.tolist()}


class Empty(Broken):
    def corrupt(self, completion, params):
        nothing = np.zeros(0)
        return attrs.evolve(completion, token_ids=nothing, logprobs=nothing, versions=nothing)


class OtherReason(Broken):
    def corrupt(self, completion, params):
        return attrs.evolve(completion, finish_reason="eos")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoGenerate, "protocol failed: expected version, context_length and generate"),
        (TextVersion, "protocol failed: version is 'latest', expected an integer"),
        (Synchronous, "completion failed: generate returned dict, which can't be awaited"),
        (ReturnsADict, "completion failed: generate returned dict, expected primerl.types.Compl"),
        (Empty, "completion failed: the completion is empty"),
        (OtherReason, "completion failed: finish_reason is 'eos', expected 'stop' or 'length'"),
    ],
)
def test_without_the_protocol_the_other_checks_are_not_run(make, message):
    with pytest.raises(
        AssertionError, match=f"{make.__name__} fails 1 of .*\n- {message}"
    ) as caught:
        testing.check_engine(make())

    assert str(caught.value).endswith("- every_answer was not run")


def test_an_engine_that_leaks_is_abandoned():
    with pytest.raises(AssertionError, match="cancellation failed: no end within 3 s"):
        testing.check_engine(LeaksSlots(), timeout_s=3.0)


def test_an_engine_that_blocks_the_loop_is_abandoned():
    class Blocks(Broken):
        async def generate(self, prompt_ids, params, *, session=None):
            time.sleep(1.0)
            return await super().generate(prompt_ids, params)

    with pytest.raises(AssertionError, match="completion failed: no end within 0.1 s"):
        testing.check_engine(Blocks(), timeout_s=0.1)


def test_an_engine_that_cancels_late(monkeypatch):
    monkeypatch.setattr(engine_checks, "CANCEL_S", 0.1)

    with pytest.raises(AssertionError, match="16 cancelled requests run on after 0.1 s") as caught:
        testing.check_engine(CancelsLate())

    assert "fails 1 of 18" in str(caught.value)


def test_an_error_of_the_engine_is_named_with_its_type():
    engine = testing.ScriptedEngine(
        failures=lambda number: KeyError("slot") if number == 1 else None
    )
    with pytest.raises(AssertionError, match="- logprobs failed: KeyError: 'slot'"):
        testing.check_engine(engine)
