"""Run the tests and benchmarks of one GPU within a few minutes, and write a report.

    python tools/gpu_report.py [FILE ...] [--minutes 8.5] [--report gpu-report]

The script needs no network and installs nothing: it uses the Python that runs it, and the package
from the source tree that contains it. It names missing packages first, and skips what needs them,
with the reason. Each file runs in its own process, so that a GPU error ends no other file. A test
that takes too long is killed, and its file continues after it. When the time is up, the remaining
tests are listed as not run. The report is rewritten after each file, as Markdown and as JSON.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Benchmarks that measure something different on a GPU than on a CPU, in order of duration.
BENCHMARKS = [
    "test_engine.py",
    "test_linear_logprobs.py",
    "test_activations.py",
    "test_train_step.py",
    "test_fp8.py",
]
BENCHMARK_S = 150.0
NO_TESTS = 5  # pytest's exit code if it collects no tests
STARTING_S = 120.0  # timeout of a file's imports, on a machine that has just started
REPORTED = ["torch", "transformers", "vllm", "triton", "numpy"]
TEST_PACKAGES = ["pytest", "pytest-benchmark", "hypothesis", "beartype"]
Result = dict[str, Any]


def gpu_files() -> list[Path]:
    """Return the test files with tests marked ``gpu``, then the benchmarks."""
    tests = ROOT.glob("tests/**/test_*.py")
    marked = sorted(path for path in tests if "@pytest.mark.gpu" in path.read_text())
    return [*marked, *(ROOT / "bench" / name for name in BENCHMARKS)]


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages() -> list[str]:
    """Return the packages that the library and its tests need but that are not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["transformers"]]
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in needed]  # type: ignore[index]
    return [name for name in [*names, *TEST_PACKAGES] if version(name) is None]


def output(*command: str) -> str | None:
    """Return the output of a command, or None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """Return the commit of the source, and whether the working tree has changes."""
    found = output("git", "rev-parse", "HEAD")
    if found is None:
        return "unknown: no git repository (--commit)"
    return found + (", with changes" if output("git", "status", "--porcelain") else "")


def provenance(commit: str) -> dict[str, Any]:
    """Return the date, the commit, the versions and the devices of this run."""
    # A separate process, so that this one does not hold the GPU.
    code = "from torch import cuda, version as v; print(v.cuda); print(cuda.device_count())"
    cuda, devices = (output(sys.executable, "-c", code) or "unknown\n0").splitlines()
    query = "--query-gpu=name,driver_version,memory.total"
    gpu = output("nvidia-smi", query, "--format=csv,noheader")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{platform.platform()}, {os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "gpu (name, driver, memory)": gpu or "none: nvidia-smi finds no GPU",
        "GPUs that torch sees": int(devices),
        "CUDA of torch": cuda,
        **{name: version(name) or "not installed" for name in REPORTED},
        "missing packages": ", ".join(missing_packages()) or "none",
    }


def pytest_command(path: Path, tests: list[str]) -> list[str]:
    """Return the command that runs the given tests of a file; without names, all of its tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), "-p", "pytest_events", "-p", "no:cacheprovider"]
    # Other versions of packages emit other warnings, which must not fail the tests.
    command += ["-W", "default"]
    if is_benchmark(path):
        command += ["-o", "addopts=--import-mode=importlib", "--benchmark-only"]
    else:
        command += ["-m", "gpu"]
    chosen = [f"{path}::{test.partition('::')[2]}" for test in tests]
    return [*command, *(chosen or [str(path)])]


def is_benchmark(path: Path) -> bool:
    """Check whether a file has benchmarks, not tests."""
    return path.parent.name == "bench"


class FileRun:
    """One process of pytest that runs one file, and the events that it has reported so far."""

    def __init__(self, path: Path, tests: list[str], folder: Path) -> None:
        self.events_file = folder / "events"
        self.events_file.write_text("")
        self.log = folder / "log"
        paths = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                pytest_command(path, tests),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "EVENTS_FILE": str(self.events_file),
                },
            )

    def events(self) -> list[Result]:
        """Return all events, without an incomplete last line."""
        lines = self.events_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def end(self) -> None:
        """End the process and its child processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)


def results_of(name: str, events: list[Result]) -> list[Result]:
    """Return one result per collected test; one for the file if it could not be collected."""
    results: dict[str, Result] = {}
    for event in events:
        if event["kind"] == "collected":
            for test in event["tests"]:
                results.setdefault(test, {"test": test, "outcome": "not run", "seconds": 0.0})
        elif event["kind"] == "uncollected":
            absent = re.search(r"ModuleNotFoundError: No module named '([^']+)'", event["reason"])
            skipped = absent or event["outcome"] == "skipped"
            results[name] = {
                "test": name,
                "outcome": "skipped" if skipped else "failed",
                "seconds": 0.0,
                "reason": f"{absent[1]} is not installed" if absent else event["reason"],
            }
        elif event["kind"] == "began":
            results[event["test"]] = {"test": event["test"], "outcome": "began", "seconds": 0.0}
        else:
            result = results[event["test"]]
            result["seconds"] += event["seconds"]
            ended = event["phase"] == "call" or event["outcome"] != "passed"
            # The first phase that does not pass decides the result.
            if ended and result["outcome"] in ("began", "passed"):
                kept = event.keys() - {"kind", "test", "phase", "seconds"}
                result |= {key: event[key] for key in kept}
    return list(results.values())


def run_file(path: Path, test_s: float, stop_at: float, folder: Path) -> Iterator[list[Result]]:
    """Run the tests of one file; yield their results each time a process of pytest ends."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    allowed = BENCHMARK_S if is_benchmark(path) else test_s
    tests: list[str] = []
    left: list[Result] = [{"test": name, "outcome": "not run", "seconds": 0.0}]
    progress = True
    while left and progress and time.monotonic() < stop_at:
        run = FileRun(path, tests, folder)
        try:
            late = wait(run, allowed, stop_at)
        finally:
            run.end()
        code = run.process.returncode
        results = results_of(name, run.events())
        for result in results:
            if result["outcome"] == "began":
                result["outcome"] = "failed"
                result["reason"] = late or f"its process ended with {code}"
                result["details"] = tail(run.log)
        if not results and code != NO_TESTS:
            why = late or f"pytest ended with {code} before any test"
            failed = {"outcome": "failed", "reason": why, "details": tail(run.log)}
            results = [{"test": name, "seconds": 0.0, **failed}]
        finished = [result for result in results if result["outcome"] != "not run"]
        left = [result for result in results if result["outcome"] == "not run"]
        tests = [result["test"] for result in left]
        progress = bool(finished)
        yield finished
    reason = "pytest ended before this test" if time.monotonic() < stop_at else "the time was up"
    yield [{**result, "reason": reason} for result in left]


