"""Arguments that choose by a name say among which names, so that editors and checkers know them."""

import importlib
import inspect
import pkgutil

import primerl
from primerl import weights

# Any text will do: names of things outside the library, and labels of a user's own.
FREE = {"adapter", "address", "agent", "environment", "episode_id", "host", "model_type", "route"}
FREE |= {"id", "instruction", "message", "name", "towards", "workdir"}
FREE |= {"stop", "weight_transfer"}  # a backend of vLLM may be registered by anybody


def public():
    """Each public function, and what makes each public class, by its name."""
    for package in pkgutil.iter_modules(primerl.__path__):
        if package.name.startswith("_"):
            continue
        module = importlib.import_module(f"primerl.{package.name}")
        for name in getattr(module, "__all__", ()):
            found = getattr(module, name)
            made = found is not weights.Receipt  # the library makes them
            if made and (inspect.isfunction(found) or inspect.isclass(found)):
                yield f"{package.name}.{name}", found


def test_a_string_that_chooses_is_a_literal():
    seen, plain = 0, []
    for name, found in public():
        try:
            parameters = inspect.signature(found).parameters.values()
        except ValueError:  # a builtin's, such as an exception's
            continue
        for one in parameters:
            chooses = isinstance(one.default, str) and one.name not in FREE
            seen += chooses
            if chooses and one.annotation in (str, "str", str | None):
                plain.append(f"{name}({one.name}={one.default!r})")

    assert seen >= 8
    assert not plain, "expected a Literal of the names that may be given"
