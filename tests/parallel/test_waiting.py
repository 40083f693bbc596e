"""Waits of ranks outside of collectives, which end with a reason; test_late_ranks.py has ranks."""

import json
import re
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from primerl import parallel, testing, weights
from primerl._common import progress, waiting
from primerl._common.waiting import LateRankError, OtherRankFailedError, Waits


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))


def waits(store, rank, *, ranks=2, silent_s=10.0, timeout_s=10.0):
    return Waits(store, rank=rank, ranks=ranks, silent_s=silent_s, timeout_s=timeout_s)


def test_the_other_ranks_wait_until_rank_0_arrives(store):
    arrived = []

    def other():
        for number in range(3):
            second.wait_for_first("a batch")
            arrived.append((number, time.monotonic()))

    second = waits(store, 1)
    thread = threading.Thread(target=other)
    with waits(store, 0) as first:
        thread.start()
        began = []
        for _ in range(3):
            time.sleep(0.1)
            began.append(time.monotonic())
            first.wait_for_first("a batch")
        thread.join(10.0)
    assert [number for number, _ in arrived] == [0, 1, 2]
    assert all(at >= start for (_, at), start in zip(arrived, began, strict=True))


def test_rank_0_does_not_wait(store):
    with waits(store, 0) as first:
        for _ in range(3):
            first.wait_for_first("a batch")


def test_a_rank_0_that_is_alive_but_late_is_named_with_its_report(store, monkeypatch):
    monkeypatch.setattr(waiting, "BEAT_S", 0.05)
    progress.report("rollouts", "3/8 groups")
    with waits(store, 0), pytest.raises(LateRankError) as raised:
        waits(store, 1, timeout_s=0.5).wait_for_first("a batch")
    assert str(raised.value).startswith("rank 0 is alive, but a batch did not come within 0 s")
    assert "its last report: rollouts: 3/8 groups" in str(raised.value)


def test_a_rank_0_that_is_silent_is_named(store):
    store.set(waiting.DOING.format(0), json.dumps([1, "saving: step 7"]))
    with pytest.raises(RuntimeError, match="no sign of life for 0 s, while a batch .* step 7"):
        waits(store, 1, silent_s=0.2).wait_for_first("a batch")


def test_a_failure_ends_the_wait(store):
    store.set(waiting.FAILURE, "rank 0 failed: ValueError: ...")
    with pytest.raises(RuntimeError, match="another rank has failed"):
        waits(store, 1).wait_for_first("a batch")


