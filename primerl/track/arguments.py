"""The arguments of a script, and what their values may be: validators of ``attrs`` fields."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec

from primerl._optional import require
from primerl.track.run_folder import ARGS, read_json

Arguments = TypeVar("Arguments")
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def command_line(kind: type[Arguments], *, description: str | None = None) -> Arguments:
    """The arguments of this script from its command line; with ``--resume``, those of that run.

    A resumed run's folder has the arguments that it was begun with: they are the defaults, so only
    what is to change need be given again. What may not change, ``Run`` refuses (``fixed``).

    Args:
        kind: an ``attrs`` class with a field for each flag, and the fields ``run_dir`` and
            ``resume`` (https://brentyi.github.io/tyro/). A comment above a field is its help, if it
            begins with ``#:``; other comments also explain the fields after theirs.
        description: for ``--help``.

    Raises:
        ValueError: the folder to resume is missing, or its arguments are not those of this script.
        SystemExit: after ``--help``, or for flags that do not fit.
    """
    tyro: Any = require("tyro", extra="recipes")
    folder = _resumed_folder(sys.argv[1:])
    if folder is None:
        return tyro.cli(kind, description=description)  # type: ignore[no-any-return]
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} to resume from")
    begun = read_json(folder / ARGS) | {"run_dir": None, "resume": str(folder)}
    try:
        defaults = msgspec.convert(begun, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{folder} is no run of this script: {ARGS}: {error}") from None
    return tyro.cli(kind, description=description, default=defaults)  # type: ignore[no-any-return]


def _resumed_folder(words: list[str]) -> Path | None:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, given, value = word.partition("=")
        if name == "--resume":
            return Path(value if given else following)
    return None


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
