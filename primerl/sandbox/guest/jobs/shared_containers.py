"""Lists, dictionaries and sets that the tests and the code under test both hold.

In one process, a test sees how the code under test changes a list that the test passed, and that
code sees how a test changes its dictionaries. Here each side has a copy, and every message brings
the changes of the sender's copies.
"""

import collections
import operator
import sys
from collections.abc import Iterator
from typing import Any, cast

_KINDS: dict[str, type] = {
    "list": list,
    "dict": dict,
    "set": set,
    "bytearray": bytearray,
    "deque": collections.deque,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def kind_of(value: Any) -> str | None:
    """Return the name of a container's class; None if values of this class are not shared."""
    return _NAMES.get(type(value))


def content_of(container: Any) -> tuple[Any, ...]:
    """Return the elements of a container; for dictionaries, keys and values in turn."""
    if isinstance(container, dict):
        parts: tuple[Any, ...] = tuple(part for pair in container.items() for part in pair)
        return (cast(Any, container).default_factory, *parts) if _has_factory(container) else parts
    return (bytes(container),) if type(container) is bytearray else tuple(container)


class SharedContainers:
    """The containers of one side, by number. Numbers that this side gave have its sign."""

    def __init__(self, sign: int) -> None:
        self._next = sign
        self._sign = sign
        self._held: dict[int, list[Any]] = {}  # a container, and its content when last sent
        self._numbers: dict[int, int] = {}
        self._held[0] = [[], ()]
        self._unused = self._references(0)  # of a container that nothing else refers to
        del self._held[0]

    def _references(self, number: int) -> int:
        return sys.getrefcount(self._held[number][0])

    def number_of(self, container: Any) -> int | None:
        """Return the number of a container, if it has one."""
        return self._numbers.get(id(container))

    def container(self, number: int) -> Any:
        """Return the container with a number.

        Raises:
            KeyError: there is none.
        """
        return self._held[number][0]

    def holds(self, number: int) -> bool:
        """Whether there is a container with this number."""
        return number in self._held

    def add(self, container: Any) -> int:
        """Give a container of this side its number. It counts as not sent yet."""
        self._hold(self._next, container)
        self._next += self._sign
        return self._next - self._sign

    def create(self, number: int, kind: str) -> None:
        """Create this side's empty copy of a container of the other side.

        Raises:
            ValueError: the number is one that this side gives, or the kind is unknown.
        """
        if number * self._sign >= 0 or kind not in _KINDS:
            raise ValueError("a message holds a malformed container: its number or kind is unknown")
        self._hold(number, _KINDS[kind]())

    def _hold(self, number: int, container: Any) -> None:
        self._held[number] = [container, None]
        self._numbers[id(container)] = number

    def changes(self) -> Iterator[tuple[int, str, tuple[Any, ...]]]:
        """Yield the number, kind and content of each container that changed since it was sent.

        Containers that are added meanwhile are yielded too.
        """
        sent = 0
        while sent < len(self._held):
            for number in list(self._held)[sent:]:
                sent += 1
                container, before = self._held[number]
                content = content_of(container)
                if before is None or not _same(content, before):
                    self._held[number][1] = content
                    yield number, _NAMES[type(container)], content

    def replace(self, number: int, content: list[Any]) -> None:
        """Give a container the content that the other side sent."""
        held = self._held[number]
        container = held[0]
        if isinstance(container, dict):
            if _has_factory(container):
                factory, *content = content
                cast(Any, container).default_factory = factory
            pairs = list(zip(content[::2], content[1::2], strict=True))
            container.clear()
            # Not ``update``, which adds the counts of a Counter.
            for key, value in pairs:
                container[key] = value
        elif isinstance(container, set):
            container.clear()
            container.update(content)
        elif isinstance(container, bytearray):
            (container[:],) = content
        else:
            container.clear()
            container.extend(content)
        held[1] = content_of(container)

    def forget_unused(self) -> list[int]:
        """Forget the containers that only this table refers to; return their numbers."""
        forgotten: list[int] = []
        before = -1
        while before != len(forgotten):  # those inside forgotten containers come next
            before = len(forgotten)
            unused = [n for n in list(self._held) if self._references(n) <= self._unused]
            self.forget(unused)
            forgotten += unused
        return forgotten

    def forget(self, numbers: list[int]) -> None:
        """Forget the containers with these numbers."""
        for number in numbers:
            held = self._held.pop(number, None)
            if held is not None:
                self._numbers.pop(id(held[0]), None)


def _has_factory(container: Any) -> bool:
    return type(container) is collections.defaultdict


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    if len(left) == 1 and type(left[0]) is bytes:
        return left == right
    return len(left) == len(right) and all(map(operator.is_, left, right))
