"""Compiled models, in a pytest without runtime type checks, which can't be traced.

`pytest -m slow tests/parallel/test_compiled.py` also runs what CI leaves out (minutes).
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

PROGRAM = Path(__file__).parents[1] / "ranks/compiled_models.py"


@pytest.mark.parametrize(
    ("marked", "number"),
    [("not slow", 10), pytest.param("slow or not slow", 13, marks=pytest.mark.slow)],
)
def test_few_compilations_serve_every_pack_and_compute_what_eager_models_do(marked, number):
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib"]
    run = subprocess.run(
        [*command, "-m", marked, PROGRAM],
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )

    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert f"{number} passed" in run.stdout
