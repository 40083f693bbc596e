"""Triton's kernels under the runtime type checks of tests, whose wrappers Triton can't compile."""

import importlib
from pathlib import Path

import pytest

import primerl

triton = pytest.importorskip("triton")
ROOT = Path(primerl.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in sorted(ROOT.rglob("*_triton.py"))
]


@pytest.mark.parametrize("name", MODULES)
def test_kernels_see_the_names_of_their_module(name):
    module = importlib.import_module(name)

    kernels = [one for one in vars(module).values() if isinstance(one, triton.JITFunction)]
    assert kernels
    assert all(kernel.fn.__globals__ is vars(module) for kernel in kernels)
