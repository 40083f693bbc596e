"""The edits of docs/recipes.md, applied to a copy of the recipe."""

import re


def edits(page):
    """Yield the old and the new text of each ``diff`` block."""
    for block in re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL):
        lines = block.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        yield before, after


def edited(root, folder, page):
    """Apply the edits of ``page`` to a copy of the recipe; return its path."""
    recipe = (root / "recipes/async_grpo.py").read_text()
    for before, after in edits(page):
        assert recipe.count(before) == 1, before
        recipe = recipe.replace(before, after)
    path = folder / "mine.py"
    path.write_text(recipe)
    return path


def part(root, number):
    """Return a part of the page; the edits of each part "start again" from the recipe."""
    page = (root / "docs/recipes.md").read_text()
    return page.split("start again from the recipe")[number]


def section(root, heading):
    """Return one section of the page."""
    page = (root / "docs/recipes.md").read_text()
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
