"""Composed algorithms, against each paper's objective written out in plain loops.

One small batch of groups with rollouts of unequal lengths goes both ways: through groups,
advantages, packing over two ranks, a token loss and a reduction; and through the sums of the paper
over rollouts and tokens, whose gradient is taken by finite differences. There, ``held`` is the
policy where the paper stops the gradient.
"""

import math
import statistics

import attrs
import numpy as np
import pytest
import torch

from primerl import advantage, loss, packing
from primerl.types import Group, Rollout, Sample, TrainingSample

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.25, 0.5, 1.0, 0.0, 0.125]]
PROMPT = 2
MAX_TOKENS = 8
"""The constant length of Dr. GRPO."""


@attrs.frozen(eq=False, kw_only=True)
class Episode:
    """A rollout: its tokens' ids and logprobs, by several models, without the prompt."""

    group: int
    reward: float
    ids: np.ndarray
    logprobs: np.ndarray
    behavior: np.ndarray
    proximal: np.ndarray
    ref: np.ndarray

    def __len__(self):
        return len(self.ids)


def random_episodes(seed):
    rng = np.random.default_rng(seed)
    episodes, start = [], 0
    for group, rewards in enumerate(REWARDS):
        for reward in rewards:
            length = int(rng.integers(1, MAX_TOKENS + 1))
            # As exact as the batch holds them: float32.
            behavior = -rng.uniform(0.1, 2.5, length).astype(np.float32).astype(float)
            drift, noise = 0.2 * rng.standard_normal(), 0.4 * rng.standard_normal((3, length))
            episodes.append(
                Episode(
                    group=group,
                    reward=reward,
                    ids=np.arange(start + PROMPT, start + PROMPT + length),
                    logprobs=np.minimum(behavior + drift + noise[0], -1e-3),
                    behavior=behavior,
                    proximal=behavior + noise[1],
                    ref=(behavior + noise[2]).astype(np.float32).astype(float),
                )
            )
            start += PROMPT + length
    return episodes


# The papers' side: advantages of rollouts.


def rewards_of(episodes, group):
    return [e.reward for e in episodes if e.group == group]


def by_group(formula):
    return lambda episodes: [formula(e.reward, rewards_of(episodes, e.group)) for e in episodes]


minus_mean = by_group(lambda r, rs: r - sum(rs) / len(rs))
in_deviations = by_group(lambda r, rs: (r - statistics.mean(rs)) / (statistics.pstdev(rs) + 1e-6))
minus_the_others = by_group(lambda r, rs: r - (sum(rs) - r) / (len(rs) - 1))
relative_to_mean = by_group(lambda r, rs: (r - sum(rs) / len(rs)) / (sum(rs) / len(rs)))


def whitened_over_tokens(episodes):
    tokens = [e.reward for e in episodes for _ in e.ids]
    mean, deviation = statistics.mean(tokens), statistics.pstdev(tokens)
    return [(e.reward - mean) / (deviation + 1e-8) for e in episodes]


# Objectives of one token: x and held are the policy's logprob, with and without gradient.


def clip(x, low, high):
    return min(max(x, low), high)


def ppo(x, mu, a, low=0.2, high=0.2):
    r = math.exp(x - mu)
    return min(r * a, clip(r, 1 - low, 1 + high) * a)


def schulman(x, ref):
    return math.exp(ref - x) - (ref - x) - 1


def tokens(episodes, x, held, advantages):
    """For every token: rollout, advantage, x, held, and the position in the rollout."""
    for e, own, own_held, a in zip(episodes, x, held, advantages, strict=True):
        for t in range(len(e)):
            yield e, a, own[t], own_held[t], t


def grpo(episodes, x, held):
    """2402.03300, equation 3 with 4, beta = 0.04."""
    total = 0.0
    for e, a, x_t, _, t in tokens(episodes, x, held, in_deviations(episodes)):
        total += (ppo(x_t, e.behavior[t], a) - 0.04 * schulman(x_t, e.ref[t])) / len(e)
    return -total / len(episodes)


def dr_grpo(episodes, x, held):
    """2503.20783: no division by the rollout's length, but by a constant."""
    terms = tokens(episodes, x, held, minus_mean(episodes))
    total = sum(ppo(x_t, e.behavior[t], a) for e, a, x_t, _, t in terms)
    return -total / MAX_TOKENS / len(episodes)


