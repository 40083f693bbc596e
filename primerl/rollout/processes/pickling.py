"""Pickling of arguments for a child process, including code that the child could not import."""

import io
import os
import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cloudpickle


def pickle_arguments(**arguments: Any) -> dict[str, bytes]:
    """Pickle each argument for a child process; lambdas and local functions are supported.

    Raises:
        ValueError: an argument can't be pickled; the message names it.
    """
    pickled = {}
    for name, value in arguments.items():
        try:
            pickled[name] = dumps(value)
        except Exception as error:  # user code in __reduce__ may raise anything
            raise ValueError(
                f"the argument {name!r} ({type(value).__name__}) can't be sent to the worker's "
                f"process: {error}; build it inside the function that uses it, or pass "
                "isolation='thread'"
            ) from error
    return pickled


def dumps(value: Any, *, buffer_callback: Callable[[Any], Any] | None = None) -> bytes:
    """Pickle a value, including code that a fresh interpreter can't import, such as a test's."""
    importable: dict[Any, bool] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type | FunctionType):
                module = sys.modules.get(obj.__module__ or "")
                if module is not None and module not in importable:
                    importable[module] = _importable(module)
                    if not importable[module]:
                        cloudpickle.register_pickle_by_value(module)
            return super().reducer_override(obj)

    file = io.BytesIO()
    try:
        Pickler(file, protocol=5, buffer_callback=buffer_callback).dump(value)
    finally:
        for module, found in importable.items():
            if not found:
                cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _importable(module: Any) -> bool:
    """Return whether a fresh interpreter with this ``sys.path`` finds the same module by name."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":
        return True  # built in; cloudpickle itself knows __main__
    path: Any = None
    spec = None
    name = ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        found = (
            finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec")
        )
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and os.path.realpath(spec.origin or "") == os.path.realpath(file)


def load_arguments(arguments: dict[str, bytes]) -> dict[str, Any]:
    """Load the arguments that ``pickle_arguments`` pickled.

    Raises:
        ValueError: an argument can't be rebuilt here; the message names it.
    """
    loaded = {}
    for name, content in arguments.items():
        try:
            loaded[name] = pickle.loads(content)
        except Exception as error:  # for example, a module that is missing here
            raise ValueError(
                f"the argument {name!r} can't be rebuilt in the worker's process: "
                f"{type(error).__name__}: {error}"
            ) from error
    return loaded
