"""The same attacks and hacks again, as an ordinary user: where the tests themselves run as root.

`pytest -m slow tests/sandbox/test_ordinary_user.py` runs the files that CI leaves out (minutes).
"""

import os
import shutil
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
    passes(["attacks", "grading", "neighbours", "places"], tmp_path, grant=0)


@pytest.mark.slow
def test_the_rest_as_an_ordinary_user(tmp_path):
    passes(["kernel_memory", "repositories", "tiers"], tmp_path, grant=0)


@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="newuidmap is not installed")
def test_as_an_ordinary_user_with_subordinate_users(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMERL_TEST_SUBORDINATE", "1")
    passes(["attacks", "kernel_memory", "neighbours", "places"], tmp_path, grant=65536)


def passes(names, tmp_path, *, grant):
    files = [f"tests/sandbox/test_{name}.py" for name in names]
    chosen = ["-k", "not (gvisor or only_root)"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *chosen]
    command += ["-m", "not (gpu or slow or vllm or agents)"]
    command += files
    helper = REPOSITORY / "tests/helpers/ordinary_user.py"
    done = subprocess.run(
        [sys.executable, str(helper), str(USER), str(grant), str(tmp_path), *command],
        env=dict(os.environ, PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        encoding="utf-8",
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-40000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
