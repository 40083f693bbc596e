"""Scores of samples by a teacher: how they are asked for, and what becomes of samples without."""

import asyncio
import math
import time

import attrs
import numpy as np
import pytest

from primerl import rollout
from primerl.types import NOT_SAMPLED, TrainingSample


def sample(*tokens, prompt=1, temperature=1.0):
    mask = np.arange(len(tokens)) >= prompt
    return TrainingSample(
        token_ids=tokens,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -1.0, 0.0),
        versions=np.where(mask, 0, NOT_SAMPLED),
        advantages=np.zeros(len(tokens)),
        temperature=temperature,
    )


class Teacher:
    """Scores a token at minus its id; ``act`` may do something else for a sequence."""

    def __init__(self, act=None):
        self.act = act
        self.running = self.peak = 0

    async def score(self, token_ids):
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(0.001)
            if self.act is not None and (found := await self.act(token_ids)) is not None:
                return found
            return -np.array(token_ids, np.float32)
        finally:
            self.running -= 1

    async def score_top_k(self, token_ids, *, k):
        scores = await self.score(token_ids)
        ids = np.tile(np.arange(k), (len(token_ids), 1))
        return scores, ids, -ids.astype(np.float32)


def test_every_sample_gets_its_own_scores():
    samples = [sample(9, 1), sample(9, 2, 3), sample(9, 4)]

    scores = rollout.score_samples(Teacher(), samples)
    scored, missing = rollout.with_scores(samples, scores)

    assert [one.ref_logprobs.tolist() for one in scored] == [[-9, -1], [-9, -2, -3], [-9, -4]]
    assert [one.token_ids.tolist() for one in scored] == [[9, 1], [9, 2, 3], [9, 4]]
    assert all(
        (one.loss_mask == own.loss_mask).all() for one, own in zip(scored, samples, strict=True)
    )
    assert all(one.ref_top_ids is None for one in scored)
    assert missing == []


def test_the_top_tokens_too():
    samples = [sample(9, 1), sample(9, 2, 3)]

    scores = rollout.score_samples(Teacher(), samples, top_k=3)
    scored, missing = rollout.with_scores(samples, scores, top_k=3)

    assert [one.ref_logprobs.tolist() for one in scored] == [[-9, -1], [-9, -2, -3]]
    assert scored[1].ref_top_ids.tolist() == [[0, 1, 2]] * 3
    assert scored[1].ref_top_ids.dtype == np.int32
    assert scored[0].ref_top_logprobs.tolist() == [[0, -1, -2]] * 2
    assert missing == []


def test_many_are_asked_for_at_once_but_not_too_many():
    teacher = Teacher()

    rollout.score_samples(teacher, [sample(9, 1)] * 40, max_concurrent=8)

    assert teacher.peak == 8


async def act(token_ids):
    """What goes wrong is the sample's last token."""
    if token_ids[-1] == 1:
        raise ValueError("too long")
    if token_ids[-1] == 2:
        raise RuntimeError("the teacher died")
    if token_ids[-1] == 3:
        await asyncio.sleep(1e6)
    if token_ids[-1] == 4:
        return np.array([0.0, math.nan, -1.0], np.float32)
    if token_ids[-1] == 5:
        return np.zeros(2, np.float32)
    if token_ids[-1] == 6:
        return np.array([math.nan, math.nan, -6.0], np.float32)  # of a prompt, it may be anything
    return None


@pytest.mark.parametrize("top_k", [0, 2])
def test_samples_without_scores_are_not_trained_and_counted_by_reason(top_k):
    samples = [sample(9, 9, last, prompt=2 if last == 6 else 1) for last in range(8) if last != 3]

    scores = rollout.score_samples(Teacher(act), samples, top_k=top_k)
    scored, missing = rollout.with_scores(samples, scores, top_k=top_k)

    assert [one.reason for one in missing] == [
        "refused",
        "failed",
        "not finite",
        "incomplete",
    ]
    errors = [one.error for one in missing]
    assert errors[:2] == ["ValueError: too long", "RuntimeError: the teacher died"]
    assert "shape (2,); expected (3,)" in errors[3]
    trained = [one.loss_mask.any() for one in scored]
    assert trained == [True, False, False, False, False, True, True]
    for one, own in zip(scored, samples, strict=True):
        assert one.token_ids.tolist() == own.token_ids.tolist()
        if not one.loss_mask.any():
            assert not one.ref_logprobs.any()
        assert (one.ref_top_ids is not None) == bool(top_k)


def test_a_score_that_never_comes_is_not_waited_for():
    samples = [sample(9, 3), sample(9, 9, 3)]
    began = time.monotonic()

    scores = rollout.score_samples(Teacher(act), samples, timeout_s=0.5)
    scored, missing = rollout.with_scores(samples, scores)

    assert time.monotonic() - began < 30
    assert [one.reason for one in missing] == ["timeout", "timeout"]
    assert all("within 0.5 s" in one.error for one in missing)
    assert not any(one.loss_mask.any() for one in scored)


def test_scores_computed_in_this_process_are_checked_alike():
    samples = [sample(9, 1), sample(9, 2), sample(9, 3)]
    good = {"ref_logprobs": np.array([0.0, -1.0])}

    scored, missing = rollout.with_scores(
        samples, [good, {}, {"ref_logprobs": np.array([0.0, -math.inf])}]
    )

    assert [one.loss_mask.any() for one in scored] == [True, False, False]
    assert [one.reason for one in missing] == ["incomplete", "not finite"]
    _, missing = rollout.with_scores(samples[:1], [good], top_k=2)
    assert [one.reason for one in missing] == ["incomplete"]
    assert "ref_top_ids has shape none; expected (2, 2)" in missing[0].error


def test_a_sample_that_trains_nothing_misses_nothing():
    nothing = attrs.evolve(sample(9, 1), loss_mask=[False, False])

    scored, missing = rollout.with_scores([nothing], [rollout.NoScores("failed", "down")])

    assert missing == []
    assert not scored[0].loss_mask.any()


def test_without_samples_there_is_nothing_to_ask():
    assert rollout.score_samples(None, []) == []
    assert rollout.with_scores([], []) == ([], [])


def test_mistakes_are_refused():
    teacher, one = Teacher(), [sample(9, 1)]

    for wrong in ({"top_k": -1}, {"timeout_s": 0}, {"max_concurrent": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            rollout.score_samples(teacher, one, **wrong)
    with pytest.raises(ValueError, match=r"temperature 0.5, and teachers score at 1"):
        rollout.score_samples(teacher, [sample(9, 1, temperature=0.5)])
    with pytest.raises(ValueError, match="there are 2 scores; expected 1"):
        rollout.with_scores(one, [{}, {}])


def test_it_can_be_called_within_an_event_loop():
    """As from a notebook."""

    async def cell():
        return rollout.score_samples(Teacher(), [sample(9, 1)])

    (scores,) = asyncio.run(cell())
    assert scores["ref_logprobs"].tolist() == [-9, -1]
