"""A channel: calls in both directions over one socket, between a process and its child.

Both ends belong to one run and run the same code, so pickle is safe here. A channel is only ever
opened on an inherited socket, never on an address.

A message is a pickle with its large buffers (numpy arrays), which are not copied. It is sent in
frames of bounded size: a message may have any size, and a short message (a heartbeat, a
cancellation) is sent between the frames of a long one. A long list that a handler returns is sent
in parts, because pickling thousands of results at once would block both event loops.
"""

import asyncio
import contextlib
import itertools
import pickle
import socket
import struct
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import attrs
import cloudpickle

from primerl.rollout.errors import describe_error, rebuild_error, summary
from primerl.rollout.processes.pickling import dumps

FRAME = struct.Struct("<QI")  # message number, bytes of the frame; 0 bytes abort the message
_HEADER = struct.Struct("<QQI")  # bytes of the envelope, bytes of the content, number of buffers
_BUFFER = struct.Struct("<Q?")  # bytes of a buffer, whether it is writable
_IN_BAND = 4096  # bytes; smaller buffers cost less inside the pickle
FRAME_BYTES = 1 << 20
LIST_ITEMS = 32  # of a list that a handler returns; more are sent in several messages

Handlers = Mapping[str, Callable[..., Any]]

# ---- messages ----


@attrs.frozen
class Message:
    """A received message.

    Its content stays pickled until ``load``, so a failure to load it fails only its own call.
    """

    kind: str
    number: int
    name: str
    content: bytearray
    buffers: list[Any]

    def load(self) -> Any:
        """Return the unpickled content."""
        return pickle.loads(self.content, buffers=self.buffers)


def encode(kind: str, number: int, name: str, content: Any, *, by_value: bool = False) -> list[Any]:
    """Encode a message as a list of buffers; ``by_value`` is explained in ``Channel``."""
    buffers: list[Any] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND:
            return True
        buffers.append(raw)
        return False

    try:
        if by_value:
            pickled = dumps(content, buffer_callback=in_band)
        else:
            pickled = pickle.dumps(content, protocol=5, buffer_callback=in_band)
    except (pickle.PicklingError, AttributeError, TypeError):  # a local class or a lambda
        buffers.clear()
        pickled = cloudpickle.dumps(content, protocol=5, buffer_callback=in_band)
    envelope = pickle.dumps((kind, number, name))
    sizes = b"".join(_BUFFER.pack(len(buffer), not buffer.readonly) for buffer in buffers)
    header = _HEADER.pack(len(envelope), len(pickled), len(buffers))
    return [header, envelope, sizes, pickled, *buffers]


def frames(parts: list[Any], number: int, frame_bytes: int) -> Iterator[list[Any]]:
    """Split an encoded message into frames of at most ``frame_bytes``, each a list of buffers."""
    pieces: list[memoryview] = []
    room = frame_bytes
    for part in parts:
        rest = memoryview(part)
        while rest:
            piece = rest[:room]
            pieces.append(piece)
            rest, room = rest[len(piece) :], room - len(piece)
            if room == 0:
                yield [FRAME.pack(number, frame_bytes), *pieces]
                pieces, room = [], frame_bytes
    if pieces:
        yield [FRAME.pack(number, frame_bytes - room), *pieces]


class IncomingMessage:
    """A message whose frames are arriving."""

    def __init__(self) -> None:
        self._parts = _decode()
        self._missing = memoryview(next(self._parts))

    def add(self, frame: bytes) -> Message | None:
        """Add a frame; return the message if this was its last frame."""
        rest = memoryview(frame)
        while rest:
            count = min(len(rest), len(self._missing))
            self._missing[:count] = rest[:count]
            rest, self._missing = rest[count:], self._missing[count:]
            while not self._missing:
                try:
                    self._missing = memoryview(next(self._parts))
                except StopIteration as end:
                    message: Message = end.value
                    return message
        return None


def _decode() -> Generator[bytearray, None, Message]:
    """Yield a buffer for each part of an encoded message, to be filled; return the message."""
    header = bytearray(_HEADER.size)
    yield header
    envelope_size, content_size, count = _HEADER.unpack(header)
    envelope = bytearray(envelope_size)
    yield envelope
    sizes = bytearray(count * _BUFFER.size)
    yield sizes
    content = bytearray(content_size)
    yield content
    buffers: list[Any] = []
    for size, writable in _BUFFER.iter_unpack(sizes):
        buffer = bytearray(size)
        yield buffer
        buffers.append(buffer if writable else memoryview(buffer).toreadonly())
    kind, number, name = pickle.loads(envelope)
    return Message(kind, number, name, content, buffers)


# ---- calls ----


class ChannelClosed(ConnectionError):
    """The other end has closed the connection."""


