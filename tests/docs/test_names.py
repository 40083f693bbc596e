"""The names of classes: one meaning each, as the glossary's table says."""

import ast
import re
from collections import defaultdict


def class_names(root):
    """The modules that define each class of the package, by its name without underscores."""
    found = defaultdict(list)
    for path in sorted((root / "primerl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.strip("_")].append(str(path.relative_to(root)))
    return found


def listed_names(root):
    """The classes that the glossary lists for each noun."""
    page = (root / "docs" / "glossary.md").read_text(encoding="utf-8")
    _, table = page.split("## Class names")
    rows = re.findall(r"^\| ([a-z]+) \| [^|]+ \| ([^|]+) \|$", table, re.MULTILINE)
    return {
        noun: sorted(re.findall(r"`(\w+)`", classes)) for noun, classes in rows if "`" in classes
    }


def noun_of(name):
    """The last word of a class name, in lower case."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z]+", name)[-1].lower()


def test_the_noun_of_a_class_is_its_last_word():
    assert [noun_of(name) for name in ("VLLMServer", "Sample", "ServedTLS", "SpanServer")] == [
        "server",
        "sample",
        "tls",
        "server",
    ]


def test_no_two_classes_share_a_name(root):
    assert not {name: paths for name, paths in class_names(root).items() if len(paths) > 1}


def test_names_that_differ_only_in_case_are_one_name(root):
    found = defaultdict(list)
    for name in class_names(root):
        found[name.lower()].append(name)

    assert not [names for names in found.values() if len(names) > 1]


def test_classes_with_a_listed_noun_are_listed_under_it(root):
    """A new class with one of these nouns must be added to the table, or be named otherwise."""
    listed = listed_names(root)
    found = defaultdict(list)
    for name in class_names(root):
        if noun_of(name) in listed:
            found[noun_of(name)].append(name)

    assert len(listed) > 30
    assert {noun: sorted(names) for noun, names in found.items()} == listed
