"""Calls over a socket pair, both ends on one event loop."""

import asyncio
import contextlib
import pickle
import socket

import numpy as np
import pytest
from conftest import make_group

from primerl.rollout.processes import channel
from primerl.rollout.processes.channel import Channel, ChannelClosed, encode


@contextlib.asynccontextmanager
async def connected(handlers, *, back=None, **options):
    one, other = socket.socketpair()
    here = await Channel.over(one, back or {}, **options)
    there = await Channel.over(other, handlers, **options)
    serving = [asyncio.create_task(end.serve()) for end in (here, there)]
    try:
        yield here, there
    finally:
        here.close()
        there.close()
        await asyncio.wait(serving, timeout=60)


def test_values_arrive_unchanged_and_calls_go_both_ways():
    async def run():
        async def twice(value):
            return 2 * value

        async with connected({"twice": twice}, back={"name": lambda: "here"}) as (here, there):
            assert await here.call("twice", 21) == 42
            assert await there.call("name") == "here"
            results = await asyncio.gather(*(here.call("twice", n) for n in range(100)))
            assert results == [2 * n for n in range(100)]

    asyncio.run(run())


@pytest.mark.parametrize("length", [3, 5_000, 3_000_000])
def test_arrays_of_any_size_are_sent_as_memory(length):
    sent = np.arange(length, dtype=np.int32)
    sent.setflags(write=False)

    async def run():
        async with connected({"echo": lambda array: array}) as (here, _):
            return await here.call("echo", sent)

    received = asyncio.run(run())

    np.testing.assert_array_equal(received, sent)
    assert received.dtype == np.int32
    assert not received.flags.writeable  # it stays read-only


def test_a_groups_arrays_are_sent_beside_the_pickle_not_as_lists():
    group = make_group()
    large = np.zeros(100_000, np.float32)

    _, _, _, content, *buffers = encode("return", 0, "", [group, large])

    assert [len(buffer) for buffer in buffers] == [400_000]
    assert len(content) < 5_000
    restored = pickle.loads(content, buffers=buffers)
    np.testing.assert_array_equal(restored[0].versions, group.versions)


def test_an_exception_arrives_with_its_causes_and_the_other_sides_traceback():
    def fails():
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    async def run():
        async with connected({"fails": fails}) as (here, _):
            with pytest.raises(ValueError, match="outer") as caught:
                await here.call("fails")
            return caught.value

    error = asyncio.run(run())

    assert isinstance(error.__cause__, KeyError)
    assert "in fails" in error.__notes__[0]


def test_what_cannot_be_rebuilt_arrives_as_a_runtime_error_with_its_message():
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    def fails():
        raise Odd("salt", "pepper")

    async def run():
        async with connected({"fails": fails}) as (here, _):
            with pytest.raises(RuntimeError, match="Odd: salt and pepper"):
                await here.call("fails")

    asyncio.run(run())


def test_an_exception_that_is_its_own_cause_or_no_exception_arrives_too():
    class Panic(BaseException):
        pass

    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    def fails(how):
        error = ValueError("round")
        if how == "own cause":
            raise error from error
        raise Panic("in a library") if how == "panic" else Mute

    async def run():
        async with connected({"fails": fails}) as (here, _):
            with pytest.raises(ValueError, match="round"):
                await here.call("fails", "own cause")
            with pytest.raises(RuntimeError, match="Panic: in a library"):
                await here.call("fails", "panic")
            with pytest.raises(RuntimeError, match="Mute: <exception str"):
                await here.call("fails", "mute")

    asyncio.run(run())


def test_what_cannot_be_rebuilt_here_fails_its_call_alone():
    class Breaks:
        def __reduce__(self):
            return int, ("no number",)

    async def run():
        handlers = {"answer": lambda: Breaks(), "take": lambda value: value}
        async with connected(handlers) as (here, _):
            with pytest.raises(RuntimeError, match="can't be rebuilt here: ValueError"):
                await here.call("answer")
            with pytest.raises(ValueError, match="no number"):
                await here.call("take", Breaks())
            assert await here.call("take", 1) == 1

    asyncio.run(run())


@pytest.mark.parametrize("length", [3, 10_000])
def test_an_array_may_be_written_to_where_it_was_before(length):
    def change(array):
        array[0] = 7.0
        return array

    async def run():
        async with connected({"change": change}) as (here, _):
            return await here.call("change", np.zeros(length))

    assert asyncio.run(run())[0] == 7.0


def test_a_call_that_is_cancelled_at_once_leaves_nothing_behind():
    async def run():
        async with connected({"sleeps": lambda: asyncio.sleep(3600)}) as (here, there):
            for _ in range(20):
                call = asyncio.create_task(here.call("sleeps"))
                await asyncio.sleep(0)
                call.cancel()
            await asyncio.sleep(0.2)
            assert here._calls == there._running == {}

    asyncio.run(run())


