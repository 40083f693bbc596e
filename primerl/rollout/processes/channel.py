"""Calls in both directions over one socket, between a process and a child that it started.

A message is a pickle whose large buffers (numpy arrays) travel beside it, as they lie in memory:
nothing is turned into Python lists. It is sent in frames of bounded size, so a message may be of
any size, and the frames of others (a heartbeat, a cancellation) go between those of a long one.
Both ends belong to one run and run the same code, so pickle is safe here; a channel is only ever
opened on a socket that was inherited, never on an address.
"""

import asyncio
import contextlib
import itertools
import pickle
import socket
import struct
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import attrs
import cloudpickle

from primerl.rollout.errors import summary
from primerl.rollout.processes.crossing import dumps

Handlers = Mapping[str, Callable[..., Any]]

_FRAME = struct.Struct("<QI")  # the message's number, and bytes of the frame: 0 ends it unfinished
_HEADER = struct.Struct("<QQI")  # bytes of the envelope, bytes of the content, number of buffers
_BUFFER = struct.Struct("<Q?")  # bytes of a buffer, and whether it may be written to
_IN_BAND = 4096  # smaller buffers cost less inside the pickle
_MOST_CAUSES = 20
FRAME_BYTES = 1 << 20


class ChannelClosed(ConnectionError):
    """The other end is gone."""


@attrs.frozen
class _Message:
    """What arrived; ``content`` stays pickled, so what can't be rebuilt fails its call alone."""

    kind: str
    number: int
    name: str
    content: bytearray
    buffers: list[Any]

    def open(self) -> Any:
        return pickle.loads(self.content, buffers=self.buffers)


