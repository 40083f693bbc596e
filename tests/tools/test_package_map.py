"""The picture of the packages, against the source and by hand."""

import subprocess
import sys

import pytest

from tools import package_map


def test_the_picture_in_the_documentation_is_of_this_source(root):
    command = [sys.executable, root / "tools/package_map.py", "--check"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


def test_rows_by_hand():
    graph = {"a": ["b", "c"], "b": ["c"], "c": [], "d": []}
    assert package_map.rows(graph) == [["a"], ["b"], ["c", "d"]]


def test_a_circle_is_named():
    with pytest.raises(ValueError, match="in a circle: a, b"):
        package_map.rows({"a": ["b"], "b": ["a"], "c": []})
