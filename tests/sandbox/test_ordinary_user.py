"""The same attacks and hacks again, as an ordinary user: where the tests themselves run as root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandboxed import needed

needed()

REPOSITORY = Path(__file__).parents[2]
USER = 1_999_999_999  # no account has it

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        os.getuid() != 0, reason="not root: the other tests run as an ordinary user already"
    ),
]


def test_as_an_ordinary_user(tmp_path):
    names = ["attacks", "grading", "places", "repositories", "tiers"]
    files = [f"tests/sandbox/test_{name}.py" for name in names]
    chosen = ["-k", "not (gvisor or only_root)"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *chosen]
    command += ["-m", "not (gpu or slow or vllm or agents)"]
    command += files
    helper = REPOSITORY / "tests/helpers/ordinary_user.py"
    done = subprocess.run(
        [sys.executable, str(helper), str(USER), str(tmp_path), *command],
        env=dict(os.environ, PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        encoding="utf-8",
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