def test_cancelling_a_call_cancels_its_handler():
    async def run():
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def sleeps():
            began.set()
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()

        async with connected({"sleeps": sleeps}) as (here, _):
            call = asyncio.create_task(here.call("sleeps"))
            await began.wait()
            call.cancel()
            await asyncio.wait_for(cancelled.wait(), 10)
            assert here._calls == {}
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(run())


def test_a_handler_that_is_cancelled_from_within_does_not_look_like_a_cancelled_caller():
    async def gives_up():
        raise asyncio.CancelledError

    async def run():
        async with connected({"gives_up": gives_up}) as (here, _):
            with pytest.raises(RuntimeError, match="'gives_up' was cancelled in the other process"):
                await here.call("gives_up")

    asyncio.run(run())


def test_when_one_end_closes_every_pending_call_fails():
    async def run():
        async with connected({"sleeps": lambda: asyncio.sleep(3600)}) as (here, there):
            calls = [asyncio.create_task(here.call("sleeps")) for _ in range(3)]
            await asyncio.sleep(0.05)
            there.close()
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(error, ChannelClosed) for error in done)
            with pytest.raises(ChannelClosed):
                await here.call("sleeps")

    asyncio.run(run())


def test_a_message_that_is_too_large_fails_alone():
    async def run():
        handlers = {"huge": lambda: np.zeros(10_000, np.uint8), "small": lambda: 1}
        async with connected(handlers, max_message_bytes=5_000) as (here, _):
            with pytest.raises(ValueError, match="exceeds 5,000"):
                await here.call("huge")
            with pytest.raises(ValueError, match="exceeds 5,000"):
                await here.call("small", np.zeros(10_000, np.uint8))
            assert await here.call("small") == 1

    asyncio.run(run())


def test_an_unknown_method_is_an_error():
    async def run():
        async with connected({}) as (here, _):
            with pytest.raises(KeyError, match="nothing"):
                await here.call("nothing")

    asyncio.run(run())


def test_a_message_of_many_frames_arrives_whole_while_others_pass_it(monkeypatch):
    monkeypatch.setattr("primerl.rollout.processes.channel.FRAME_BYTES", 1000)
    sent = {"large": np.arange(3_000_000), "small": [np.arange(n) for n in range(50)], "": b"x" * 9}
    sent["large"].setflags(write=False)

    async def run():
        passed = []
        handlers = {"large": lambda: sent, "echo": lambda value: value}
        async with connected(handlers, back={"beat": passed.append}) as (here, there):
            large = asyncio.create_task(here.call("large"))
            for number in range(50):
                there.notify("beat", number)
                assert await here.call("echo", number) == number
                assert not large.done()
            received = await large
            assert passed == list(range(50))
        return received

    received = asyncio.run(run())

    np.testing.assert_array_equal(received["large"], sent["large"])
    assert not received["large"].flags.writeable
    for one, other in zip(received["small"], sent["small"], strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.flags.writeable
    assert received[""] == sent[""]


def test_a_call_that_is_cancelled_while_it_is_sent_leaves_nothing_at_the_other_end(monkeypatch):
    monkeypatch.setattr("primerl.rollout.processes.channel.FRAME_BYTES", 1000)

    async def run():
        async with connected({"sum": np.sum, "large": lambda: np.ones(3_000_000)}) as (here, there):
            sends = asyncio.create_task(here.call("sum", np.ones(3_000_000)))
            receives = asyncio.create_task(here.call("large"))
            while not (here._incoming and there._incoming):
                await asyncio.sleep(0)
            sends.cancel()
            receives.cancel()
            await asyncio.wait([sends, receives])
            assert await here.call("sum", np.ones(1000)) == 1000
            while there._running or here._incoming:
                await asyncio.sleep(0.01)
            assert not there._incoming

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("length", [0, 31, 32, 33, 64, 1000])
def test_a_long_list_is_sent_in_parts_and_other_tasks_run_in_between(length, monkeypatch):
    sizes, turns, encode_one = [], [], channel.encode
    sent = [{"number": number} for number in range(length)]

    def encode(kind, number, name, content, **options):
        if kind in ("part", "return"):
            sizes.append(len(content))
        return encode_one(kind, number, name, content, **options)

    async def others():
        while True:
            turns.append(len(sizes))
            await asyncio.sleep(0)

    async def run():
        async with connected({"evaluate": lambda: sent}) as (here, _):
            beside = asyncio.create_task(others())
            received = await here.call("evaluate")
            beside.cancel()
            assert here._parts == {}
            return received

    monkeypatch.setattr(channel, "encode", encode)
    assert asyncio.run(run()) == sent
    assert sum(sizes) == length
    assert max(sizes) <= 32
    assert set(range(1, len(sizes))) <= set(turns)


def test_a_list_of_which_a_later_part_cannot_be_sent_is_an_error():
    class Unsendable:
        def __reduce__(self):
            raise ValueError("no pickle")

    async def run():
        async with connected({"evaluate": lambda: [*range(100), Unsendable()]}) as (here, _):
            with pytest.raises(ValueError, match="the answer can't be sent to another process"):
                await here.call("evaluate")
            assert here._parts == {}

    asyncio.run(run())
