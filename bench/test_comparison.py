"""Time to compare a sharded model's tensors with two servers' readings, by the number of ranks.

    python -m pytest bench/test_comparison.py -m "" -s -o addopts=--import-mode=importlib

``rank 0`` gathers every tensor on every rank and compares on rank 0, as the canary did before;
``owners`` has each rank compare the layers that it owns. Each row prints the seconds (median of
three), the bytes that the busiest rank compares, and how much rank 0's peak memory grew. Ranks
share this machine's cores, so the seconds of ``owners`` fall only as far as there are cores.
COMPARISON_GB sets the size of the larger model.
"""

import json
import os
from pathlib import Path

import pytest
from forked_ranks import forked_ranks

WIDTH = 1024
LAYER = 2 * (4 * WIDTH * WIDTH + 3 * 4 * WIDTH * WIDTH)  # bytes in bfloat16
LARGE = float(os.environ.get("COMPARISON_GB", "0.8"))


@pytest.mark.parametrize("by", ["rank 0", "owners"])
@pytest.mark.parametrize("gigabytes", [LARGE / 2, LARGE])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_comparison(tmp_path, by, gigabytes, ranks):
    layers = max(4, round(gigabytes * 1e9 / LAYER))
    program = Path(__file__).with_name("comparing_ranks.py")
    done = forked_ranks(
        program, tmp_path, WIDTH, layers, by, ranks=ranks, cwd=tmp_path, timeout_s=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    print(
        f"\n{by:6} {found['bytes'] / 1e9:.2f} GB, {ranks} ranks: {found['seconds']:6.2f} s;"
        f"  busiest rank {found['busiest'] / 1e6:7.1f} MB, rank 0 grew {found['grown_mb']:.0f} MB"
    )
