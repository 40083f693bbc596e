"""Calls in both directions over one socket, between a process and a child that it started.

A message is a pickle whose large buffers (numpy arrays) travel beside it, as they lie in memory:
nothing is turned into Python lists. Both ends belong to one run and run the same code, so pickle
is safe here; a channel is only ever opened on a socket that was inherited, never on an address.
"""

import asyncio
import contextlib
import itertools
import pickle
import socket
import struct
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

Handlers = Mapping[str, Callable[..., Any]]

_HEADER = struct.Struct("<QI")  # bytes of the pickle, number of buffers
_LENGTH = struct.Struct("<Q")
_IN_BAND = 4096  # smaller buffers cost less inside the pickle
MAX_MESSAGE_BYTES = 1 << 31


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a connection: ``call`` runs a handler at the other end and returns its result.

    A handler is a function or coroutine function, found by its name. Cancelling a call cancels
    the handler. An exception in a handler is raised by ``call``, its causes included, with the
    handler's traceback in a note.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Handlers,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.handlers = dict(handlers)
        self._reader = reader
        self._writer = writer
        self._max_message_bytes = max_message_bytes
        self._ids = itertools.count()
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
            await self._send(("call", number, name, args))
            return await answer
        except asyncio.CancelledError:
            if not self._closed:
                self._write(_encode(("cancel", number)))
            raise
        finally:
            self._calls.pop(number, None)

    def notify(self, name: str, *args: Any) -> None:
        """Run the handler ``name`` at the other end, without an answer."""
        if not self._closed:
            self._write(_encode(("notify", name, args)))

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
        self._closed = True
        self._writer.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ChannelClosed("the other process is gone"))
        for task in self._running.values():
            task.cancel()

    def _dispatch(self, message: tuple[Any, ...]) -> None:
        kind, *content = message
        if kind == "call":
            number, name, args = content
            self._running[number] = asyncio.create_task(self._answer(number, name, args))
        elif kind == "notify":
            name, args = content
            self.handlers[name](*args)
        elif kind == "cancel":
            if task := self._running.get(content[0]):
                task.cancel()
        else:
            number, result = content
            answer = self._calls.get(number)
            if answer is None or answer.done():
                return  # it was cancelled here
            if kind == "return":
                answer.set_result(result)
            else:
                answer.set_exception(_raised(result))

    async def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            result = self.handlers[name](*args)
            if asyncio.iscoroutine(result):
                result = await result
            await self._send(("return", number, result))
        except asyncio.CancelledError:
            # Raised as itself, it would look as if the caller were cancelled.
            self._refuse(number, RuntimeError(f"{name!r} was cancelled in the other process"))
            raise
        except Exception as error:  # whatever a handler raises is the caller's to see
            self._refuse(number, error)
        finally:
            self._running.pop(number, None)

    def _refuse(self, number: int, error: Exception) -> None:
        if not self._closed:
            self._write(_encode(("raise", number, _description(error))))

    async def _send(self, message: tuple[Any, ...]) -> None:
        if self._closed:
            raise ChannelClosed("the other process is gone")
        parts = _encode(message)
        size = sum(len(part) for part in parts)
        if size > self._max_message_bytes:
            raise ValueError(
                f"a message of {size:,} bytes ({message[0]}) exceeds {self._max_message_bytes:,}; "
                "an environment's reply should be shorter"
            )
        self._write(parts)
        with contextlib.suppress(ConnectionError):  # serve() sees that the other end is gone
            await self._writer.drain()

    def _write(self, parts: list[Any]) -> None:
        self._writer.writelines(parts)

    async def _receive(self) -> tuple[Any, ...]:
        size, count = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
        lengths = await self._reader.readexactly(count * _LENGTH.size)
        content = await self._reader.readexactly(size)
        buffers = [
            await self._reader.readexactly(length) for (length,) in _LENGTH.iter_unpack(lengths)
        ]
        message: tuple[Any, ...] = pickle.loads(content, buffers=buffers)
        return message


def _encode(message: tuple[Any, ...]) -> list[Any]:
    buffers: list[Any] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND:
            return True
        buffers.append(raw)
        return False

    try:
        content = pickle.dumps(message, protocol=5, buffer_callback=beside)
    except (pickle.PicklingError, AttributeError, TypeError):  # a local class or a lambda
        buffers.clear()
        content = cloudpickle.dumps(message, protocol=5, buffer_callback=beside)
    lengths = b"".join(_LENGTH.pack(len(buffer)) for buffer in buffers)
    return [_HEADER.pack(len(content), len(buffers)), lengths, content, *buffers]


def _description(error: BaseException) -> list[tuple[bytes | None, str, str]]:
    """An exception and its causes, outermost first, each as (pickle, summary, traceback)."""
    chain: list[tuple[bytes | None, str, str]] = []
    link: BaseException | None = error
    while link is not None:
        text = "".join(traceback.format_exception(link, chain=False))
        chain.append((_pickled(link), f"{type(link).__name__}: {link}", text))
        link = link.__cause__
    return chain


def _pickled(error: BaseException) -> bytes | None:
    """The exception's pickle, if it survives a round trip: many take other arguments than kept."""
    try:
        content: bytes = cloudpickle.dumps(error)
        pickle.loads(content)
    except Exception:  # a stranger's exception may fail to be rebuilt in any way
        return None
    return content


def _raised(chain: list[tuple[bytes | None, str, str]]) -> BaseException:
    errors: list[BaseException] = []
    for content, summary, text in chain:
        try:
            error = RuntimeError(summary) if content is None else pickle.loads(content)
        except Exception:  # its module may not exist on this side
            error = RuntimeError(summary)
        error.add_note(f"in the other process:\n{text}")
        errors.append(error)
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]
