"""Draw the map of imports between packages, ``docs/images/packages.svg``, from the source.

    python tools/package_map.py [--check]

Packages are arranged in rows: each package imports only packages of the rows below its own.
``--check`` compares the picture in the repository with the source, and writes nothing.
"""

import argparse
import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/images/packages.svg"
WIDTH, BOX, GAP, LINE = 1080, 150, 12, 15
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #6b7280 }
.name { font-weight: 600; font-size: 14px; fill: #2563eb }
rect { fill: none; stroke: #9ca3af; rx: 6 }
"""


def packages() -> list[str]:
    """Return the packages and single modules of primerl."""
    folder = ROOT / "primerl"
    found = [one.name for one in folder.iterdir() if (one / "__init__.py").is_file()]
    found += [one.stem for one in folder.glob("*.py") if one.stem != "__init__"]
    return sorted(found)


def imports_of(package: str, names: list[str]) -> list[str]:
    """Return the packages that a package imports, at the top of its modules or in functions."""
    folder = ROOT / "primerl" / package
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                modules = [one.name for one in node.names]
            else:
                continue
            parts = [module.split(".") for module in modules]
            found |= {part[1] for part in parts if part[0] == "primerl" and len(part) > 1}
    return sorted(found & set(names) - {package})


def rows(graph: dict[str, list[str]]) -> list[list[str]]:
    """Sort packages into rows; each row imports only packages of the rows that follow it.

    Raises:
        ValueError: packages import each other in a circle.
    """
    left, placed = dict(graph), []
    while left:
        row = [name for name, needs in left.items() if not set(needs) & left.keys()]
        if not row:
            raise ValueError(f"packages import each other in a circle: {', '.join(left)}")
        placed.append(row)
        for name in row:
            del left[name]
    return placed[::-1]


def picture(graph: dict[str, list[str]]) -> str:
    """Draw the packages as an SVG with one box per package, which lists its imports."""
    shapes, top, columns = [], GAP, WIDTH // (BOX + GAP)
    for row in rows(graph):
        for begin in range(0, len(row), columns):
            some = row[begin : begin + columns]
            height = 28 + LINE * max(1, *(len(graph[name]) for name in some))
            for column, name in enumerate(some):
                left = GAP + column * (BOX + GAP)
                shapes.append(f'<rect x="{left}" y="{top}" width="{BOX}" height="{height}"/>')
                shapes.append(_text(left, top + 19, name, kind="name"))
                for line, needed in enumerate(graph[name], start=1):
                    shapes.append(_text(left, top + 19 + LINE * line, needed))
            top += height + GAP
        top += GAP
    size = f'width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}"'
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _text(left: int, top: int, text: str, *, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{left + 10}" y="{top}"{named}>{escape(text)}</text>'


def main() -> int:
    """Draw the picture, or compare it and return 1 if it differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    names = packages()
    drawn = picture({name: imports_of(name, names) for name in names})
    if not args.check:
        PICTURE.write_text(drawn, encoding="utf-8")
        return 0
    if PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == drawn:
        return 0
    sys.stderr.write("the picture is out of date: run python tools/package_map.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