class Channel:
    """One end of a connection: ``call`` runs a handler at the other end and returns its result.

    A handler is a function or coroutine function, found by its name. Cancelling a call cancels
    the handler. ``call`` raises the handler's exception, with its causes, and with the handler's
    traceback in a note.

    ``by_value`` pickles the code of arguments for an end that can't import it (code of a script or
    a notebook). Messages larger than ``max_message_bytes`` are not sent.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Handlers,
        *,
        by_value: bool = False,
        max_message_bytes: int | None = None,
    ) -> None:
        self.handlers = dict(handlers)
        self.max_message_bytes = max_message_bytes
        self._reader = reader
        self._writer = writer
        self._by_value = by_value
        self._call_numbers = itertools.count()
        self._message_numbers = itertools.count()
        self._incoming: dict[int, IncomingMessage] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._parts: dict[int, list[Any]] = {}  # of answers that are arriving
        self._running: dict[int, asyncio.Task[None]] = {}

    @classmethod
    async def over(cls, sock: socket.socket, handlers: Handlers, **options: Any) -> "Channel":
        """Open a channel over a connected socket, which the channel then owns."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        return cls(reader, writer, handlers, **options)

    async def call(self, name: str, *args: Any) -> Any:
        """Run the handler ``name`` at the other end and return its result.

        Raises:
            ChannelClosed: the other end is closed, before or while it runs the handler.
            ValueError: the arguments can't be sent.
            Exception: what the handler raises.
        """
        number = next(self._call_numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            await self._send("call", number, name, args, by_value=self._by_value)
            return await answer
        except asyncio.CancelledError:
            self._post("cancel", number)
            raise
        finally:
            self._calls.pop(number, None)
            self._parts.pop(number, None)

    def notify(self, name: str, *args: Any) -> None:
        """Run the handler ``name`` at the other end without waiting for it."""
        self._post("notify", 0, name, args)

    async def serve(self) -> None:
        """Answer calls until the other end closes; all pending calls then fail."""
        try:
            while True:
                message = await self._receive()
                self._dispatch(message)
                if message.kind == "part":
                    await asyncio.sleep(0)  # several parts may have arrived
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close this end: pending calls fail, and running handlers are cancelled."""
        if not self._writer.is_closing():
            self._writer.write_eof()  # a fork of this process may hold the socket open
        self._writer.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ChannelClosed("the other process is gone"))
        for task in self._running.values():
            if not task.cancelling():  # a second cancellation would cut off its cleanup
                task.cancel()

    async def wait_for_handlers(self, timeout_s: float) -> None:
        """After ``close``, wait until the cancelled handlers have cleaned up."""
        if self._running:
            await asyncio.wait(self._running.values(), timeout=timeout_s)

    def _dispatch(self, message: Message) -> None:
        number = message.number
        if message.kind == "call":
            task = asyncio.create_task(self._answer(message))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))
        elif message.kind == "notify":
            self.handlers[message.name](*message.load())
        elif message.kind == "cancel":
            if running := self._running.get(number):
                running.cancel()
        elif (answer := self._calls.get(number)) is not None and not answer.done():
            try:
                result = message.load()
            except Exception as error:  # for example, only the other end has its class
                answer.set_exception(
                    rebuild_error(
                        [(None, f"the answer can't be rebuilt here: {summary(error)}", "")]
                    )
                )
            else:
                if message.kind == "part":
                    self._parts.setdefault(number, []).extend(result)
                elif message.kind == "return":
                    parts = self._parts.get(number)
                    answer.set_result([*parts, *result] if parts else result)
                else:
                    answer.set_exception(rebuild_error(result))

    async def _answer(self, message: Message) -> None:
        name, number = message.name, message.number
        try:
            result = self.handlers[name](*message.load())
            if asyncio.iscoroutine(result):
                result = await result
            await self._send("return", number, "", await self._last_part(number, result))
        except asyncio.CancelledError:
            # A CancelledError would look to the caller as if the caller itself were cancelled.
            error = RuntimeError(f"{name!r} was cancelled in the other process")
            self._post("raise", number, "", describe_error(error))
            raise
        except BaseException as error:  # whatever a handler raises is raised in the caller
            self._post("raise", number, "", describe_error(error))
            if isinstance(error, SystemExit | KeyboardInterrupt):
                raise

    async def _last_part(self, number: int, result: Any) -> Any:
        """Send the parts of a long list but the last one, which is returned."""
        if type(result) is not list or self.max_message_bytes is not None:
            return result
        while len(result) > LIST_ITEMS:
            await self._send("part", number, "", result[:LIST_ITEMS])
            await asyncio.sleep(0)  # other tasks run in between
            result = result[LIST_ITEMS:]
        return result

    def _post(self, kind: str, number: int, name: str = "", content: Any = ()) -> None:
        """Send a short message without waiting."""
        if not self._writer.is_closing():
            parts = encode(kind, number, name, content)
            for frame in frames(parts, next(self._message_numbers), FRAME_BYTES):
                self._writer.writelines(frame)

    async def _send(
        self, kind: str, number: int, name: str, content: Any, *, by_value: bool = False
    ) -> None:
        if self._writer.is_closing():
            raise ChannelClosed("the other process is gone")
        try:
            parts = encode(kind, number, name, content, by_value=by_value)
        except Exception as error:  # user code in __reduce__ may raise anything
            what = f"the arguments of {name!r}" if kind == "call" else "the answer"
            raise ValueError(f"{what} can't be sent to another process: {error}") from error
        size = sum(len(part) for part in parts)
        if self.max_message_bytes is not None and size > self.max_message_bytes:
            raise ValueError(
                f"a message of {size:,} bytes ({kind} {name}) exceeds "
                f"{self.max_message_bytes:,}; make the environment's reply shorter"
            )
        message_number = next(self._message_numbers)
        try:
            for frame in frames(parts, message_number, FRAME_BYTES):
                if self._writer.is_closing():
                    return  # serve() handles the closing of the other end
                self._writer.writelines(frame)
                with contextlib.suppress(ConnectionError):
                    await self._writer.drain()
        except asyncio.CancelledError:
            if not self._writer.is_closing():
                self._writer.write(FRAME.pack(message_number, 0))
            raise

    async def _receive(self) -> Message:
        while True:
            number, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
            if size == 0:
                self._incoming.pop(number, None)
                continue
            frame = await self._reader.readexactly(size)
            message = self._incoming.setdefault(number, IncomingMessage()).add(frame)
            if message is not None:
                del self._incoming[number]
                return message
