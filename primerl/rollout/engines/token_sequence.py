"""``TokenSequence``: token ids of a growing conversation, to which turns append."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import attrs
import numpy as np

_INT32 = np.iinfo(np.int32)
_LEAST_ROOM = 256


@attrs.define(eq=False)
class _Room:
    """An array that sequences share: its first ``used`` entries never change."""

    ids: np.ndarray
    used: int


class TokenSequence(Sequence[int]):
    """An immutable sequence of token ids, which can be extended without copying it.

    Its entries are Python's integers, as in a list. ``np.asarray(sequence)`` is a read-only int32
    array of the same memory.

        prompt = TokenSequence([1, 2, 3])
        longer = prompt.extended([4, 5])

    Raises:
        ValueError: an entry is not an integer of 32 bits, or an array has not one axis.
    """

    __slots__ = ("_count", "_room")
    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash

    def __init__(self, token_ids: Sequence[int] | np.ndarray = ()) -> None:
        ids = as_int32(token_ids)
        self._room = _Room(ids, len(ids))
        self._count = len(ids)

    def extended(self, token_ids: Sequence[int] | np.ndarray) -> "TokenSequence":
        """Return this sequence followed by ``token_ids``.

        The memory is shared when a sequence is extended for the first time, and copied otherwise.
        """
        new = as_int32(token_ids)
        if not len(new):
            return self
        count = self._count + len(new)
        room = self._room
        if room.used != self._count or count > len(room.ids):
            ids = np.empty(max(_LEAST_ROOM, count + count // 2), np.int32)
            ids[: self._count] = room.ids[: self._count]
            room = _Room(ids, self._count)
        room.ids[self._count : count] = new
        room.used = count
        longer = object.__new__(TokenSequence)
        longer._room, longer._count = room, count
        return longer

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        ids = self._room.ids[: self._count]
        ids.setflags(write=False)
        if copy or (dtype is not None and dtype != ids.dtype):
            return np.array(ids, dtype)
        return ids

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found: int | list[int] = self.__array__()[index].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.__array__().tolist())

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Sequence[int]) -> list[int]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenSequence | list | tuple | np.ndarray):
            return np.array_equal(self, other)
        return NotImplemented

    def __repr__(self) -> str:
        return f"TokenSequence({self[:]!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenSequence, (np.asarray(self),)


def as_int32(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Convert token ids to an int32 array that nobody else changes.

    Raises:
        ValueError: an entry is not an integer of 32 bits, or an array has not one axis.
    """
    if isinstance(token_ids, TokenSequence):
        return token_ids.__array__()
    try:
        if not isinstance(token_ids, np.ndarray):
            # Faster than numpy.asarray: for 131k tokens, nothing else in a request takes as long.
            return np.frombuffer(array("i", list(token_ids)), np.int32)
        if token_ids.dtype.kind not in "iu":
            raise TypeError(f"an array of {token_ids.dtype}")
        if token_ids.ndim != 1:
            raise TypeError(f"an array of shape {token_ids.shape}; expected one axis")
        if token_ids.dtype != np.int32 and token_ids.size:
            least, most = int(token_ids.min()), int(token_ids.max())
            if least < _INT32.min or most > _INT32.max:
                raise OverflowError(f"{least if least < _INT32.min else most}")
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be integers of at most 32 bits: {error}") from None
    return token_ids.astype(np.int32)
