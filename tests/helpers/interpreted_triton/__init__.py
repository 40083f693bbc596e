"""A Triton backend for the CPU that compiles nothing: TRITON_INTERPRET=1 runs kernels in Python.

With this backend, vLLM's Model Runner V2, which needs Triton, runs on a CPU. It is slow and only
for tests. Triton finds the backend through the entry point that ``write_entry_point`` writes.
"""

from pathlib import Path


def write_entry_point(folder: Path) -> None:
    """Write an entry point with which Triton finds this backend if ``folder`` is on the path."""
    distribution = folder / "interpreted_triton-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Name: interpreted_triton\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text(f"[triton.backends]\ncpu = {__name__}\n")
