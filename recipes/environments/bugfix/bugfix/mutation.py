"""Seeded bugs: small changes of one line, derived from a program's syntax tree.

Each bug replaces only the text of one syntax node, so that the rest of the line stays the same.
"""

import ast
from collections.abc import Iterator

import attrs

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
}
_OPERATORS: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("%",)),
    ast.Mod: ("%", ("//",)),
}
_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "upper": "lower",
    "lower": "upper",
    "startswith": "endswith",
    "endswith": "startswith",
    "isdigit": "isalpha",
    "isupper": "islower",
    "append": "remove",
    "values": "keys",
}


@attrs.frozen(order=True)
class Mutation:
    """A bug: line ``line`` (from 1) of ``path`` is ``after`` instead of ``before``."""

    path: str
    line: int
    kind: str
    before: str
    after: str

    def applied(self, files: dict[str, str]) -> dict[str, str]:
        """Return the files with the bug."""
        return self._replaced(files, self.before, self.after)

    def reverted(self, files: dict[str, str]) -> dict[str, str]:
        """Return the files without the bug."""
        return self._replaced(files, self.after, self.before)

    def _replaced(self, files: dict[str, str], old: str, new: str) -> dict[str, str]:
        lines = files[self.path].splitlines(keepends=True)
        if lines[self.line - 1].rstrip("\n") != old:
            raise ValueError(f"line {self.line} of {self.path} is not {old!r}")
        lines[self.line - 1] = new + "\n"
        return {**files, self.path: "".join(lines)}


def mutations(path: str, source: str) -> list[Mutation]:
    """Return all bugs that can be seeded into a file, without duplicates, in line order."""
    lines = source.splitlines()
    found = set()
    for node in ast.walk(ast.parse(source)):
        for kind, line, start, end, new in _changes(node, lines):
            before = lines[line - 1]
            # ast gives columns in bytes.
            text = before.encode()
            after = (text[:start] + new.encode() + text[end:]).decode()
            if after != before and _compiles(lines, line, after):
                found.add(Mutation(path, line, kind, before, after))
    return sorted(found)


def _compiles(lines: list[str], line: int, after: str) -> bool:
    try:
        ast.parse("\n".join([*lines[: line - 1], after, *lines[line:]]))
    except SyntaxError:
        return False
    return True


def _changes(node: ast.AST, lines: list[str]) -> Iterator[tuple[str, int, int, int, str]]:
    """Yield the possible changes of a node: kind, line, start and end column, new text."""
    line = getattr(node, "lineno", None)
    if line is None or line != getattr(node, "end_lineno", None):
        return
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign, others = _COMPARISONS[type(node.ops[0])]
        yield from _between("comparison", node.left, node.comparators[0], sign, others, lines)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sign, others = _OPERATORS[type(node.op)]
        yield from _between("operator", node.left, node.right, sign, others, lines)
    elif isinstance(node, ast.BoolOp):
        sign, others = ("and", ("or",)) if isinstance(node.op, ast.And) else ("or", ("and",))
        yield from _between("operator", node.values[0], node.values[1], sign, others, lines)
    elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        sign, others = _OPERATORS[type(node.op)]
        signs = tuple(f"{other}=" for other in others)
        yield from _between("operator", node.target, node.value, f"{sign}=", signs, lines)
        yield "dropped statement", line, node.col_offset, _end(node), "pass"
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield "operator", line, node.col_offset, node.operand.col_offset, ""
    elif isinstance(node, ast.Call):
        yield from _calls(node, lines)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "dropped return", line, node.col_offset, _end(node), "return None"
    elif isinstance(node, ast.Assign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "dropped statement", line, node.col_offset, _end(node), "pass"


def _constants(node: ast.Constant) -> Iterator[tuple[str, int, int, int, str]]:
    place = ("constant", node.lineno, node.col_offset, _end(node))
    if isinstance(node.value, bool):
        yield (*place, str(not node.value))
    elif isinstance(node.value, int):
        yield (*place, str(node.value + 1))
        if node.value > 0:
            yield (*place, str(node.value - 1))


def _calls(node: ast.Call, lines: list[str]) -> Iterator[tuple[str, int, int, int, str]]:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in _NAMES and function.end_lineno == node.lineno:
        end = _end(function)
        yield "function", node.lineno, end - len(name), end, _NAMES[name]
    if len(node.args) == 2 and not any(isinstance(one, ast.Starred) for one in node.args):
        left, right = node.args
        text = lines[node.lineno - 1].encode()
        first = text[left.col_offset : _end(left)].decode()
        second = text[right.col_offset : _end(right)].decode()
        middle = text[_end(left) : right.col_offset].decode()
        new = second + middle + first
        yield "swapped arguments", node.lineno, left.col_offset, _end(right), new


def _between(
    kind: str,
    left: ast.expr,
    right: ast.expr,
    sign: str,
    others: tuple[str, ...],
    lines: list[str],
) -> Iterator[tuple[str, int, int, int, str]]:
    if left.end_lineno != right.lineno:
        return
    start = _end(left)
    text = lines[right.lineno - 1].encode()[start : right.col_offset].decode()
    place = text.find(sign)
    for other in others if place >= 0 else ():
        yield kind, right.lineno, start + place, start + place + len(sign), other


def _end(node: ast.AST) -> int:
    end = getattr(node, "end_col_offset", None)
    assert end is not None
    return int(end)
