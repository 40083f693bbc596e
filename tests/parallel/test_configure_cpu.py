"""Threads and memory of a trainer beside an engine; in processes of their own, which it changes."""

import os
import subprocess
import sys

import pytest
import torch

from primerl import parallel
from primerl.parallel.launch import cpu

PROGRAM = """
import logging, os, resource, sys
import torch
from primerl import parallel
from primerl.parallel.launch import cpu
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(8)
parallel.configure_cpu()
print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
parallel.configure_cpu()
print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
for _ in range(16):
    torch.ones(2**24)  # glibc sets up to 7 crumbs beside an aligned block apart, and then no more
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 2**24 * 4 // 4096  # of one of the tensors


def settled(*, variable=None):
    """The lines that are printed: what is reported and what holds then, twice; page faults."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    if variable is not None:
        environment["OMP_NUM_THREADS"] = variable
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


def test_cores_are_divided_once_and_said():
    said, first, _, again, _ = settled()

    assert first == again == "8 4"
    assert said.startswith("cpu: 8 threads for the trainer, 4 for a server")


def test_beside_a_gpu_only_ranks_on_the_cpu_are_configured(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_keep_freed_memory", lambda: done.append("memory"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    parallel.configure_cpu()
    parallel.configure_cpu(torch.device("cuda", 0))
    assert done == []
    parallel.configure_cpu(torch.device("cpu"))
    assert done == ["memory"]


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_the_environment_says_decides_and_freed_memory_is_kept():
    said, first, _, again, page_faults = settled(variable="1")

    assert first == again == "1 1"
    assert "1 threads each for trainer and engine, as OMP_NUM_THREADS says" in said
    assert "freed memory is kept" in said
    assert int(page_faults) <= PAGES  # where all eight tensors were cleared, 8 times


@pytest.mark.parametrize(
    ("capabilities", "cuda", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False}, False, "float32"),
        ({"avx512_f": True}, False, "float32"),
        ({"avx512_f": True, "avx512_bf16": True}, False, "bfloat16"),
        ({"amx_bf16": True}, False, "bfloat16"),
        ({"neon": True, "bf16": True}, False, "bfloat16"),
        ({"avx2": True}, True, "bfloat16"),
    ],
)
def test_machines_compute_in_what_they_have_instructions_for(
    monkeypatch, capabilities, cuda, expected
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert parallel.native_dtype() == expected


@pytest.mark.thorough
def test_what_there_is_is_freeze_gcs_until_the_process_ends():
    program = """
import atexit, gc
from primerl import parallel
from primerl.parallel.launch import cpu
atexit.register(lambda: print(gc.get_freeze_count()))
held = [[] for _ in range(1000)]
parallel.freeze_gc()
print(gc.get_freeze_count() > 1000)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["True", "0"]
