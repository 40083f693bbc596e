"""The arguments of a script: what their values may be, as validators of ``attrs`` fields."""

import math
import os
from collections.abc import Callable
from typing import Any

import attrs

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def number(
    *, at_least: float | None = None, above: float | None = None, below: float | None = None
) -> Validator:
    """A validator for a number, which must be finite, and an integer where the field is an ``int``.

        @attrs.frozen
        class Args:
            steps: int = attrs.field(default=20, validator=track.number(at_least=1))

    Args:
        at_least: the least value.
        above: a bound that the value must exceed.
        below: a bound that the value must stay under.

    Raises:
        ValueError: when the class is made with another value; the message names the flag, the value
            and what is expected.
    """
    bounds = {"of at least": at_least, "above": above, "below": below}
    expected = " and ".join(
        f"{word} {bound}" for word, bound in bounds.items() if bound is not None
    )

    def check(_: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        whole = attribute.type in (int, "int")
        kinds = int if whole else (int, float)
        right = isinstance(value, kinds) and not isinstance(value, bool)
        if not (
            right
            and (isinstance(value, int) or math.isfinite(value))
            and (at_least is None or value >= at_least)
            and (above is None or value > above)
            and (below is None or value < below)
        ):
            raise ValueError(
                f"{_flag(attribute.name)} is {value!r}; expected "
                f"{'an integer' if whole else 'a number'} {expected}".rstrip()
            )

    return check


def instead_of(other: str) -> Validator:
    """A validator for a folder that is given instead of another argument, or is the same folder.

    Args:
        other: the name of the other argument, a field of the same class that comes before.

    Raises:
        ValueError: when the class is made with two folders; the message names both.
    """

    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        beside = getattr(instance, other)
        if value is None or beside is None or os.path.realpath(value) == os.path.realpath(beside):
            return
        raise ValueError(
            f"{_flag(attribute.name)} is {value!r}, but {_flag(other)} is {beside!r}: expected one "
            "of them, or the same folder"
        )

    return check


def new_file(_: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """A validator for the path of a file that a script is to write, or None.

    Raises:
        ValueError: something has this name already, or there is no folder to write it in.
    """
    if value is None:
        return
    if os.path.lexists(value):
        raise ValueError(
            f"{_flag(attribute.name)} is {value!r}, which exists already; expected a new file"
        )
    parent = os.path.dirname(os.path.abspath(value))
    if not os.path.isdir(parent):
        raise ValueError(
            f"{_flag(attribute.name)} is {value!r}; expected a file in a folder that exists"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