def test_all_ranks_wait_for_the_last(store):
    ends = [0.0] * 3

    def rank(number):
        with waits(store, number, ranks=3) as one:
            for _ in range(2):
                time.sleep(0.2 * number)
                one.wait_for_all("the end of loading")
            ends[number] = time.monotonic()

    began = time.monotonic()
    threads = [threading.Thread(target=rank, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert all(end - began >= 0.8 for end in ends)


def test_waits_of_different_groups_are_independent(store):
    """A thread that saves beside training waits for its own points only."""
    with waits(store, 0) as first, waits(store, 1) as second:
        second._timeout_s = 0.2
        first.wait_for_first("a batch", "training")
        with pytest.raises(LateRankError):
            second.wait_for_first("a version", "publishing")
        second.wait_for_first("a batch", "training")


def test_each_late_rank_is_named_with_what_it_did_last(store):
    for rank, report in ((1, "loading: step-00000007"), (2, "saving: step 8")):
        sign = [1, report, "train.py:12 (main)", False]
        store.set(waiting.DOING.format(rank), json.dumps(sign))
    with waits(store, 0, ranks=3, timeout_s=0.3) as first, pytest.raises(LateRankError) as raised:
        first.wait_for_all("the end of loading on all ranks")
    assert str(raised.value) == (
        "rank 1 is alive, but the end of loading on all ranks did not come within 0 s; its last "
        "report: loading: step-00000007, at train.py:12 (main); rank 2, too; its last report: "
        "saving: step 8, at train.py:12 (main). If it needs longer, raise wait_timeout_s of "
        "parallel.process_group"
    )


def test_the_ranks_that_others_still_wait_for_are_described(store):
    store.set(waiting.DOING.format(1), json.dumps([1, "saving: step 8"]))
    with waits(store, 0, timeout_s=0.1) as first:
        assert first.describe_late("saving") == ""
        with pytest.raises(LateRankError):
            first.wait_for_all("the end of saving", "saving")
        assert first.describe_late("saving") == "rank 1 is late; its last report: saving: step 8"


def test_a_rank_that_never_connected_is_named(store):
    store.set(waiting.DOING.format(1), json.dumps([1]))
    with waits(store, 0, ranks=3, timeout_s=0.3) as first, pytest.raises(LateRankError) as raised:
        first.wait_for_all("the model of all ranks")
    assert str(raised.value).startswith("rank 2 has not connected yet, but the model of all ranks")


def test_rank_0_watches_the_ranks_that_it_waits_for(store):
    store.set(waiting.DOING.format(1), json.dumps([5, "verifying: step-00000007"]))
    with waits(store, 0, silent_s=0.2) as first, pytest.raises(LateRankError) as raised:
        first.wait_for_all("the end of loading")
    assert str(raised.value) == (
        "rank 1 has given no sign of life for 0 s, while the end of loading was waited for; its "
        "last report: verifying: step-00000007"
    )


def test_a_wait_that_was_suspended_itself_blames_nobody(store, monkeypatch):
    """After SIGCONT, other ranks may need a moment to give a sign, too."""
    store.set(waiting.DOING.format(0), json.dumps([1]))
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = waiting._Watch(store)
    watch.look([0])
    now[0] = 1.0
    watch.look([0])
    assert watch.silent_s(0) == 1.0
    now[0] = 1000.0
    watch.look([0])
    assert watch.silent_s(0) == 1.0 + 2 * waiting.BEAT_S


def test_a_sign_of_life_says_where_the_main_thread_is(store):
    progress.report("rollouts", "3/8 groups")
    found = []
    thread = threading.Thread(target=lambda: found.append(waiting._own(4)))
    thread.start()
    thread.join()
    (sign,) = found
    assert (sign.number, sign.report, sign.in_torch) == (4, "rollouts: 3/8 groups", False)
    assert re.fullmatch(
        r"test_waiting\.py:\d+ \(test_a_sign_of_life_says_where_the_main_thread_is\)", sign.place
    )


def test_a_stuck_rank_is_told_from_one_that_waits_in_torch(store):
    for rank, in_torch in ((1, True), (2, False)):
        store.set(waiting.DOING.format(rank), json.dumps([1, "training", "", in_torch]))
    beating = threading.Event()

    def beat():
        number = 1
        while not beating.wait(0.02):
            number += 1
            for rank, in_torch in ((1, True), (2, False)):
                sign = [number, "training", "", in_torch]
                store.set(waiting.DOING.format(rank), json.dumps(sign))

    first = waits(store, 0, ranks=3, silent_s=0.4)
    thread = threading.Thread(target=beat)
    thread.start()
    assert first.describe_stuck(lambda: [1, 2]).startswith("rank 2 is alive, but late; its last")
    assert first.describe_stuck(lambda: [1]).startswith("rank 1 is alive, but late")
    beating.set()
    thread.join()
    assert first.describe_stuck(lambda: [1, 2]).startswith("rank 1 gives no sign of life")
    assert first.describe_stuck(list) == ""


def test_a_failure_also_ends_a_wait_for_all(store):
    store.set(waiting.FAILURE, "rank 1 failed: ValueError: ...")
    with waits(store, 0) as first, pytest.raises(OtherRankFailedError, match="another rank has"):
        first.wait_for_all("the end of loading")


def test_without_a_world_nothing_is_waited_for():
    parallel.wait_for_first("anything")
    parallel.wait_for_all("anything")


def test_a_rank_that_has_not_joined_the_others_is_refused(monkeypatch, tmp_path):
    """Without a process group, each process would believe that it is alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="one of 2 ranks .*: enter `with parallel.process_group"):
        parallel.shard(testing.tiny_model("llama"))
    with pytest.raises(RuntimeError, match="one of 2 ranks"):
        weights.Disk(testing.tiny_model("llama"), object(), folder=tmp_path)
