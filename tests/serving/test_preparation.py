"""What a receiver prepares in a thread while its engine samples."""

import threading
import time

import pytest

from primerl.serving.worker.preparation import Preparation


def until_done(preparation, ticket, work):
    deadline = time.monotonic() + 60
    while (found := preparation.ask(ticket, work)) is None:
        assert time.monotonic() < deadline
    return found


def test_the_call_returns_at_once_and_the_work_is_done_once():
    go, times = threading.Event(), []

    def work():
        times.append(threading.current_thread())
        go.wait(60)
        return {"version": 3}

    preparation = Preparation()
    started = time.monotonic()
    assert [preparation.ask("a", work) for _ in range(4)] == [None] * 4
    assert time.monotonic() - started < 8
    go.set()
    assert until_done(preparation, "a", work) == {"version": 3}
    assert preparation.ask("a", work) == {"version": 3}, "for an answer that was lost"
    assert len(times) == 1
    assert times[0] is not threading.current_thread()


def test_an_error_is_raised_by_every_call():
    def work():
        raise ValueError("the file is altered")

    preparation = Preparation()
    for _ in range(2):
        with pytest.raises(ValueError, match="is altered"):
            until_done(preparation, "a", work)
    assert until_done(preparation, "b", lambda: {"version": 3}) == {"version": 3}


def test_a_long_timeout_waits_for_an_earlier_ticket_and_its_own():
    def work(name):
        time.sleep(0.1)
        return {"name": name}

    preparation = Preparation()
    assert preparation.ask("a", lambda: work("a")) is None
    assert preparation.ask("b", lambda: work("b"), timeout_s=10) == {"name": "b"}


def test_another_ticket_waits_for_the_work_of_the_first():
    go, running = threading.Event(), []

    def work(name):
        running.append(name)
        go.wait(60)
        return {"name": name}

    preparation = Preparation()
    assert preparation.ask("a", lambda: work("a")) is None
    assert preparation.ask("b", lambda: work("b")) is None
    assert running == ["a"]
    go.set()
    assert until_done(preparation, "b", lambda: work("b")) == {"name": "b"}
    assert running == ["a", "b"]
