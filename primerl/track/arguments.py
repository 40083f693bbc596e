"""Arguments of a script from its command line, and validators of ``attrs`` fields for them."""

import importlib
import importlib.util
import itertools
import math
import os
import sys
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec

from primerl._common import model_names
from primerl._common.folder_owner import require_unowned
from primerl._common.optional import require_all
from primerl.track.interrupts import interruptible
from primerl.track.run_folder import ARGS, read_json, require_new, require_unfinished
from primerl.track.usage import parsed, prints, refuse

Arguments = TypeVar("Arguments")
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


@interruptible()
def command_line(
    kind: type[Arguments],
    *,
    presets: Mapping[str, Mapping[str, Arguments]] | None = None,
    description: str | None = None,
    extras: Callable[[Any], Iterable[str]] = lambda _: (),
    check: Callable[[Any], None] = lambda _: None,
) -> Arguments:
    """Parse this script's command line; with ``--resume``, start from the resumed run's arguments.

    The folder of a resumed run holds the arguments with which the run was started. They are the
    defaults, so only arguments that change need be given. ``Run`` refuses changes of its ``fixed``
    arguments.

    Args:
        kind: an ``attrs`` class with one field per flag, and the fields ``run_dir`` and ``resume``
            (parsed by tyro, https://brentyi.github.io/tyro/). A comment above a field is its help
            if it begins with ``#:``; other comments also explain the fields after theirs.
        presets: default values, chosen by the value of a field, that other flags override. With
            ``{"scale": {"small": Args(), "large": Args(scale="large", lr=1e-6)}}``, the flags
            ``--scale large --steps 3`` change the steps of the second preset. Without ``--scale``,
            the field's own default chooses. A resumed run keeps its own values.
        description: the description in ``--help``.
        extras: returns the optional dependency groups that a run with these arguments needs besides
            ``recipes``. If ``verifiers`` is among them, the environments in the field ``env`` that
            are in ``recipes/environments`` must be installed, too.
        check: raises ``ValueError`` for arguments that do not fit together.

    Raises:
        SystemExit: after ``--help``, with status 0. With status 2, after one line on stderr, which
            only rank 0 prints: a flag is wrong or ``check`` refuses it; optional dependencies are
            missing (the line has the command that installs them); the folder of a new run holds a
            run; the folder to resume is missing, its arguments are not those of this script, or its
            run is finished and no more steps are planned than it took.
    """
    try:
        args = _parsed(kind, sys.argv[1:], presets or {}, description, extras)
        check(args)
        _require_folder(args)
        _require_extras(args, extras)
    except (ImportError, ValueError) as error:
        refuse(str(error))
    return args


def _parsed(
    kind: type[Arguments],
    words: list[str],
    presets: Mapping[str, Mapping[str, Arguments]],
    description: str | None,
    extras: Callable[[Any], Iterable[str]],
) -> Arguments:
    default = _preset(presets, lambda name: _value(name, words))
    if importlib.util.find_spec("tyro") is None:
        _require_extras(_guessed(kind, default, words), extras)
    tyro: Any = importlib.import_module("tyro")
    _require_values(kind, words)
    resumed = _value("resume", words)
    if resumed is not None:
        default = _begun(kind, Path(resumed), presets)
    required = [one for one in attrs.fields(kind) if one.default is attrs.NOTHING]  # type: ignore[arg-type]
    if default is None and not required:
        default = kind()
    settings: dict[str, Any] = {"description": description, "console_outputs": prints()}
    args: Any
    if default is None:
        args = parsed(lambda: tyro.cli(kind, **settings))
    else:
        # tyro would turn each key of a non-empty mapping into a flag.
        fields: Any = default
        mappings = {
            field.name: getattr(fields, field.name)
            for field in attrs.fields(kind)  # type: ignore[arg-type]
            if isinstance(getattr(fields, field.name), dict)
        }
        empty = attrs.evolve(fields, **{name: {} for name in mappings})
        args = parsed(lambda: tyro.cli(kind, default=empty, **settings))
        kept = {name: value for name, value in mappings.items() if _value(name, words) is None}
        args = attrs.evolve(args, **kept)
    return args  # type: ignore[no-any-return]


def _require_folder(args: Any) -> None:
    """Refuse a folder in which no run can begin or go on; rank 0 alone writes there."""
    if not prints() or not hasattr(args, "steps"):
        return
    if getattr(args, "resume", None) is not None:
        require_unfinished(Path(args.resume), args.steps)
    elif getattr(args, "run_dir", None) is not None:
        require_new(Path(args.run_dir))


def _require_values(kind: type[Arguments], words: list[str]) -> None:
    """Refuse the flag of a list without values: a shell variable that is not set, for example."""
    fields: Any = attrs.fields(kind)  # type: ignore[arg-type]
    lists = {_flag(field.name) for field in fields if str(field.type).startswith("tuple")}
    for word, value in itertools.pairwise([*words, "--"]):
        if word.replace("_", "-") in lists and value.startswith("--"):
            raise ValueError(f"{word} has no value; expected at least one, or leave the flag out")


