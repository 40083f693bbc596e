"""Triton's kernels of the LM head, in a pytest without runtime type checks of kernels."""

import pytest
from triton_programs import run_program

PROGRAM = "linear_head_kernels.py"


def test_interpreted_kernels_compute_what_logits_in_float64_do():
    assert "17 passed, 4 skipped" in run_program(PROGRAM, TRITON_INTERPRET="1")


@pytest.mark.thorough
def test_kernels_compile_for_hopper_within_its_resources(tmp_path):
    assert "4 passed, 17 skipped" in run_program(PROGRAM, TRITON_CACHE_DIR=str(tmp_path))
