"""How calls between processes are encoded: a pickle with its large buffers beside it, in frames.

A message's large buffers (numpy arrays) are sent without copying them into the pickle. Messages
are cut into frames of bounded size, so that a message may have any size and short ones (a
heartbeat, a cancellation) are sent between the frames of long ones.
"""

import pickle
import struct
from collections.abc import Generator, Iterator
from typing import Any

import attrs
import cloudpickle

from primerl.rollout.processes.pickling import dumps

FRAME = struct.Struct("<QI")  # the message's number, and bytes of the frame: 0 aborts the message
_HEADER = struct.Struct("<QQI")  # bytes of the envelope, bytes of the content, number of buffers
_BUFFER = struct.Struct("<Q?")  # bytes of a buffer, and whether it may be written to
_IN_BAND = 4096  # smaller buffers cost less inside the pickle


@attrs.frozen
class Message:
    """A received message; its content is pickled, so a failure to load it fails its call alone."""

    kind: str
    number: int
    name: str
    content: bytearray
    buffers: list[Any]

    def load(self) -> Any:
        """The content, unpickled."""
        return pickle.loads(self.content, buffers=self.buffers)


def encode(kind: str, number: int, name: str, content: Any, *, by_value: bool = False) -> list[Any]:
    """A message as a list of buffers; ``by_value`` as in ``Channel``."""
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
    """An encoded message in frames of at most ``frame_bytes``, each a list of buffers to write."""
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
        """Add a frame; returns the message when that was the last one."""
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
    return Message(kind, number, name, content, buffers)