def _begun(
    kind: type[Arguments], folder: Path, presets: Mapping[str, Mapping[str, Arguments]]
) -> Arguments:
    """Return the arguments with which the run in ``folder`` was started, to resume it.

    Arguments that the script has gained since then get the values of the run's preset.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} to resume from")
    begun = read_json(folder / ARGS) | {"run_dir": None, "resume": str(folder)}
    preset: Any = _preset(presets, begun.get)
    if preset is not None:
        begun = attrs.asdict(preset) | begun
    try:
        return msgspec.convert(begun, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{folder} is not a run of this script: {ARGS}: {error}") from None


def _require_extras(args: Any, extras: Callable[[Any], Iterable[str]]) -> None:
    needed = ["recipes", *extras(args)]
    env = getattr(args, "env", None) if "verifiers" in needed else None
    require_all(needed, environments=[env] if isinstance(env, str) else env or ())


def _guessed(kind: Any, preset: Any, words: list[str]) -> Namespace:
    """Parse the arguments as text, without tyro, to find which other dependencies are missing."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    defaults = {}
    for field in attrs.fields(kind):
        default = field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory()
        if preset is not None:
            default = getattr(preset, field.name)
        several = isinstance(default, tuple) or str(field.type).startswith("tuple")
        defaults[field.name] = None if default is attrs.NOTHING else default
        if several:
            parser.add_argument(_flag(field.name), nargs="*")
        else:
            parser.add_argument(_flag(field.name), nargs="?", const=True)
    given, _ = parser.parse_known_args(words)
    said = {name: value for name, value in vars(given).items() if value is not None}
    return Namespace(**defaults | said)


def _preset(
    presets: Mapping[str, Mapping[str, Arguments]], given: Callable[[str], Any]
) -> Arguments | None:
    """Return the preset that a ``given`` field's value chooses; None if there is no such preset."""
    for name, values in presets.items():
        chosen = given(name)
        if isinstance(chosen, str) and chosen in values:
            return values[chosen]
    return None


def _value(field: str, words: list[str]) -> str | None:
    """Return the value that the command line gives to a field: the last one, as in tyro."""
    found = None
    remaining = iter(words)
    for word in remaining:
        name, given, value = word.partition("=")
        if name.replace("_", "-") == _flag(field):
            found = value if given else next(remaining, "")
    return found


def number(
    *, at_least: float | None = None, above: float | None = None, below: float | None = None
) -> Validator:
    """Return a validator for a finite number, an integer if the field is an ``int``.

    For a field of the type ``tuple[int, ...]`` or ``tuple[float, ...]``, the validator checks each
    number, and refuses an empty tuple.

        @attrs.frozen
        class Args:
            steps: int = attrs.field(default=20, validator=track.number(at_least=1))

    Args:
        at_least: the smallest allowed value.
        above: a bound that the value must exceed.
        below: a bound that the value must stay below.

    Raises:
        ValueError: when the class is created with another value; the message names the flag, the
            value and the expectation.
    """
    bounds = {"of at least": at_least, "above": above, "below": below}
    expected = " and ".join(
        f"{word} {bound}" for word, bound in bounds.items() if bound is not None
    )

    def check(_: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        several = typing.get_origin(attribute.type) is tuple
        kind = typing.get_args(attribute.type)[0] if several else attribute.type
        whole = kind in (int, "int")
        values = value if several else (value,)
        if not values or not all(right(one, whole) for one in values):
            shown = " ".join(map(str, values)) if several else repr(value)
            one_or_more = "one or more numbers, each " if several else ""
            raise ValueError(
                f"{_flag(attribute.name)} is {shown or 'empty'}; expected {one_or_more}"
                f"{'an integer' if whole else 'a number'} {expected}".rstrip()
            )

    def right(value: Any, whole: bool) -> bool:
        kinds = int if whole else (int, float)
        return (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and (isinstance(value, int) or math.isfinite(value))
            and (at_least is None or value >= at_least)
            and (above is None or value > above)
            and (below is None or value < below)
        )

    return check


def urls(_: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """Validate base URLs of servers; there may be none.

    Raises:
        ValueError: an entry does not begin with ``http://`` or ``https://``.
    """
    for url in value:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"{_flag(attribute.name)} has {url!r}; expected URLs such as http://host:8000, or "
                "leave the flag out"
            )


def require_model(model: str, *, flag: str) -> None:
    """Check that a flag names a model folder that exists, or could name a model of the hub.

    Raises:
        ValueError: it does not; the message names the flag.
    """
    try:
        model_names.require_model(model)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def require_shared_folder(folder: str | os.PathLike[str], *, flag: str) -> None:
    """Check that a run can publish into a flag's folder, which need not exist yet.

    Raises:
        ValueError: the folder, or its parent if it does not exist, can't be written, or another run
            publishes there; the message names the flag.
    """
    path = Path(folder).absolute()
    place = path if path.exists() else path.parent
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        reason = "is not a folder that may be written" if place.exists() else "does not exist"
        raise ValueError(
            f"{flag} is {path}, but {place} {reason}; pass a folder on a file system that all "
            "hosts share, in one that exists and that this user may write"
        )
    try:
        require_unowned(path)
    except RuntimeError as error:
        raise ValueError(f"{flag}: {error}") from None


def instead_of(other: str) -> Validator:
    """Return a validator for a folder that replaces another argument; both may be the same folder.

    Args:
        other: the name of the other argument, an earlier field of the same class.

    Raises:
        ValueError: when the class is created with two different folders; the message names both.
    """

    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        beside = getattr(instance, other)
        if value is None or beside is None or os.path.realpath(value) == os.path.realpath(beside):
            return
        raise ValueError(
            f"{_flag(attribute.name)} is {value!r}, but {_flag(other)} is {beside!r}; give only "
            "one of the two flags, or the same folder for both"
        )

    return check


def new_file(_: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """Validate the path of a file that a script is to write; None is allowed.

    Raises:
        ValueError: the path exists already, or its parent folder does not exist.
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
