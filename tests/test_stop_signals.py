import os
import signal
import time

import pytest

from primerl import parallel
from primerl.parallel.stop_signals import StoppedError, StopSignals


@pytest.fixture(autouse=True)
def handlers():
    """As they were, whatever a test does."""
    kinds = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(kind) for kind in kinds]
    yield before
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


def send(kind):
    os.kill(os.getpid(), kind)


def test_sigterm_ends_the_process_until_a_loop_asks(handlers):
    signals = StopSignals(10.0)
    signals.install(lambda: False)
    with pytest.raises(StoppedError, match="SIGTERM"):
        send(signal.SIGTERM)
    signals.defer()
    send(signal.SIGTERM)

    assert signals.came
    with pytest.raises(StoppedError):
        send(signal.SIGTERM)  # a second one does not wait
    signals.restore()
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)] == handlers


def test_sigusr1_waits_however_often_it_comes():
    signals = StopSignals(0.01)
    signals.install(lambda: False)
    signals.defer()
    for _ in range(3):
        send(signal.SIGUSR1)
    time.sleep(0.05)

    assert signals.came


def test_when_a_rank_has_failed_sigterm_does_not_wait():
    signals = StopSignals(10.0)
    signals.install(lambda: True)
    signals.defer()

    with pytest.raises(StoppedError):
        send(signal.SIGTERM)


def test_a_rank_that_nobody_asks_in_time_ends():
    """As where another was killed and left no word: torchrun kills soon after its SIGTERM."""
    signals = StopSignals(0.1)
    signals.install(lambda: False)
    signals.defer()
    began = time.monotonic()
    send(signal.SIGTERM)

    with pytest.raises(StoppedError):
        time.sleep(20)
    assert time.monotonic() - began < 10


def test_once_all_ranks_know_nothing_cuts_off_the_save():
    signals = StopSignals(0.1)
    signals.install(lambda: False)
    signals.defer()
    send(signal.SIGTERM)
    signals.agree()
    send(signal.SIGTERM)
    time.sleep(0.2)
    signals.restore()

    assert signals.agreed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_world_of_one_is_told_after_its_step(monkeypatch, handlers):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with parallel.process_group() as world:
        assert signal.getsignal(signal.SIGTERM) == handlers[0]
        assert not world.should_stop()
        send(signal.SIGTERM)
        assert world.should_stop()


def test_without_a_signal_a_world_of_one_leaves_no_handler(monkeypatch, handlers):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with parallel.process_group() as world:
        assert not world.should_stop()

    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)] == handlers


def test_no_grace_is_refused():
    with pytest.raises(ValueError, match="grace_s is 0"):
        parallel.process_group(grace_s=0)
