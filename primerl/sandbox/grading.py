"""Grading on the host: inputs go in, typed values come out, and the comparison never goes in.

One sandbox per case, which sees its own input and no expected value. What comes out is data in a
small typed encoding; the host decodes it strictly and compares type and value. So exit codes,
printed verdicts, patched assertions and objects that equal everything change nothing: the only way
to pass a case is to say the right value. Code that knows the right value by other means than
computing it (a table of known answers) can't be told apart.
"""

import asyncio
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl.sandbox.pool import SandboxPool
from primerl.sandbox.results import Result

MOST_DEPTH = 50
_MOST_BYTES = 1 << 20

# Runs the candidate and writes the value, encoded, behind a line that only this run knows. Forging
# that line gains nothing: it would still have to hold the right value.
_DRIVER = """
def _encode(value, depth=0):
    kind = type(value)
    if depth > {depth}:
        raise ValueError("the value is nested too deeply")
    if value is None or kind is bool or kind is str:
        return {{"t": kind.__name__, "v": value}}
    if kind is int:
        return {{"t": "int", "v": hex(value)}}
    if kind is float:
        return {{"t": "float", "v": value.hex()}}
    if kind is bytes:
        return {{"t": "bytes", "v": value.hex()}}
    if kind in (list, tuple):
        return {{"t": kind.__name__, "v": [_encode(item, depth + 1) for item in value]}}
    if kind in (set, frozenset):
        return {{"t": kind.__name__, "v": [_encode(item, depth + 1) for item in value]}}
    if kind is dict:
        pairs = [[_encode(key, depth + 1), _encode(item, depth + 1)] for key, item in value.items()]
        return {{"t": "dict", "v": pairs}}
    raise TypeError("a value of type " + kind.__name__ + " can't be compared")


def _drive():
    import json, os, sys
    order = json.loads(sys.stdin.readline())
    names = {{"__name__": "solution"}}
    exec(compile(order["code"], "solution.py", "exec"), names)
    decoded = {{}}
    exec(compile(order["arguments"], "arguments.py", "exec"), decoded)
    value = names[order["function"]](*decoded["args"], **decoded["kwargs"])
    text = json.dumps(_encode(value))
    sys.stdout.flush()
    os.write(1, ("\\n" + order["mark"] + text + "\\n").encode())


_drive()
"""


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
        ValueError: there is no case, or an argument can't be written as a literal.
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
        "arguments": f"args = {_literal(case.args)}\nkwargs = {_literal(dict(case.kwargs))}\n",
        "mark": mark,
    }
    result = await pool.run(
        _DRIVER.format(depth=MOST_DEPTH),
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
    if isinstance(key, tuple | frozenset):
        return (type(key).__name__, sorted(repr(_encoded_type(item)) for item in key))
    return type(key).__name__


def _literal(value: Any) -> str:
    """Source code of a value.

    Raises:
        ValueError: it has a type that source code has no literal for.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes):
        return repr(value)
    if kind is float:
        return f"float.fromhex({value.hex()!r})"
    if kind in (list, tuple, set, frozenset):
        return f"{kind.__name__}([{', '.join(map(_literal, value))}])"
    if kind is dict:
        pairs = (f"({_literal(key)}, {_literal(item)})" for key, item in value.items())
        return f"dict([{', '.join(pairs)}])"
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
        encoded = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("what came out is no value") from None
    return _decode(encoded, 0)


def _decode(encoded: Any, depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise ValueError("the value is nested too deeply")
    if type(encoded) is not dict or set(encoded) != {"t", "v"}:
        raise ValueError("what came out is no value")
    kind, content = encoded["t"], encoded["v"]
    plain = {"NoneType": type(None), "bool": bool, "str": str}
    if type(kind) is not str:
        raise ValueError("what came out is no value")
    if kind in plain and type(content) is plain[kind]:
        return content
    if type(content) is str and kind in ("int", "float", "bytes"):
        return _decode_text(kind, content)
    if type(content) is list and kind in ("list", "tuple", "set", "frozenset"):
        items = [_decode(item, depth + 1) for item in content]
        return _build(
            {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind], items
        )
    if type(content) is list and kind == "dict":
        if not all(type(pair) is list and len(pair) == 2 for pair in content):
            raise ValueError("what came out is no dictionary")
        return _build(
            dict, [(_decode(key, depth + 1), _decode(item, depth + 1)) for key, item in content]
        )
    raise ValueError(f"what came out is no {kind:.20}")


def _decode_text(kind: str, content: str) -> Any:
    try:
        if kind == "int":
            return int(content, 16)
        return float.fromhex(content) if kind == "float" else bytes.fromhex(content)
    except OverflowError:
        raise ValueError("a number is out of range") from None


def _build(kind: Any, items: list[Any]) -> Any:
    try:
        return kind(items)
    except TypeError:  # an element that can't be one of a set, or a key
        raise ValueError(f"what came out is no {kind.__name__}") from None
