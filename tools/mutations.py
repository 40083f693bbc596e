"""Generator of a module's mutants: copies of its source with one small fault each.

The following are not mutated: strings (docstrings, messages, names of options), annotations,
decorators, the argument of ``raise``, and ``strict=`` of ``zip``. Decorated functions are mutated
like any other, because the whole faulty module is imported.
"""

import ast
import copy
import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

Lines = tuple[int, int]

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
PAIRS = ["min max", "minimum maximum", "amin amax", "argmin argmax", "clamp_min clamp_max"]
PAIRS += ["any all", "logical_and logical_or", "floor ceil", "exp expm1", "log log1p"]
PAIRS += ["zeros ones", "zeros_like ones_like", "new_zeros new_ones", "append extend"]
SWAPS = {a: b for pair in PAIRS for a, b in (pair.split(), reversed(pair.split()))}
SELECTIONS = {"where", "clamp", "clip", "masked_fill", "detach"}
MODULES = {"torch", "np", "math", "F", "nn", "dist"}
UNTOUCHED = {"annotation", "returns", "decorator_list", "type_params"}


@dataclass(frozen=True)
class Mutant:
    """One fault: its location, the faulty source, and the diff of the normalized source."""

    path: str
    line: int
    statement: Lines  # no test reaches it if it runs at import, as a default does
    scope: Lines  # the enclosing function or class, else the module
    source: str
    diff: str

    @property
    def key(self) -> str:
        """Hash of the faulty module: besides the tests, all that the verdict depends on."""
        return hashlib.sha256(f"{self.path}\n{self.source}".encode()).hexdigest()[:16]


def mutants(path: str, text: str) -> Iterator[Mutant]:
    """Yield every distinct mutant of the module ``text``, in line order."""
    tree = ast.parse(text)
    original = ast.unparse(tree)
    seen = {original}
    everything = (1, text.count("\n") + 1)
    for holder, key, node, statement, scope in _places(tree, everything, everything):
        for replacement in replacements(node):
            holder[key] = replacement
            source = ast.unparse(tree)
            holder[key] = node
            if source not in seen:
                seen.add(source)
                line = getattr(node, "lineno", statement[0])
                yield Mutant(path, line, statement, scope, source, _difference(original, source))


def _places(node: ast.AST, statement: Lines, scope: Lines) -> Iterator[tuple[Any, ...]]:
    """Yield each node below ``node`` that may be mutated, with its container and its lines."""
    for name, value in ast.iter_fields(node):
        if name in UNTOUCHED:
            continue
        holder, keys = (
            (value, range(len(value))) if isinstance(value, list) else (vars(node), [name])
        )
        for key in keys:
            child = holder[key]
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            here, inside = statement, scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = (child.lineno, child.end_lineno or child.lineno)
            if isinstance(child, ast.arguments):
                here = scope
            elif isinstance(child, ast.stmt):
                here = _header(child)
            yield holder, key, child, here, inside
            if not isinstance(child, ast.Raise):
                yield from _places(child, here, inside)


def _header(statement: ast.stmt) -> Lines:
    """Return the line range of a statement, without the block below it."""
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno
    return statement.lineno, max(statement.lineno, last or 0)


def _difference(original: str, source: str) -> str:
    lines = difflib.unified_diff(_lines(original), _lines(source), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _lines(source: str) -> list[str]:
    """Split ``source`` into lines, and signatures into their parameters."""
    lines = source.splitlines()
    return [s for ln in lines for s in (ln.split(", ") if ln.lstrip().startswith("def ") else [ln])]


def _changed(node: Any, **fields: Any) -> Any:
    other = copy.copy(node)
    vars(other).update(fields)
    return other


def _negated(node: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), node)


@singledispatch
def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the faulty nodes that can replace one node; most kinds of nodes have none."""
    yield from ()


@replacements.register
def _(node: ast.Compare) -> Iterator[ast.AST]:
    for index, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            yield _changed(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])


@replacements.register(ast.BinOp)
@replacements.register(ast.AugAssign)
def _(node: Any) -> Iterator[ast.AST]:
    if other := OPERATORS.get(type(node.op)):
        yield _changed(node, op=other())
    if isinstance(node, ast.AugAssign):
        yield ast.Assign([node.target], node.value, lineno=node.lineno)
        yield ast.Pass()


@replacements.register
def _(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    for index in range(len(node.values)):
        rest = node.values[:index] + node.values[index + 1 :]
        yield rest[0] if len(rest) == 1 else _changed(node, values=rest)


@replacements.register
def _(node: ast.UnaryOp) -> Iterator[ast.AST]:
    yield node.operand


@replacements.register
def _(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
        if isinstance(node.value, float) and node.value:
            yield ast.Constant(node.value / 2)


@replacements.register
def _(node: ast.Call) -> Iterator[ast.AST]:
    for index, keyword in enumerate(node.keywords):
        if keyword.arg != "strict":
            yield _changed(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])
    if isinstance(node.func, ast.Name):
        if other := SWAPS.get(node.func.id):
            yield _changed(node, func=ast.Name(other))
    elif isinstance(node.func, ast.Attribute):
        name, receiver = node.func.attr, node.func.value
        if other := SWAPS.get(name):
            yield _changed(node, func=_changed(node.func, attr=other))
        of_a_module = isinstance(receiver, ast.Name) and receiver.id in MODULES
        if not of_a_module and (name in SELECTIONS or not (node.args or node.keywords)):
            yield receiver
        if name == "where" and len(node.args) == 3:
            condition, chosen, otherwise = node.args
            yield _changed(node, args=[condition, otherwise, chosen])
            yield chosen


@replacements.register(ast.If)
@replacements.register(ast.While)
@replacements.register(ast.IfExp)
def _(node: Any) -> Iterator[ast.AST]:
    # Comparisons, `and`, `or` and `not` are mutated elsewhere.
    if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        yield _changed(node, test=_negated(node.test))
    if isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse


@replacements.register
def _(node: ast.comprehension) -> Iterator[ast.AST]:
    for index in range(len(node.ifs)):
        yield _changed(node, ifs=node.ifs[:index] + node.ifs[index + 1 :])


@replacements.register
def _(node: ast.Return) -> Iterator[ast.AST]:
    if node.value is None:
        yield ast.Pass()
    elif isinstance(node.value, ast.Tuple) and len(node.value.elts) > 1:
        yield ast.Return(ast.Tuple(node.value.elts[::-1]))
    elif isinstance(node.value, ast.Compare | ast.BoolOp):
        yield ast.Return(_negated(node.value))
    elif not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None))


@replacements.register
def _(node: ast.Assign) -> Iterator[ast.AST]:
    # Only later assignments are mutated: without its first one, a name is undefined, which any test
    # would detect.
    names = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    if not isinstance(node.targets[0], ast.Name) or node.targets[0].id in names:
        yield ast.Pass()


@replacements.register
def _(node: ast.Expr) -> Iterator[ast.AST]:
    if not isinstance(node.value, ast.Constant):
        yield ast.Pass()


@replacements.register(ast.Raise)
@replacements.register(ast.Assert)
@replacements.register(ast.Delete)
def _(node: ast.stmt) -> Iterator[ast.AST]:
    yield ast.Pass()


@replacements.register
def _(node: ast.Break) -> Iterator[ast.AST]:
    yield ast.Continue()


@replacements.register
def _(node: ast.Continue) -> Iterator[ast.AST]:
    yield ast.Break()


@replacements.register
def _(node: ast.With) -> Iterator[ast.AST]:
    if all(item.optional_vars is None for item in node.items):
        yield ast.If(ast.Constant(True), node.body, [])