def wait(run: FileRun, allowed: float, stop_at: float) -> str | None:
    """Wait until the process ends, and return None; on a timeout, return the reason."""
    seen, since = 0, time.monotonic()
    while run.process.poll() is None:
        events = run.events()
        if len(events) != seen:
            seen, since = len(events), time.monotonic()
        now = time.monotonic()
        limit = allowed if any(event["kind"] == "began" for event in events) else STARTING_S
        if now > stop_at:
            return "ended when the time was up"
        if now - since > limit:
            return f"ended after {limit:.0f} s"
        time.sleep(0.2)
    return None


def tail(log: Path) -> str:
    """Return the end of pytest's output."""
    return log.read_text(encoding="utf-8", errors="replace")[-4000:]


def why_no_benchmarks(facts: dict[str, Any]) -> str | None:
    """Return the reason why benchmarks can't run, or None."""
    if not facts["GPUs that torch sees"]:
        return "torch sees no CUDA device"
    if version("pytest-benchmark") is None:
        return "pytest-benchmark is not installed"
    return None


def write_report(base: Path, facts: dict[str, Any], results: list[Result], seconds: float) -> None:
    """Write the report to ``base``.json and ``base``.md."""
    counts = Counter(result["outcome"] for result in results)
    report = {"provenance": facts, "seconds": seconds, "counts": counts, "results": results}
    base.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    base.with_suffix(".md").write_text(markdown(facts, results, counts, seconds))


def markdown(
    facts: dict[str, Any], results: list[Result], counts: Counter[str], seconds: float
) -> str:
    """Format the report as Markdown."""
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    lines = [
        "# GPU report",
        "",
        f"{summary}; {seconds:.0f} s.",
        "",
        "| what | value |",
        "|---|---|",
    ]
    lines += [f"| {cell(name)} | {cell(value)} |" for name, value in facts.items()]
    lines += ["", "## Tests", "", "| test | outcome | seconds | reason |", "|---|---|---|---|"]
    for result in results:
        row = [result["test"], result["outcome"], f"{result['seconds']:.1f}"]
        lines.append("| " + " | ".join(map(cell, [*row, result.get("reason", "")])) + " |")
    measured = [result for result in results if "median_s" in result]
    if measured:
        lines += ["", "## Benchmarks", ""]
        lines += ["| benchmark | median (s) | rounds | measured |", "|---|---|---|---|"]
        for result in measured:
            row = [result["test"], f"{result['median_s']:.4g}", result["rounds"]]
            lines.append("| " + " | ".join(map(cell, [*row, result["measured"]])) + " |")
    for result in results:
        if result["outcome"] == "failed":
            lines += ["", f"## {result['test']}", "", "```", result.get("details", ""), "```"]
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    """Return a value as text that is safe in a cell of a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")


def main() -> int:
    """Run and report the tests; return 0 if tests passed, and none failed or was left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("files", nargs="*", type=Path, help="default: all files with GPU tests")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit of the whole run")
    parser.add_argument("--test-seconds", type=float, default=90, help="time limit of one test")
    parser.add_argument("--report", type=Path, default=Path("gpu-report"), help="without suffix")
    parser.add_argument("--commit", help="commit of the source, if it is not in a git repository")
    arguments = parser.parse_args()
    began = time.monotonic()
    stop_at = began + 60 * arguments.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))

    facts = provenance(arguments.commit or commit())
    for name, value in facts.items():
        print(f"{name}: {value}", flush=True)
    results: list[Result] = []
    reason = why_no_benchmarks(facts)
    with tempfile.TemporaryDirectory() as folder:
        for path in [path.resolve() for path in arguments.files] or gpu_files():
            if is_benchmark(path) and reason:
                skipped = {"test": path.name, "outcome": "skipped", "seconds": 0.0}
                runs = iter([[{**skipped, "reason": reason}]])
            else:
                runs = run_file(path, arguments.test_seconds, stop_at, Path(folder))
            for found in runs:
                results += found
                for result in found:
                    took = f"{result['outcome']} ({result['seconds']:.1f} s)"
                    print(f"{result['test']}: {took} {result.get('reason', '')}", flush=True)
                write_report(arguments.report, facts, results, time.monotonic() - began)
    print(f"wrote {arguments.report}.md and {arguments.report}.json")
    outcomes = {result["outcome"] for result in results}
    return 0 if "passed" in outcomes and not outcomes & {"failed", "not run"} else 1


if __name__ == "__main__":
    sys.exit(main())
