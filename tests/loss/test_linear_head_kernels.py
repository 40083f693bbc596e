"""Triton's kernels of the LM head, in a pytest without runtime type checks of kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAM = Path(__file__).parents[1] / "ranks/linear_head_kernels.py"


def run(**variables):
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", PROGRAM],
        env={**os.environ, **variables},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    return found.stdout


def test_interpreted_kernels_compute_what_logits_in_float64_do():
    assert "17 passed, 4 skipped" in run(TRITON_INTERPRET="1")


@pytest.mark.thorough
def test_kernels_compile_for_hopper_within_its_resources(tmp_path):
    assert "4 passed, 17 skipped" in run(TRITON_CACHE_DIR=str(tmp_path))
