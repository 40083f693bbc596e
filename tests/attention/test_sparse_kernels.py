"""Triton's kernels of sparse attention, in a pytest without runtime type checks of kernels."""

import pytest
from triton_programs import run_program

PROGRAM = "sparse_kernels.py"


def test_interpreted_kernels_compute_what_the_torch_form_does():
    assert "16 passed, 3 skipped" in run_program(PROGRAM, TRITON_INTERPRET="1")


@pytest.mark.thorough
def test_kernels_compile_for_hopper_within_its_resources(tmp_path):
    assert "3 passed, 16 skipped" in run_program(PROGRAM, TRITON_CACHE_DIR=str(tmp_path))
