"""Compiled models, in a pytest without runtime type checks, which can't be traced."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

PROGRAM = Path(__file__).parents[1] / "ranks/compiled_models.py"


def test_few_compilations_serve_every_pack_and_compute_what_eager_models_do():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", PROGRAM],
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )

    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "13 passed" in run.stdout
