"""The folder of a low-rank adapter, served by vLLM itself.

python -m pytest tests/vllm/test_adapters.py -m "vllm and slow" (a minute: an engine of its own)
"""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_vllm_serves_the_adapter_that_was_trained(root, smollm2_folder, tmp_path):
    """Against the trainer's logprobs, with and without the adapter."""
    script = root / "tests" / "vllm" / "serve_adapter.py"
    done = subprocess.run(
        [sys.executable, script, smollm2_folder, tmp_path / "adapter"],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )

    (line,) = (line for line in done.stdout.splitlines() if line.startswith("gaps "))
    gap, plain = map(float, line.split()[1:])
    assert gap < 1e-4
    assert plain > 1e-2
