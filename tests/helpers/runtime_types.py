"""Runtime type checks that jaxtyping's import hook adds to the package; see pyproject.toml."""

import importlib.util
from typing import Literal, get_args, get_origin

if importlib.util.find_spec("beartype") is None:
    # Without beartype, for example on a machine lent for its GPU, tests run without these checks.
    def _checked(function):
        return function

else:
    from beartype import BeartypeConf, beartype

    _checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # accepts an int as a float


def checked(function):
    """Wrap a function so that its types are checked when it is called.

    Two kinds of functions are not wrapped. A nested function would be wrapped at every call of the
    outer function, which took half of the time of all tests. A function with a ``Literal`` argument
    refuses other values with its own error, which is tested.
    """
    hints = function.__annotations__.values()
    chooses = any(
        get_origin(choice) is Literal for hint in hints for choice in (hint, *get_args(hint))
    )
    return function if chooses or "<locals>" in function.__qualname__ else _checked(function)
