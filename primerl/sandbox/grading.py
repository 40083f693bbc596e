"""Grading of functions: inputs go into a sandbox, typed values come out, and the host compares.

Each case runs in its own sandbox, which sees the input of that case and no expected value. Its
output is data in a small typed encoding; the host decodes it strictly and compares type and value.
Exit codes, printed verdicts, patched assertions and objects that equal everything therefore gain
nothing: the only way to pass a case is to output the right value. Grading can't detect code that
looks the right value up, in a table of known answers, instead of computing it.
"""

import asyncio
import functools
import inspect
import json
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl.sandbox import untrusted
from primerl.sandbox.guest.jobs import values
from primerl.sandbox.guest.jobs.values import decode, encode
from primerl.sandbox.pool import SandboxPool
from primerl.sandbox.results import Result

_MOST_BYTES = 16 << 20  # of a value in its encoding; docs/sandbox.md names this cap
_LONGEST_VALUE = 8 << 10  # longer encodings are compared in a sandbox; docs/sandbox.md names this
_WRONG = "wrong value"
_MALFORMED = "the value that came back is malformed"

# Imports the candidate's code as the module ``solution``, which dataclasses, pickle and
# multiprocessing need. Then calls its function and prints the encoded value after a random mark.
# Forging that line gains nothing: it would still have to hold the right value.
_DRIVER = (
    inspect.getsource(values)
    + """
def _refuse(value):
    if type(value) in (list, tuple, set, frozenset, dict):
        raise ValueError("the value is nested too deeply")
    raise TypeError("a value of type " + type(value).__name__ + " can't be compared")


def _drive():
    import importlib, json, os, sys
    job = json.loads(sys.stdin.readline())
    with open("solution.py", "w", encoding="utf-8") as file:
        file.write(job["code"])
    solution = importlib.import_module("solution")
    args, kwargs = decode(job["args"]), decode(job["kwargs"])
    value = getattr(solution, job["function"])(*args, **kwargs)
    text = json.dumps(encode(value, _refuse))
    sys.stdout.flush()
    os.write(1, ("\\n" + job["mark"] + text + "\\n").encode())


_drive()
"""
)


# Compares a value that code returned with the expected one, in a sandbox where no such code runs.
# The program is followed by the sources of ``values`` and ``same``, which it uses.
_JUDGE = """
def _judge():
    import sys
    job = json.loads(sys.stdin.buffer.readline())
    try:
        value = decode(json.loads(sys.stdin.buffer.read()))
    except (ValueError, RecursionError):
        return print("malformed")
    expected = decode(job["expected"])
    print("same" if same(value, expected, tolerance=job["tolerance"]) else "other")
"""


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
    """The outcome of one case.

    ``value`` is None if the candidate's value can't be decoded, or its encoding is longer than
    8 KiB. Such values are compared in another sandbox, without being decoded in this process.
    """

    passed: bool
    value: Any = attrs.field(repr=untrusted.shown)
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
        encoded = _encoded_value(result.stdout, mark)
        if len(encoded) > _LONGEST_VALUE:
            reason = await _compared_in_sandbox(
                pool, encoded, case, timeout_s=timeout_s, memory_bytes=memory_bytes
            )
            return CaseVerdict(passed=not reason, value=None, reason=reason, result=result)
        value = _value(encoded)
    except ValueError as error:
        reason = result.limits_hit[0] if result.limits_hit else str(error)
        return CaseVerdict(passed=False, value=None, reason=reason, result=result)
    passed = same(value, case.expected, tolerance=case.tolerance)
    return CaseVerdict(passed=passed, value=value, reason="" if passed else _WRONG, result=result)


async def _compared_in_sandbox(
    pool: SandboxPool, encoded: bytes, case: Case, *, timeout_s: float, memory_bytes: int | None
) -> str:
    """Compare a long encoded value with the expected one; return "", or why it is wrong."""
    try:
        expected = encode(case.expected, _refuse_argument)
    except ValueError:  # not a plain value, which therefore equals none
        return _WRONG
    job = json.dumps({"expected": expected, "tolerance": case.tolerance}).encode()
    done = await pool.run(
        _judge(), stdin=job + b"\n" + encoded, timeout_s=timeout_s, memory_bytes=memory_bytes
    )
    if not done.ok:
        ended = done.limits_hit[0] if done.limits_hit else done.exit
        return f"the value that came back can't be compared within the sandbox's limits: {ended}"
    return {b"same\n": "", b"other\n": _WRONG}.get(done.stdout, _MALFORMED)


@functools.cache
def _judge() -> str:
    """Return the program that compares two values in a sandbox."""
    sources = [inspect.getsource(part) for part in (values, same, _by_key, _typed)]
    return "\n".join(["import json, math", *sources, _JUDGE, "_judge()"])


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
        ours, theirs = _by_key(value), _by_key(expected)
        return ours.keys() == theirs.keys() and all(
            same(ours[key], theirs[key], tolerance=tolerance) for key in ours
        )
    if isinstance(value, set | frozenset):
        return Counter(map(_typed, value)) == Counter(map(_typed, expected))
    return bool(value == expected)


def _by_key(value: dict[Any, Any]) -> dict[Any, list[Any]]:
    """Return the values of a dictionary by typed key; NaN, as a key, can have several."""
    found: dict[Any, list[Any]] = {}
    for key, item in value.items():
        found.setdefault(_typed(key), []).append(item)
    return found


def _typed(key: Any) -> Any:
    """Return a set element or key with its types, so that 1 and True differ and NaN equals NaN."""
    if isinstance(key, tuple):
        return ("tuple", tuple(map(_typed, key)))
    if isinstance(key, frozenset):
        return ("frozenset", frozenset(Counter(map(_typed, key)).items()))
    if isinstance(key, float) and math.isnan(key):
        return ("float", "nan")
    return (type(key).__name__, key)


def _refuse_argument(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple, set, frozenset, dict):
        raise ValueError("an argument of a case is nested too deeply (over 50 levels)")
    raise ValueError(f"an argument of a case is a {kind.__name__}; only plain values can be sent")


def _encoded_value(stdout: bytes, mark: str) -> bytes:
    """Return the encoded value on the last line that begins with the mark.

    Raises:
        ValueError: there is no such line.
    """
    start = b"\n" + mark.encode()
    found = stdout.rpartition(start)
    if not found[1]:
        raise ValueError("no value came back: the code failed or exited early")
    return found[2].partition(b"\n")[0]


def _value(encoded: bytes) -> Any:
    """Decode a value.

    Raises:
        ValueError: the value is malformed.
    """
    try:
        return decode(json.loads(encoded))
    except (ValueError, RecursionError):
        raise ValueError(_MALFORMED) from None