class Channel:
    """One end of a connection: ``call`` runs a handler at the other end and returns its result.

    A handler is a function or coroutine function, found by its name. Cancelling a call cancels
    the handler. An exception in a handler is raised by ``call``, its causes included, with the
    handler's traceback in a note.

    ``by_value`` pickles the arguments of calls for an end that can't import this end's own code (a
    script's, a notebook's). ``max_message_bytes`` refuses to send what is larger.
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
        self._ids = itertools.count()
        self._sent = itertools.count()
        self._incoming: dict[int, _Incoming] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._closed = False

    @classmethod
    async def over(cls, sock: socket.socket, handlers: Handlers, **options: Any) -> "Channel":
        """A channel over a connected socket, which it owns from now on."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        return cls(reader, writer, handlers, **options)

    async def call(self, name: str, *args: Any) -> Any:
        """The result of the handler ``name`` at the other end.

        Raises:
            ChannelClosed: the other end is gone, or goes before it answers.
            ValueError: the arguments can't be sent. What the handler raises is raised.
        """
        number = next(self._ids)
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

    def notify(self, name: str, *args: Any) -> None:
        """Run the handler ``name`` at the other end, without an answer."""
        self._post("notify", 0, name, args)

    async def serve(self) -> None:
        """Answer calls until the other end goes away; everything that waits for it then fails."""
        try:
            while True:
                self._dispatch(await self._receive())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close this end: open calls fail, running handlers are cancelled."""
        if not self._closed and not self._writer.is_closing():
            self._writer.write_eof()  # a fork of this process may hold the socket open
        self._closed = True
        self._writer.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ChannelClosed("the other process is gone"))
        for task in self._running.values():
            task.cancel()

    def _dispatch(self, message: _Message) -> None:
        number = message.number
        if message.kind == "call":
            task = asyncio.create_task(self._answer(message))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))
        elif message.kind == "notify":
            self.handlers[message.name](*message.open())
        elif message.kind == "cancel":
            if running := self._running.get(number):
                running.cancel()
        elif (answer := self._calls.get(number)) is not None and not answer.done():
            try:
                result = message.open()
            except Exception as error:  # a class that only the other end has, say
                result = [(None, f"the answer can't be rebuilt here: {summary(error)}", "")]
                answer.set_exception(_raised(result))
            else:
                if message.kind == "return":
                    answer.set_result(result)
                else:
                    answer.set_exception(_raised(result))

    async def _answer(self, message: _Message) -> None:
        name, number = message.name, message.number
        try:
            result = self.handlers[name](*message.open())
            if asyncio.iscoroutine(result):
                result = await result
            await self._send("return", number, "", result)
        except asyncio.CancelledError:
            # Raised as itself, it would look as if the caller were cancelled.
            error = RuntimeError(f"{name!r} was cancelled in the other process")
            self._post("raise", number, "", _description(error))
            raise
        except BaseException as error:  # whatever a handler raises is the caller's to see
            self._post("raise", number, "", _description(error))
            if isinstance(error, SystemExit | KeyboardInterrupt):
                raise

    def _post(self, kind: str, number: int, name: str = "", content: Any = ()) -> None:
        if not self._closed and not self._writer.is_closing():
            for frame in self._frames(_encode(kind, number, name, content)):
                self._writer.writelines(frame)

    async def _send(
        self, kind: str, number: int, name: str, content: Any, *, by_value: bool = False
    ) -> None:
        if self._closed or self._writer.is_closing():
            raise ChannelClosed("the other process is gone")
        try:
            parts = _encode(kind, number, name, content, by_value=by_value)
        except Exception as error:  # whatever a stranger's __reduce__ raises
            what = f"the arguments of {name!r}" if kind == "call" else "the answer"
            raise ValueError(f"{what} can't cross into another process: {error}") from error
        size = sum(len(part) for part in parts)
        if self.max_message_bytes is not None and size > self.max_message_bytes:
            raise ValueError(
                f"a message of {size:,} bytes ({kind} {name}) exceeds "
                f"{self.max_message_bytes:,}; an environment's reply should be shorter"
            )
        sent = next(self._sent)
        try:
            for frame in self._frames(parts, sent):
                if self._writer.is_closing():
                    return  # serve() sees that the other end is gone
                self._writer.writelines(frame)
                with contextlib.suppress(ConnectionError):
                    await self._writer.drain()
        except asyncio.CancelledError:
            if not self._writer.is_closing():
                self._writer.write(_FRAME.pack(sent, 0))
            raise

    def _frames(self, parts: list[Any], sent: int | None = None) -> Iterator[list[Any]]:
        number = next(self._sent) if sent is None else sent
        for pieces in _pieces(parts, FRAME_BYTES):
            yield [_FRAME.pack(number, sum(len(piece) for piece in pieces)), *pieces]

    async def _receive(self) -> _Message:
        while True:
            number, size = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
            if size == 0:
                self._incoming.pop(number, None)
                continue
            frame = await self._reader.readexactly(size)
            incoming = self._incoming.setdefault(number, _Incoming())
            message = incoming.add(frame)
            if message is not None:
                del self._incoming[number]
                return message


class _Incoming:
    """A message of which some frames have arrived."""

    def __init__(self) -> None:
        self._parts = _decode()
        self._missing = memoryview(next(self._parts))

    def add(self, frame: bytes) -> _Message | None:
        """Take in a frame; returns the message when that was its last."""
        rest = memoryview(frame)
        while rest:
            count = min(len(rest), len(self._missing))
            self._missing[:count] = rest[:count]
            rest, self._missing = rest[count:], self._missing[count:]
            while not self._missing:
                try:
                    self._missing = memoryview(next(self._parts))
                except StopIteration as end:
                    message: _Message = end.value
                    return message
        return None


def _decode() -> Generator[bytearray, None, _Message]:
    """Yields the parts of an encoded message, to be filled one after the other; returns it."""
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
    return _Message(kind, number, name, content, buffers)


def _pieces(parts: list[Any], most: int) -> Iterator[list[Any]]:
    """The bytes of ``parts`` in order, as lists of pieces that have ``most`` bytes together."""
    pieces: list[memoryview] = []
    room = most
    for part in parts:
        rest = memoryview(part)
        while rest:
            piece = rest[:room]
            pieces.append(piece)
            rest, room = rest[len(piece) :], room - len(piece)
            if room == 0:
                yield pieces
                pieces, room = [], most
    if pieces:
        yield pieces


def _encode(
    kind: str, number: int, name: str, content: Any, *, by_value: bool = False
) -> list[Any]:
    buffers: list[Any] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND:
            return True
        buffers.append(raw)
        return False

    try:
        if by_value:
            pickled = dumps(content, buffer_callback=beside)
        else:
            pickled = pickle.dumps(content, protocol=5, buffer_callback=beside)
    except (pickle.PicklingError, AttributeError, TypeError):  # a local class or a lambda
        buffers.clear()
        pickled = cloudpickle.dumps(content, protocol=5, buffer_callback=beside)
    envelope = pickle.dumps((kind, number, name))
    sizes = b"".join(_BUFFER.pack(len(buffer), not buffer.readonly) for buffer in buffers)
    header = _HEADER.pack(len(envelope), len(pickled), len(buffers))
    return [header, envelope, sizes, pickled, *buffers]


def _description(error: BaseException) -> list[tuple[bytes | None, str, str]]:
    """An exception and its causes, outermost first, each as (pickle, summary, traceback)."""
    chain: list[tuple[bytes | None, str, str]] = []
    seen: set[int] = set()  # an exception may be its own cause
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _MOST_CAUSES:
        seen.add(id(link))
        text = "".join(traceback.format_exception(link, chain=False))
        chain.append((_pickled(link), summary(link), text))
        link = link.__cause__
    return chain


def _pickled(error: BaseException) -> bytes | None:
    """The exception's pickle, if it survives a round trip: many take other arguments than kept."""
    if not isinstance(error, Exception):
        return None  # raised as itself, it would pass by whoever handles errors
    try:
        content: bytes = cloudpickle.dumps(error)
        str(pickle.loads(content))
    except Exception:  # a stranger's exception may fail to be rebuilt in any way
        return None
    return content


def _raised(chain: list[tuple[bytes | None, str, str]]) -> BaseException:
    errors: list[BaseException] = []
    for content, short, text in chain:
        try:
            error = RuntimeError(short) if content is None else pickle.loads(content)
        except Exception:  # its module may not exist on this side
            error = RuntimeError(short)
        error.add_note(f"in the other process:\n{text}")
        errors.append(error)
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]
