"""Trials of mutants: run pytest in forks of this process, with one module's source replaced."""

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

# The same settings as in tests/conftest.py, which runs too late: torch is imported before the fork.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ["COVERAGE_CORE"] = "ctrace"  # the core that supports a context per test

import coverage
import pytest
from hypothesis import HealthCheck, Phase, settings

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".mutants"
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "--no-summary"]
PYTEST += ["-m", "not (gpu or slow or vllm or agents)"]
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins imported before the fork
MEMORY_BYTES = 3 << 30  # limit, since a mutant may append to a list forever
Result = dict[str, Any]

# Hypothesis: the same examples each time, no shrinking, no deadline.
settings.register_profile(
    "mutants",
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


class Survey:
    """A pytest plugin that records each test's CPU seconds and the lines of ``files`` it runs."""

    def __init__(self, files: list[str]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failures: list[str] = []
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=files)
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self.seconds[nodeid] -= time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.coverage.switch_context("")
        self.seconds[nodeid] += time.process_time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append(_reason(report))


class Trial:
    """A pytest plugin that runs only ``tests``, in that order, and records the first failure."""

    def __init__(self, tests: list[str]) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.killer: str | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.killer is None:
            self.killer = _reason(report)

    pytest_collectreport = pytest_runtest_logreport


def _reason(report: Any) -> str:
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line[:2] == "E "]
    return f"{report.nodeid} | {' '.join(lines)[:300]}"


def survey(files: list[str], tests: list[str]) -> Result:
    """Run all tests without a fault, and record their times and coverage."""
    plugin = Survey(files)
    code = int(pytest.main([*tests, *PYTEST, f"--basetemp={_scratch()}/basetemp"], [plugin]))
    plugin.coverage.stop()
    data = plugin.coverage.get_data()
    lines = {file: data.contexts_by_lineno(file) for file in files}
    modules = [name for name, module in sys.modules.items() if _is_installed(module)]
    failures = plugin.failures or ([f"pytest's exit code {code}"] if code else [])
    return {"seconds": plugin.seconds, "failures": failures, "lines": lines, "modules": modules}


def trial(file: str, source: str, tests: list[str]) -> Result:
    """Run ``tests`` with ``source`` in place of ``file``."""
    served = []
    unchanged = SourceFileLoader.get_code

    def get_code(loader: Any, name: str) -> Any:
        if loader.path != file:
            return unchanged(loader, name)
        served.append(name)
        # Compile with jaxtyping's loader, without reading or writing a .pyc.
        return loader.source_to_code(source.encode(), file)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    plugin = Trial(tests)
    modules = sorted({test.split("::")[0] for test in tests})
    code = int(pytest.main([*modules, *PYTEST, f"--basetemp={_scratch()}/basetemp"], [plugin]))
    if not served:
        return {"verdict": "not imported", "by": ""}
    verdict = {0: "survived", 5: "no tests"}.get(code, "killed")
    return {"verdict": verdict, "by": plugin.killer or f"pytest's exit code {code}"}


def _is_installed(module: Any) -> bool:
    file = getattr(module, "__file__", None) or f"{ROOT}/"
    return not file.startswith(f"{ROOT}/") or file.startswith(f"{sys.prefix}/")


def _scratch(pid: int | None = None) -> Path:
    return RESULTS / "scratch" / str(pid or os.getpid())


class Forks:
    """A pool of at most ``workers`` child processes, each of which runs one function."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.running: dict[int, tuple[float, Callable[[Result], None]]] = {}

    def start(self, limit_s: float, then: Callable[[Result], None], fn: Any, *args: Any) -> None:
        if len(self.running) == self.workers:
            self.wait()
        pid = os.fork()
        if not pid:
            try:
                self._child(limit_s, fn, *args)
            finally:
                os._exit(1)
        self.running[pid] = time.monotonic(), then

    def _child(self, limit_s: float, fn: Callable[..., Result], *args: Any) -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _scratch().mkdir(parents=True)
        output = os.open(_scratch() / "output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Limit CPU seconds, since the machine may be busy. The alarm ends a child that only waits.
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 1))
        signal.alarm(10 * int(limit_s))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        (_scratch() / "result.json").write_text(json.dumps(fn(*args)))

    def wait(self) -> None:
        """Wait for a child to end, and pass on its result."""
        pid, status = os.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes that a test may have left behind
        started, then = self.running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        late = code in (-signal.SIGKILL, -signal.SIGALRM)
        result = {"verdict": "timeout" if late else "killed", "by": f"exit code {code}"}
        with contextlib.suppress(FileNotFoundError):
            result = json.loads((_scratch(pid) / "result.json").read_text())
        shutil.rmtree(_scratch(pid), ignore_errors=True)
        then({**result, "elapsed_s": round(time.monotonic() - started, 2)})

    def finish(self) -> None:
        """Wait for all child processes."""
        while self.running:
            self.wait()

    def stop(self) -> None:
        """Kill the child processes that are still running."""
        for pid in self.running:
            os.killpg(pid, signal.SIGKILL)
