"""A simulated engine whose rollouts grow in steps until they are done or memory is full."""

import numpy as np


def simulate(cap, *, capacity, length, seconds=4000.0, every=10.0, seed=0, drift=1.0):
    """Simulate an engine; return tokens of finished rollouts per second, and the caps used.

    Args:
        cap: the maximum number of running rollouts, or a function of the load that returns it,
            called every ``every`` seconds.
        capacity: the number of tokens of all rollouts that fit in memory.
        length: the mean length of a rollout, in tokens.
        seconds: the simulated time.
        every: seconds between observations.
        seed: seed of the lengths.
        drift: factor by which rollouts are longer at the end.
    """
    draw = np.random.default_rng(seed)
    limit = cap if isinstance(cap, (int, float)) else cap(None)
    now = next_look = 0.0
    tokens, goals = np.zeros(0), np.zeros(0)
    started, done, preempted, caps, lost = 0, 0.0, 0, [], 0
    waiting = []  # goals of rollouts that were preempted
    while now < seconds:
        mean = length * drift ** (now / seconds)
        while len(tokens) + len(waiting) < int(limit):
            waiting.append(mean * draw.lognormal(-0.32, 0.8))
            started += 1
        while waiting and tokens.sum() + 16 * (len(tokens) + 1) < capacity:
            tokens, goals = np.append(tokens, 0.0), np.append(goals, waiting.pop(0))
        tokens += 16  # tokens per step and rollout
        now += 16 * (0.01 + 0.0004 * len(tokens))  # memory traffic, and time per sequence
        finished = tokens >= goals
        done += goals[finished].sum()
        tokens, goals = tokens[~finished], goals[~finished]
        while tokens.sum() > capacity:  # preempt the youngest rollout, which restarts later
            youngest = int(tokens.argmin())
            waiting.insert(0, goals[youngest])
            now += 0.0002 * tokens[youngest]  # its tokens are recomputed
            lost += 1
            preempted += 1
            tokens, goals = np.delete(tokens, youngest), np.delete(goals, youngest)
        if now >= next_look and callable(cap):
            next_look = now + every
            use = min(1.0, tokens.sum() / capacity)
            limit = cap((len(tokens) + len(waiting), len(waiting), preempted, use))
            preempted = 0
            caps.append(limit)
    return done / now, np.array(caps), started - len(tokens) - len(waiting), lost
