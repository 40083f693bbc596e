"""Grading on the host: inputs go in, typed values come out, and the comparison never goes in.

One sandbox per case, which sees its own input and no expected value. What comes out is data in a
small typed encoding; the host decodes it strictly and compares type and value. So exit codes,
printed verdicts, patched assertions and objects that equal everything change nothing: the only way
to pass a case is to say the right value. Code that knows the right value by other means than
computing it (a table of known answers) can't be told apart.
"""

import asyncio
import inspect
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl.sandbox.engine.work import values
from primerl.sandbox.engine.work.values import decode, encode
from primerl.sandbox.pool import SandboxPool
from primerl.sandbox.results import Result

_MOST_BYTES = 1 << 20

# Runs the candidate and writes the value, encoded, behind a line that only this run knows. Forging
# that line gains nothing: it would still have to hold the right value.
_DRIVER = (
    inspect.getsource(values)
    + """
def _refuse(value):
    if type(value) in (list, tuple, set, frozenset, dict):
        raise ValueError("the value is nested too deeply")
    raise TypeError("a value of type " + type(value).__name__ + " can't be compared")


def _drive():
    import json, os, sys
    order = json.loads(sys.stdin.readline())
    names = {"__name__": "solution"}
    exec(compile(order["code"], "solution.py", "exec"), names)
    args, kwargs = decode(order["args"]), decode(order["kwargs"])
    value = names[order["function"]](*args, **kwargs)
    text = json.dumps(encode(value, _refuse))
    sys.stdout.flush()
    os.write(1, ("\\n" + order["mark"] + text + "\\n").encode())


_drive()
"""
)


@attrs.frozen(kw_only=True)
class Case:
    """One call of the candidate's function, and the value that it should return.

    Arguments and value are None, bool, int, float, str, bytes, and lists, tuples, sets and
    dictionaries of them. ``tolerance`` is the relative error that floats may have.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    expected: Any
    tolerance: float = 0.0


@attrs.frozen(kw_only=True)
class Verdict:
    """Whether one case passed; ``value`` is what the candidate said, if it could be decoded."""

    passed: bool
    value: Any
    reason: str
    result: Result


async def grade(
    pool: SandboxPool,
    code: str,
    cases: Sequence[Case],
    *,
    function: str,
    timeout_s: float = 10.0,
    memory_bytes: int | None = None,
) -> list[Verdict]:
    """Call ``function`` of ``code`` once per case, each in a sandbox of its own, and compare.

    Raises:
        ValueError: there is no case, or an argument is no plain value.
        SandboxError: no sandbox could be made.
    """
    if not cases:
        raise ValueError("there are no cases: an empty list would pass everything")
    return list(
        await asyncio.gather(
            *(
                _grade_case(
                    pool,
                    code,
                    case,
                    function=function,
                    timeout_s=timeout_s,
                    memory_bytes=memory_bytes,
                )
                for case in cases
            )
        )
    )


async def _grade_case(
    pool: SandboxPool,
    code: str,
    case: Case,
    *,
    function: str,
    timeout_s: float,
    memory_bytes: int | None,
) -> Verdict:
    mark = secrets.token_hex(16)
    order = {
        "code": code,
        "function": function,
        "args": encode(case.args, _refuse_argument),
        "kwargs": encode(dict(case.kwargs), _refuse_argument),
        "mark": mark,
    }
    result = await pool.run(
        _DRIVER,
        stdin=json.dumps(order).encode() + b"\n",
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        output_bytes=_MOST_BYTES,
    )
    try:
        value = _value(result.stdout, mark)
    except ValueError as error:
        reason = result.limits_hit[0] if result.limits_hit else str(error)
        return Verdict(passed=False, value=None, reason=reason, result=result)
    passed = same(value, case.expected, tolerance=case.tolerance)
    return Verdict(
        passed=passed, value=value, reason="" if passed else "another value", result=result
    )


def same(value: Any, expected: Any, *, tolerance: float = 0.0) -> bool:
    """Whether two values have the same type and are equal, all the way down.

    1, 1.0 and True differ, as do lists and tuples. NaN is the same as NaN.
    """
    if type(value) is not type(expected):
        return False
    if isinstance(value, float):
        if math.isnan(value) or math.isnan(expected):
            return math.isnan(value) and math.isnan(expected)
        return value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=0.0)
    if isinstance(value, list | tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(
            same(left, right, tolerance=tolerance) for left, right in pairs
        )
    if isinstance(value, dict):
        return _typed(value) == _typed(expected) and all(
            same(value[key], expected[key], tolerance=tolerance) for key in value
        )
    if isinstance(value, set | frozenset):
        return _typed(value) == _typed(expected)
    return bool(value == expected)


def _typed(keys: Any) -> set[tuple[str, Any]]:
    """Elements with their types, of which 1 and True are two."""
    return {(repr(_encoded_type(key)), key) for key in keys}


def _encoded_type(key: Any) -> Any:
    items = [_encoded_type(item) for item in key] if isinstance(key, tuple | frozenset) else []
    if isinstance(key, frozenset):
        items.sort(key=repr)
    return (type(key).__name__, items)


def _refuse_argument(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple, set, frozenset, dict):
        raise ValueError("an argument is nested too deeply")
    raise ValueError(f"an argument is a {kind.__name__}; only plain values can go into a sandbox")


def _value(stdout: bytes, mark: str) -> Any:
    """The value behind the last line that begins with the mark.

    Raises:
        ValueError: there is none, or it isn't in the encoding.
    """
    start = b"\n" + mark.encode()
    found = stdout.rpartition(start)
    if not found[1]:
        raise ValueError("no value came out")
    line = found[2].split(b"\n", 1)[0]
    try:
        return decode(json.loads(line))
    except (ValueError, RecursionError):
        raise ValueError("what came out is no value") from None