def dapo(episodes, x, held):
    """2503.14476, equation 8 with the clips of section 3.1, over the tokens of the batch."""
    terms = tokens(episodes, x, held, in_deviations(episodes))
    total = sum(ppo(x_t, e.behavior[t], a, 0.2, 0.28) for e, a, x_t, _, t in terms)
    return -total / sum(map(len, episodes))


def gspo(episodes, x, held):
    """2507.18071, equations 5 and 7, with the true ratio of sequences; clips wide enough to see."""
    total = 0.0
    for e, own, a in zip(episodes, x, in_deviations(episodes), strict=True):
        s = math.exp(sum(own - e.behavior) / len(e))
        total += min(s * a, clip(s, 0.9, 1.15) * a)
    return -total / len(episodes)


def cispo(episodes, x, held):
    """2506.13585, equations 4 and 5, with an upper bound that binds."""
    total = 0.0
    for e, a, x_t, held_t, t in tokens(episodes, x, held, in_deviations(episodes)):
        total += min(math.exp(held_t - e.behavior[t]), 1.3) * a * x_t
    return -total / sum(map(len, episodes))


def kimi_kl(episodes, x):
    """The mean square of the log-ratio to the sampler."""
    square = sum(float(((own - e.behavior) ** 2).sum()) for e, own in zip(episodes, x, strict=True))
    return square / sum(map(len, episodes))


def dppo(episodes, x, held):
    """2602.04879's mask of binary total variation, and a KL term of 1e-3."""
    total = 0.0
    for e, a, x_t, held_t, t in tokens(episodes, x, held, minus_mean(episodes)):
        moved = math.exp(held_t) - math.exp(e.behavior[t])
        outside = moved > 0.2 if a > 0 else moved < -0.2
        total += 0.0 if outside else math.exp(x_t - e.behavior[t]) * a
    return -total / sum(map(len, episodes)) + 1e-3 * kimi_kl(episodes, x)


def ipo(episodes, x, held):
    """The same with a symmetric mask."""
    total = 0.0
    for e, a, x_t, held_t, t in tokens(episodes, x, held, minus_mean(episodes)):
        if abs(math.exp(held_t) - math.exp(e.behavior[t])) <= 0.1:
            total += math.exp(x_t - e.behavior[t]) * a
    return -total / sum(map(len, episodes)) + 1e-3 * kimi_kl(episodes, x)


def rloo(episodes, x, held):
    """2402.14740: REINFORCE of whole sequences against the mean of the others."""
    terms = zip(x, minus_the_others(episodes), strict=True)
    return -sum(a * own.sum() for own, a in terms) / len(episodes)


def reinforce_pp(episodes, x, held):
    """2501.03262: PPO's clip, one advantage for all tokens, normalized over the batch."""
    terms = tokens(episodes, x, held, whitened_over_tokens(episodes))
    total = sum(ppo(x_t, e.behavior[t], a) for e, a, x_t, _, t in terms)
    return -total / sum(map(len, episodes))


def max_rl(episodes, x, held):
    """2602.02710, algorithm 1: the score of each sequence times ``(r - mean) / mean``."""
    terms = zip(x, relative_to_mean(episodes), strict=True)
    return -sum(a * own.sum() for own, a in terms) / MAX_TOKENS / len(episodes)


def distillation(episodes, x, held):
    """Reverse KL to a teacher as a policy gradient, within a trust region, and the KL term."""
    total = 0.0
    for e, _, x_t, held_t, t in tokens(episodes, x, held, [0.0] * len(episodes)):
        if math.exp(held_t) - math.exp(e.behavior[t]) >= -0.2:
            total += (e.ref[t] - held_t) * math.exp(x_t - e.behavior[t])
    return -total / sum(map(len, episodes)) + 1e-3 * kimi_kl(episodes, x)


def tis_grpo(episodes, x, held):
    """GRPO around the proximal policy, by the truncated weight of proximal over sampler."""
    total = 0.0
    for e, a, x_t, _, t in tokens(episodes, x, held, in_deviations(episodes)):
        weight = min(math.exp(e.proximal[t] - e.behavior[t]), 1.2)
        total += weight * ppo(x_t, e.proximal[t], a) / len(e)
    return -total / len(episodes)


def areal(episodes, x, held):
    """2505.24298: decoupled PPO, whose weight is not truncated."""
    total = 0.0
    for e, a, x_t, _, t in tokens(episodes, x, held, in_deviations(episodes)):
        weight = math.exp(e.proximal[t] - e.behavior[t])
        total += weight * ppo(x_t, e.proximal[t], a)
    return -total / sum(map(len, episodes))


