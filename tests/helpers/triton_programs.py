"""Runs of tests of Triton's kernels, in a pytest that interprets or compiles them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).parents[1] / "ranks"


def run_program(name, **variables):
    """Return the output of pytest for ``tests/ranks/NAME``, without runtime type checks."""
    pytest.importorskip("triton")
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-o",
            "addopts=--import-mode=importlib",
            RANKS / name,
        ],
        env={**os.environ, **variables},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    return found.stdout
