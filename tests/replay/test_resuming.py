"""Expert routes of buffered rollouts when a run resumes from its worker's state."""

import attrs
import numpy as np
from conftest import CharacterCodes, FakeEngine
from waiting import until

from primerl import advantage, packing, replay, rollout
from primerl.types import SamplingParams

SHAPE = replay.RouteShape(layers=(0, 1), decoder_layers=2, experts=60, k=2)
TASKS = [{"id": str(number), "prompt": f"task {number}"} for number in range(8)]


def rows_of(token_ids):
    """Rows that say which token they are of."""
    first = np.asarray(token_ids)[:, None, None] % 59
    return np.broadcast_to(first + np.arange(2), (len(token_ids), 2, 2)).astype(np.uint8)


class RoutedEngine(FakeEngine):
    """Puts routes that tell its tokens, from the trainer's process, as engines of servers do."""

    def __init__(self, store):
        super().__init__(delay_s=0)
        self.routes = store

    async def generate(self, prompt_ids, params, *, session=None):
        completion = await super().generate(prompt_ids, params)
        tokens = [*prompt_ids, *completion.token_ids][:-1]
        versions = np.full(len(tokens), self.version, np.int32)
        shared = len(prompt_ids) - 1
        routes = self.routes.put(rows_of(tokens), start=0, versions=versions, shared=shared)
        return attrs.evolve(completion, routes=routes)


def make_worker(store, **change):
    return rollout.worker(
        RoutedEngine(store),
        rollout.single_turn(CharacterCodes(), reward=lambda task, reply: len(set(reply))),
        TASKS,
        params=SamplingParams(max_tokens=3),
        group_size=2,
        groups_per_step=3,
        max_staleness=1,
        **change,
    )


def interrupted():
    """What was buffered when a run was interrupted: its worker's state, without its store."""
    with replay.Store(SHAPE) as store, make_worker(store) as rollouts:
        rollouts.take(version=0)
        until(lambda: rollouts.stats()["buffered"] >= 3)
        return rollouts.state()


def trained_after(state):
    with replay.Store(SHAPE) as store, make_worker(store, state=state) as rollouts:
        samples = advantage.assign(rollouts.take(version=1), advantage.centered)
        ((batch,),) = packing.pack(samples, max_tokens=10_000, ranks=1)
        counts = replay.RouteCounts()
        ((_, rows),) = replay.fetch([batch], counts=counts)
        replay.discard(samples)
    return batch, rows, counts.summary()


def test_inline_routes_of_buffered_rollouts_are_trained_with():
    batch, rows, lost = trained_after(interrupted())

    assert lost == {}
    expected = rows_of(batch.token_ids.numpy()).astype(np.int16)
    expected[batch.cu_seqlens[1:] - 1] = -1  # last tokens have none
    assert rows.tolist() == expected.tolist()


def test_stored_routes_of_buffered_rollouts_went_with_their_store(monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr("primerl.replay.references.INLINE_BYTES", 0)
        state = interrupted()
    _, rows, lost = trained_after(state)

    assert rows is None
    assert lost == {"routes_lost": 6}
    assert "their store was closed" in caplog.text