# This library's side: estimators that are not in primerl.advantage yet.


@advantage.of_rewards
def the_rewards(rewards):
    return rewards


def as_it_is(samples):
    return samples


@attrs.frozen(eq=False, kw_only=True)
class Step:
    """The inputs of a recipe's inner loop: a batch, and the counts of the whole step."""

    batch: packing.PackedBatch
    proximal: torch.Tensor
    tokens: int
    sequences: int

    def token_mean(self, x):
        return loss.token_mean(x, self.batch.loss_mask, denom=self.tokens)

    def sequence_mean(self, x):
        b = self.batch
        return loss.sequence_mean(x, b.loss_mask, b.sequence_ids, denom=self.sequences)

    def fixed_length_mean(self, x, length):
        mask = self.batch.loss_mask
        return loss.fixed_length_mean(x, mask, length=length, denom=self.sequences)


def with_k3(x, b):
    return loss.clipped(x, b.behavior_logprobs, b.advantages)[0] + 0.04 * loss.k3(x, b.ref_logprobs)


def with_k2(per_token_and_aux, x, b):
    return per_token_and_aux[0] + 1e-3 * 2 * loss.k2(x, b.behavior_logprobs)


def on_policy(x, b):
    return loss.reinforce(x, x.detach(), b.advantages)[0]


# Algorithm: the paper's objective; estimator and what follows it; the loss of a batch, by parts.
ALGORITHMS = {
    "GRPO": (
        grpo,
        advantage.standardized,
        as_it_is,
        lambda x, b, s: s.sequence_mean(with_k3(x, b)),
    ),
    "Dr. GRPO": (
        dr_grpo,
        advantage.centered,
        as_it_is,
        lambda x, b, s: s.fixed_length_mean(
            loss.clipped(x, b.behavior_logprobs, b.advantages)[0], MAX_TOKENS
        ),
    ),
    "DAPO": (
        dapo,
        advantage.standardized,
        as_it_is,
        lambda x, b, s: s.token_mean(
            loss.clipped(x, b.behavior_logprobs, b.advantages, clip_low=0.2, clip_high=0.28)[0]
        ),
    ),
    "GSPO": (
        gspo,
        advantage.standardized,
        as_it_is,
        lambda x, b, s: s.sequence_mean(
            loss.gspo(
                x,
                b.behavior_logprobs,
                b.advantages,
                b.loss_mask,
                b.sequence_ids,
                clip_low=0.1,
                clip_high=0.15,
            )[0]
        ),
    ),
    "CISPO": (
        cispo,
        advantage.standardized,
        as_it_is,
        lambda x, b, s: s.token_mean(
            loss.cispo(x, b.behavior_logprobs, b.advantages, clip_high=0.3)[0]
        ),
    ),
    "DPPO + KL": (
        dppo,
        advantage.centered,
        as_it_is,
        lambda x, b, s: s.token_mean(
            with_k2(loss.dppo(x, b.behavior_logprobs, b.advantages), x, b)
        ),
    ),
    "IPO": (
        ipo,
        advantage.centered,
        as_it_is,
        lambda x, b, s: s.token_mean(with_k2(loss.ipo(x, b.behavior_logprobs, b.advantages), x, b)),
    ),
    "RLOO": (
        rloo,
        advantage.leave_one_out,
        as_it_is,
        lambda x, b, s: s.fixed_length_mean(on_policy(x, b), 1),
    ),
    "REINFORCE++": (
        reinforce_pp,
        the_rewards,
        advantage.whitened,
        lambda x, b, s: s.token_mean(loss.clipped(x, b.behavior_logprobs, b.advantages)[0]),
    ),
    "MaxRL": (
        max_rl,
        advantage.max_rl,
        as_it_is,
        lambda x, b, s: s.fixed_length_mean(on_policy(x, b), MAX_TOKENS),
    ),
    # OPD and SDFT differ in who the teacher is, not in the loss.
    "OPD, SDFT": (
        distillation,
        the_rewards,
        as_it_is,
        lambda x, b, s: s.token_mean(
            with_k2(loss.distill(x, b.behavior_logprobs, b.ref_logprobs), x, b)
        ),
    ),
    "GRPO, decoupled, TIS": (
        tis_grpo,
        advantage.standardized,
        as_it_is,
        lambda x, b, s: s.sequence_mean(
            loss.token_tis(s.proximal, b.behavior_logprobs, cap=1.2)
            * loss.clipped(x, s.proximal, b.advantages)[0]
        ),
    ),
    "decoupled PPO": (
        areal,
        advantage.standardized,
        as_it_is,
        lambda x, b, s: s.token_mean(
            loss.decoupled(x, b.behavior_logprobs, b.advantages, s.proximal)[0]
        ),
    ),
}
WITHOUT_A_VALUE = {"RLOO", "MaxRL"}
"""Algorithms whose paper gives a gradient, not the loss."""


