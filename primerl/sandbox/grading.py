"""Grading of functions: inputs go into a sandbox, typed values come out, and the host compares.

Each case runs in its own sandbox, which sees the input of that case and no expected value. Its
output is data in a small typed encoding; the host decodes it strictly and compares type and value.
Exit codes, printed verdicts, patched assertions and objects that equal everything therefore gain
nothing: the only way to pass a case is to output the right value. Grading can't detect code that
looks the right value up, in a table of known answers, instead of computing it.
"""

import asyncio
import inspect
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl.sandbox.guest.jobs import values
from primerl.sandbox.guest.jobs.values import decode, encode
from primerl.sandbox.pool import SandboxPool
from primerl.sandbox.results import Result

_MOST_BYTES = 1 << 20

# Calls the candidate's function and prints its encoded value after a random mark. Forging that line
# gains nothing: it would still have to hold the right value.
_DRIVER = (
    inspect.getsource(values)
    + """
def _refuse(value):
    if type(value) in (list, tuple, set, frozenset, dict):
        raise ValueError("the value is nested too deeply")
    raise TypeError("a value of type " + type(value).__name__ + " can't be compared")


def _drive():
    import json, os, sys
    job = json.loads(sys.stdin.readline())
    names = {"__name__": "solution"}
    exec(compile(job["code"], "solution.py", "exec"), names)
    args, kwargs = decode(job["args"]), decode(job["kwargs"])
    value = names[job["function"]](*args, **kwargs)
    text = json.dumps(encode(value, _refuse))
    sys.stdout.flush()
    os.write(1, ("\\n" + job["mark"] + text + "\\n").encode())


_drive()
"""
)


@attrs.frozen(kw_only=True)
class Case:
    """One call of the candidate's function, and the value that it should return.

    Arguments and the expected value are None, bool, int, float, str or bytes, or lists, tuples,
    sets and dictionaries of such values. ``tolerance`` is the relative error allowed for floats.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    expected: Any
    tolerance: float = 0.0


@attrs.frozen(kw_only=True)
class CaseVerdict:
    """The outcome of one case; ``value`` is None if the candidate's value can't be decoded."""

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
) -> list[CaseVerdict]:
    """Call ``function`` of ``code`` once per case, each in a new sandbox, and compare the values.

    Raises:
        ValueError: ``cases`` is empty, or an argument is not a plain value.
        SandboxError: no sandbox could be created.
    """
    if not cases:
        raise ValueError(
            "there are no cases: give at least one, since an empty list would pass any code"
        )
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
) -> CaseVerdict:
    mark = secrets.token_hex(16)
    job = {
        "code": code,
        "function": function,
        "args": encode(case.args, _refuse_argument),
        "kwargs": encode(dict(case.kwargs), _refuse_argument),
        "mark": mark,
    }
    result = await pool.run(
        _DRIVER,
        stdin=json.dumps(job).encode() + b"\n",
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        output_bytes=_MOST_BYTES,
    )
    try:
        value = _value(result.stdout, mark)
    except ValueError as error:
        reason = result.limits_hit[0] if result.limits_hit else str(error)
        return CaseVerdict(passed=False, value=None, reason=reason, result=result)
    passed = same(value, case.expected, tolerance=case.tolerance)
    return CaseVerdict(
        passed=passed, value=value, reason="" if passed else "wrong value", result=result
    )


def same(value: Any, expected: Any, *, tolerance: float = 0.0) -> bool:
    """Check that two values are equal and of the same types, recursively.

    1, 1.0 and True are different values, and a list differs from a tuple. NaN equals NaN.
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
    """Return set elements or dictionary keys as (type, value) pairs, so that 1 and True differ."""
    return {(repr(_encoded_type(key)), key) for key in keys}


def _encoded_type(key: Any) -> Any:
    items = [_encoded_type(item) for item in key] if isinstance(key, tuple | frozenset) else []
    if isinstance(key, frozenset):
        items.sort(key=repr)
    return (type(key).__name__, items)


def _refuse_argument(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple, set, frozenset, dict):
        raise ValueError("an argument of a case is nested too deeply (over 50 levels)")
    raise ValueError(f"an argument of a case is a {kind.__name__}; only plain values can be sent")


def _value(stdout: bytes, mark: str) -> Any:
    """Return the value on the last line that begins with the mark.

    Raises:
        ValueError: there is no such line, or its value is malformed.
    """
    start = b"\n" + mark.encode()
    found = stdout.rpartition(start)
    if not found[1]:
        raise ValueError("no value came back: the code failed or exited early")
    line = found[2].split(b"\n", 1)[0]
    try:
        return decode(json.loads(line))
    except (ValueError, RecursionError):
        raise ValueError("the value that came back is malformed") from None
