"""A Triton backend for the CPU that compiles nothing: with TRITON_INTERPRET=1, Python runs kernels.

It lets vLLM's Model Runner V2, which needs Triton, run on a CPU: slowly, and for tests only. Triton
finds it by the entry point that ``write_entry_point`` writes.
"""

from pathlib import Path


def write_entry_point(folder: Path) -> None:
    """Make Triton find this backend if ``folder`` is on the path."""
    distribution = folder / "interpreted_triton-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Name: interpreted_triton\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text(f"[triton.backends]\ncpu = {__name__}\n")
