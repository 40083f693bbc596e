import json
import os
import signal
import subprocess
import sys
import time

import pytest

from primerl import parallel, track
from primerl._common.interrupts import StoppedError, accept_interrupts, interrupt_main_thread
from primerl.parallel.launch.stop_signals import StopSignals

KINDS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers():
    """Restores the handlers after each test."""
    before = [signal.getsignal(kind) for kind in KINDS]
    yield before
    for kind, handler in zip(KINDS, before, strict=True):
        signal.signal(kind, handler)


def send(kind):
    os.kill(os.getpid(), kind)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGUSR1])
def test_before_a_loop_checks_a_signal_raises_and_cleanup_is_not_interrupted(kind):
    signals = StopSignals(10.0)
    signals.install()
    closed = []
    with pytest.raises(StoppedError, match=kind.name):  # noqa: PT012
        try:
            send(kind)
            time.sleep(20)
        finally:
            send(signal.SIGTERM)
            send(signal.SIGUSR1)
            closed.append(True)
    signals.restore()

    assert closed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # the process is ending


def test_sigterm_is_recorded_once_a_loop_checks_but_a_second_one_raises():
    signals = StopSignals(10.0)
    signals.install()
    signals.watch(lambda: False)
    signals.defer()
    send(signal.SIGTERM)

    assert signals.received
    with pytest.raises(StoppedError):
        send(signal.SIGTERM)


def test_ctrl_c_is_recorded_once_a_loop_checks_but_a_second_one_raises(capfd):
    signals = StopSignals(10.0)
    signals.install()
    signals.defer()
    send(signal.SIGINT)

    assert signals.received
    assert "the run stops after this step; a second one ends it" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_ctrl_c_raises_before_a_loop_checks():
    signals = StopSignals(10.0)
    signals.install()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_an_interrupt_from_another_thread_does_not_wait_for_a_step():
    """As the watchdog of the worker sends it to a trainer that may wait for the worker."""
    signals = StopSignals(10.0)
    signals.install()
    signals.defer()
    with pytest.raises(KeyboardInterrupt):
        interrupt_main_thread()

    assert not signals.received


def test_an_interrupt_of_an_earlier_run_is_forgotten():
    with pytest.raises(KeyboardInterrupt):
        interrupt_main_thread()
    signals = StopSignals(10.0)
    signals.install()
    signals.defer()
    send(signal.SIGINT)

    assert signals.received


def test_a_process_that_ignores_ctrl_c_goes_on_to():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals = StopSignals(10.0)
    signals.install()

    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_where_ctrl_c_is_ignored_another_thread_can_still_interrupt():
    """As the worker's watchdog does in a run that a script started in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    accept_interrupts()
    signals = StopSignals(10.0)
    signals.install()
    signals.defer()
    send(signal.SIGINT)

    assert not signals.received
    with pytest.raises(KeyboardInterrupt):
        interrupt_main_thread()
    send(signal.SIGTERM)
    assert signals.received


def test_a_second_ctrl_c_while_the_first_is_answered_raises(monkeypatch):
    signals = StopSignals(10.0)
    signals.defer()
    answered = []

    def interrupted(descriptor, text):
        answered.append(text)
        signals._receive(signal.SIGINT, None)

    monkeypatch.setattr("primerl.parallel.launch.stop_signals.os.write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        signals._receive(signal.SIGINT, None)
    assert len(answered) == 1


SCRIPT = """
import time
from primerl import parallel, track

@track.interruptible()
def main():
    with parallel.process_group() as world:
        world.should_stop()
        print("ready", flush=True)
        time.sleep(60)

