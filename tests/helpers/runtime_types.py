"""What jaxtyping's import hook wraps functions of the package in: see pyproject.toml."""

import importlib.util
from typing import Literal, get_args, get_origin

if importlib.util.find_spec("beartype") is None:
    # A machine lent for its GPU has other packages: there, the tests run without these checks.
    def _checked(function):
        return function

else:
    from beartype import BeartypeConf, beartype

    _checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int will do for a float


def checked(function):
    """Types are checked when the function is called.

    Not those of a function within a function, which would be wrapped at every call of the outer
    one: that took half of the time of all tests. And not where a ``Literal`` lists the choices: a
    function refuses others by an error of its own, which is tested.
    """
    hints = function.__annotations__.values()
    chooses = any(
        get_origin(choice) is Literal for hint in hints for choice in (hint, *get_args(hint))
    )
    return function if chooses or "<locals>" in function.__qualname__ else _checked(function)
