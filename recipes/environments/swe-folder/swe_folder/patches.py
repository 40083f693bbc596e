"""Filter for an agent's patches: what it may not change is left out."""

import re
from collections.abc import Iterator

import attrs

from swe_folder import git
from swe_folder.layouts import Layout, by_names

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def without_steering(patch: str, layout: Layout | None = None) -> str:
    """Return a patch without its changes to test material, and without new modules that shadow.

    git reads the names, before and after, so that no form of a patch hides one. Without a layout,
    the patch's own names decide where the tests are.

    Raises:
        ValueError: git can't read the patch.
    """
    if not patch.strip():
        return ""
    names = git.names(patch)
    sections = list(_sections(patch))
    if len(sections) != len(names):
        raise ValueError("the patch is malformed: git finds other files in it than its headers say")
    if layout is None:
        found = by_names({path for pair in names for path in pair}, ())
        layout = attrs.evolve(found, modules=())  # each module may be new
    kept = [
        (section, pair)
        for section, pair in zip(sections, names, strict=True)
        if not any(layout.is_material(path) or layout.shadows(path) for path in pair)
    ]
    text = "".join(section for section, _ in kept)
    # Both readings of the headers, git's and this module's, must agree.
    if text and git.names(text) != [pair for _, pair in kept]:
        raise ValueError("the patch is malformed: its files can't be told apart")
    return text


def _sections(patch: str) -> Iterator[str]:
    """Yield the part of each file, in git's form or in the traditional one."""
    part: list[str] = []
    begun = False  # whether the part has its header's "--- " line
    git_form = False
    before = after = 0  # lines that the current hunk still has
    for line in patch.splitlines(keepends=True) if "\r" not in patch else _lines(patch):
        if before > 0 or after > 0:
            before -= line[:1] in (" ", "-", "\n")
            after -= line[:1] in (" ", "+", "\n")
        elif found := _HUNK.match(line):
            before, after = (int(count or 1) for count in found.groups())
        elif line.startswith("diff --git ") or (
            line.startswith("--- ") and (begun or not git_form)
        ):
            if part and (begun or git_form):
                yield "".join(part)
                part = []
            git_form = line.startswith("diff --git ")
            begun = not git_form
        elif line.startswith("--- "):
            begun = True
        part.append(line)
    if part and (begun or git_form):
        yield "".join(part)


def _lines(text: str) -> list[str]:
    """Split at line feeds only, as git does."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + [text.rpartition("\n")[2]]