main()
"""


@pytest.mark.thorough
def test_a_script_that_is_interrupted_twice_ends_at_once_with_one_line():
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"  # after the terminal's ^C
        assert process.stderr.readline().startswith("Ctrl-C: the run stops after this step")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()

    assert errors == "stopped by Ctrl-C; to start again, run the same command\n"
    assert process.returncode == 130


@pytest.mark.parametrize(("kind", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_script_that_is_told_to_stop_ends_with_one_line(kind, code, capsys, monkeypatch):
    @track.interruptible()
    def main():
        with pytest.MonkeyPatch.context() as closed:
            closed.setenv("CLOSED", "no")
            send(getattr(signal, kind))
            time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == code
    by = "Ctrl-C" if kind == "SIGINT" else "SIGTERM"
    assert capsys.readouterr().err == f"stopped by {by}; to start again, run the same command\n"
    assert "CLOSED" not in os.environ
    assert signal.getsignal(signal.SIGTERM) is before

    monkeypatch.setenv("RANK", "1")  # the first of torchrun's ranks says it
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == ""


def test_a_stop_before_the_first_step_says_how_to_start_again(tmp_path, capsys):
    def stopped(folder, **options):
        with pytest.raises(SystemExit) as ended, track.interruptible():
            with track.Run(folder, **options), parallel.process_group():
                send(signal.SIGTERM)
        assert ended.value.code == 143
        return capsys.readouterr().err

    assert stopped(tmp_path / "run") == (
        f"stopped by SIGTERM; to start again, pass another folder than {tmp_path / 'run'}\n"
    )
    with pytest.MonkeyPatch.context() as here:
        here.chdir(tmp_path)
        assert stopped(None) == "stopped by SIGTERM; to start again, run the same command\n"


def test_a_second_sigterm_cancels_the_one_after_the_grace():
    """Otherwise it is sent to whatever handles signals then: here, it killed the tests."""
    signals = StopSignals(0.2)
    signals.install()
    signals.watch(lambda: False)
    signals.defer()
    with pytest.raises(StoppedError):  # noqa: PT012
        send(signal.SIGTERM)
        send(signal.SIGTERM)
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    time.sleep(0.4)

    assert not came


def test_handlers_are_restored_if_no_signal_came(handlers):
    signals = StopSignals(10.0)
    signals.install()
    assert [signal.getsignal(kind) for kind in KINDS] != handlers
    signals.restore()

    assert [signal.getsignal(kind) for kind in KINDS] == handlers


def test_sigusr1_is_recorded_however_often_it_is_sent():
    signals = StopSignals(0.01)
    signals.install()
    signals.watch(lambda: False)
    signals.defer()
    for _ in range(3):
        send(signal.SIGUSR1)
    time.sleep(0.05)

    assert signals.received


def test_when_a_rank_has_failed_sigterm_raises():
    signals = StopSignals(10.0)
    signals.install()
    signals.watch(lambda: True)
    signals.defer()

    with pytest.raises(StoppedError):
        send(signal.SIGTERM)


def test_a_rank_that_does_not_check_in_time_ends():
    """As when another was killed without an error: torchrun kills soon after its SIGTERM."""
    signals = StopSignals(0.1)
    signals.install()
    signals.watch(lambda: False)
    signals.defer()
    began = time.monotonic()
    send(signal.SIGTERM)

    with pytest.raises(StoppedError):
        time.sleep(20)
    assert time.monotonic() - began < 10


def test_once_all_ranks_agree_nothing_interrupts_the_save():
    signals = StopSignals(0.1)
    signals.install()
    signals.watch(lambda: False)
    signals.defer()
    send(signal.SIGTERM)
    signals.agree()
    send(signal.SIGTERM)
    time.sleep(0.2)
    signals.restore()

    assert signals.agreed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.fixture
def alone(monkeypatch):
    """No other ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_world_of_one_stops_after_its_step(alone):
    with parallel.process_group() as world:
        assert not world.should_stop()
        send(signal.SIGTERM)
        assert world.should_stop()


def test_a_world_of_one_that_is_stopped_before_its_first_step_closes_contexts(alone, tmp_path):
    with pytest.raises(StoppedError), track.Run(tmp_path / "run"), parallel.process_group():
        send(signal.SIGTERM)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["error"] == "StoppedError: this process was told to stop (SIGTERM)"


def test_failing_to_connect_restores_the_handlers(monkeypatch, handlers):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR"), parallel.process_group():
        pass

    assert [signal.getsignal(kind) for kind in KINDS] == handlers


def test_without_a_signal_a_world_of_one_leaves_no_handler(alone, handlers):
    with parallel.process_group() as world:
        assert not world.should_stop()

    assert [signal.getsignal(kind) for kind in KINDS] == handlers


def test_a_grace_of_zero_is_refused():
    with pytest.raises(ValueError, match="grace_s is 0"):
        parallel.process_group(grace_s=0)
