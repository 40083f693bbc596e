"""The index of a run's recorded groups, ``rollouts.index``, so that a report reads what it shows.

It has one entry of 32 bytes per group, in the order of ``rollouts.jsonl``: four unsigned 64-bit
integers, lowest byte first, as ``ENTRY`` names them.
"""

from pathlib import Path

import numpy as np

ENTRY = np.dtype(
    [
        ("offset", "<u8"),  # where the group's lines begin in rollouts.jsonl
        ("bytes", "<u8"),  # the length of these lines
        ("array_bytes", "<u8"),  # the length of its blocks in rollouts.bin
        ("rollouts", "<u8"),  # the number of its rollouts with a trained sequence
    ]
)


def entry(offset: int, length: int, array_bytes: int, rollouts: int) -> bytes:
    """Return the entry of a group."""
    return np.array([(offset, length, array_bytes, rollouts)], ENTRY).tobytes()


def read_index(path: Path) -> np.ndarray:
    """Return the entries of an index, without a last one that is incomplete; none if missing.

    Entries that were lost when the file was cut, and are zeros now, are left out.
    """
    data = path.read_bytes() if path.is_file() else b""
    entries = np.frombuffer(data, ENTRY, len(data) // ENTRY.itemsize)
    return entries[entries["bytes"] > 0]