def groups_of(episodes):
    groups = []
    for number in range(len(REWARDS)):
        rollouts = [
            Rollout(
                samples=[
                    Sample(
                        token_ids=[e.ids[0] - 2, e.ids[0] - 1, *e.ids],
                        loss_mask=[False] * PROMPT + [True] * len(e),
                        behavior_logprobs=[0.0] * PROMPT + list(e.behavior),
                        versions=[-1] * PROMPT + [0] * len(e),
                    )
                ],
                reward=e.reward,
            )
            for e in episodes
            if e.group == number
        ]
        groups.append(Group(task_id=str(number), rollouts=rollouts))
    return groups


def with_ref(sample: TrainingSample, table):
    return attrs.evolve(sample, ref_logprobs=table[np.array(sample.token_ids)])


def by_parts(episodes, estimator, afterwards, loss_of):
    """Loss and gradient by this library, the gradient by token id."""
    size = episodes[-1].ids[-1] + 1
    tables = {name: np.zeros(size) for name in ("logprobs", "proximal", "ref")}
    for e in episodes:
        for name, table in tables.items():
            table[e.ids] = getattr(e, name)
    policy = torch.from_numpy(tables["logprobs"]).requires_grad_()
    proximal = torch.from_numpy(tables["proximal"])

    samples = afterwards(advantage.assign(groups_of(episodes), estimator))
    samples = [with_ref(sample, tables["ref"]) for sample in samples]
    packed = packing.pack(samples, max_tokens=24, ranks=2)
    assert len(packed[0]) >= 2
    total = 0.0
    for batch in [batch for mine in packed for batch in mine]:
        step = Step(
            batch=batch,
            proximal=proximal[batch.labels],
            tokens=sum(map(len, episodes)),
            sequences=len(episodes),
        )
        mean = loss_of(policy[batch.labels], batch, step)
        mean.backward()
        total += mean.item()
    return total, np.concatenate([policy.grad.numpy()[e.ids] for e in episodes])


def by_loops(episodes, objective, h=1e-6):
    """The paper's loss, and its gradient by central differences."""
    held = [e.logprobs for e in episodes]
    slopes = []
    for number, e in enumerate(episodes):
        for t in range(len(e)):
            values = []
            for sign in (1, -1):
                x = [own.copy() for own in held]
                x[number][t] += sign * h
                values.append(objective(episodes, x, held))
            slopes.append((values[0] - values[1]) / (2 * h))
    return objective(episodes, held, held), np.array(slopes)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_composed_algorithm_is_that_of_its_paper(name, seed):
    objective, *parts = ALGORITHMS[name]
    episodes = random_episodes(seed)

    value, gradient = by_parts(episodes, *parts)
    expected, expected_gradient = by_loops(episodes, objective)

    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=2e-8)
    if name not in WITHOUT_A_VALUE:
        assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    ["Dr. GRPO", "DAPO", "GSPO", "REINFORCE++", "GRPO, decoupled, TIS", "decoupled PPO"],
)
def test_clips_bind_for_some_tokens_of_the_batch_and_not_for_all(name):
    """Otherwise the comparison would not cover them."""
    _, gradient = by_loops(random_episodes(0), ALGORITHMS[name][0])

    assert 2 < np.count_nonzero(np.abs(gradient) < 1e-9) < len(gradient) - 2


@pytest.mark.parametrize("name", ["DPPO + KL", "IPO", "OPD, SDFT"])
def test_masks_drop_some_tokens_of_the_batch_and_not_all(name):
    """Of a dropped token the gradient of the KL term remains, which is small."""
    _, gradient = by_loops(random_episodes(0), ALGORITHMS[name][0])

    assert 2 < np.count_nonzero(np.abs(gradient) < 2e-3 * 2 / len(gradient)) < len(gradient) - 2
