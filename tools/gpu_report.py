"""Run the tests and benchmarks of one GPU within a few minutes, and write a report.

    python tools/gpu_report.py [FILE ...] [--minutes 8.7] [--report gpu-report]

The script needs no network and installs nothing: it uses the Python that runs it, and the package
from the source tree that contains it. It names missing packages first, and skips what needs them,
with the reason. The files of a group run in one process, because its imports take seconds. After a
GPU error, or when a test ends the process or takes too long and is killed, the remaining tests run
in new processes, one for each file. When the time is up, the remaining tests are listed as not run.
The report is rewritten after each process, as Markdown and as JSON. It ends with a row for the
table of GPU runs in docs/verified.md.

Without FILE, the tests marked ``gpu`` run first, and beside them the lines of the README and of the
recipes, which need many imports but little of the GPU. Then benchmarks run alone, the most
important first: see ``TESTS_S`` and ``BENCHMARKS`` for the seconds that each is expected to take.
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
from collections.abc import Generator, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "tests/recipes/test_on_a_gpu.py"  # lines of the README and of recipes
# Estimates in seconds for an H200 with 16 CPU cores and an empty cache of compiled code, where
# imports take 12 s, the first compilation of a kind of layer 25 s, a known one 8 s. Their sum must
# stay below the time limit: who adds something must take something away.
TESTS_S = 110  # tests marked gpu, and beside them the lines of recipes
BENCHMARKS = {
    "test_train_step.py": 225,  # imports; packs: 32, 24, 29; experts 38, varied 19, sft.py 69
    "test_linear_logprobs.py": 40,  # 7 variants of 4,096 tokens, 5 of 8,192
    "test_fp8.py": 30,
    "test_activations.py": 25,
    "test_engine.py": 50,  # three engines; 256 steps three times; publications
}
# Benchmarks to run by hand: other libraries, and what has no column below.
BY_HAND = (
    "liger or quack or (quarter and 8192x4096) or every or offloaded or 256 or "
    "test_the_start_on_a_gpu or test_100_steps_where_only_overhead_counts or "
    "test_64_rollouts_of_8_prompts or test_a_turn_of_a_long_conversation"
)
BENCHMARK_S = 150.0  # timeout of one benchmark, or of one recipe
MINUTES = 8.7  # time limit of the whole run by default: it must end within nine
COMPLETE = (0, 1, 5)  # pytest's exit codes if all tests passed, some failed, or there are none
STARTING_S = 120.0  # timeout of a file's imports, on a machine that has just started
REPORTED = ["torch", "transformers", "vllm", "triton", "numpy"]
TEST_PACKAGES = ["pytest", "pytest-benchmark", "hypothesis", "beartype"]
Result = dict[str, Any]
# The figures of a row of docs/verified.md: the column, and for each number the end of the
# benchmark's name, and what it measured.
STEP = "test_model_flop_utilisation[Qwen3-0.6B-["
HEAD = "test_forward_and_backward[4096x1024-"
COLUMNS = {
    "MFU at 16k, 64k, mixed": [
        (f"{STEP}16384]]", "mfu"),
        (f"{STEP}65536]]", "mfu"),
        (f"{STEP}30000,16000,8000,6000,3000,2536]]", "mfu"),
    ],
    "MFU, experts": [
        ("test_model_flop_utilisation[Qwen3-30B-A3B-4-layers-[16384]]", "mfu"),
    ],
    "LM head / logits: all, entropy, a quarter": [
        (f"{HEAD}ours-with_logits]", "ratio"),
        (f"{HEAD}ours_and_entropy-with_logits_and_entropy]", "ratio"),
        (f"{HEAD}ours_of_a_quarter-with_logits]", "ratio"),
    ],
    "FP8 / bf16": [("test_a_layer[MLP, 8192 tokens]", "with backward")],
    "time recomputed / kept: full, selective": [
        ("test_recomputation[full]", "time"),
        ("test_recomputation[selective]", "time"),
    ],
    "sft.py / its step": [("test_the_recipe_trains_as_fast", "recipe_speed")],
    "engine, ms a step: 1, 32 requests": [
        ("test_tokens_per_second_on_a_gpu[1]", "ms a step"),
        ("test_tokens_per_second_on_a_gpu[32]", "ms a step"),
    ],
}


def gpu_tests() -> list[Path]:
    """Return the files with tests marked ``gpu``, but for the lines of recipes."""
    tests = ROOT.glob("tests/**/test_*.py")
    marked = sorted(path for path in tests if "@pytest.mark.gpu" in path.read_text())
    return [path for path in marked if path != RECIPES]


def gpu_benchmarks() -> list[Path]:
    """Return the benchmarks that measure something different on a GPU, the most important first."""
    return [ROOT / "bench" / name for name in BENCHMARKS]


def grouped(files: list[Path]) -> list[list[Path]]:
    """Divide files into groups that can run in one process: tests, then benchmarks."""
    tests = [path for path in files if not is_benchmark(path)]
    return [group for group in (tests, [*filter(is_benchmark, files)]) if group]


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


def pytest_command(targets: list[str], *, benchmarks: bool, without: str) -> list[str]:
    """Return the command that runs files, or tests of the form ``path::name``.

    ``without``: expression of pytest's option ``-k`` for tests to leave out.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), "-p", "pytest_events", "-p", "no:cacheprovider"]
    # Other versions of packages emit other warnings, which must not fail the tests.
    command += ["-W", "default", "--continue-on-collection-errors"]
    if benchmarks:
        command += ["-o", "addopts=--import-mode=importlib", "--benchmark-only"]
    else:
        command += ["-m", "gpu"]
    if without:
        command += ["-k", f"not ({without})"]
    return [*command, *targets]


def is_benchmark(path: Path) -> bool:
    """Check whether a file has benchmarks, not tests."""
    return path.parent.name == "bench"


class PytestRun:
    """One process of pytest, and the events that it has reported so far."""

    def __init__(
        self, targets: list[str], folder: Path, *, benchmarks: bool, without: str = ""
    ) -> None:
        self.events_file = folder / "events"
        self.events_file.write_text("")
        self.log = folder / "log"
        environments = sorted(map(str, (ROOT / "recipes/environments").iterdir()))
        paths = [str(ROOT), str(ROOT / "tools"), *environments, os.environ.get("PYTHONPATH", "")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                pytest_command(targets, benchmarks=benchmarks, without=without),
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


def results_of(events: list[Result]) -> list[Result]:
    """Return one result per collected test, and one per file that could not be collected."""
    results: dict[str, Result] = {}
    for event in events:
        if event["kind"] == "collected":
            for test in event["tests"]:
                results[test] = {"test": relative(test), "outcome": "not run", "seconds": 0.0}
        elif event["kind"] == "uncollected":
            absent = re.search(r"ModuleNotFoundError: No module named '([^']+)'", event["reason"])
            skipped = absent or event["outcome"] == "skipped"
            results[event["file"]] = {
                "test": relative(event["file"]),
                "outcome": "skipped" if skipped else "failed",
                "seconds": 0.0,
                "reason": f"{absent[1]} is not installed" if absent else event["reason"],
            }
        elif event["kind"] == "began":
            results[event["test"]]["outcome"] = "began"
        else:
            result = results[event["test"]]
            result["seconds"] += event["seconds"]
            ended = event["phase"] == "call" or event["outcome"] != "passed"
            # The first phase that does not pass decides the result.
            if ended and result["outcome"] in ("began", "passed"):
                kept = event.keys() - {"kind", "test", "phase", "seconds"}
                result |= {key: event[key] for key in kept}
    return list(results.values())


def run_once(
    targets: list[str],
    test_s: float,
    stop_at: float,
    folder: Path,
    *,
    benchmarks: bool,
    without: str = "",
) -> list[Result]:
    """Run files or tests in one process; return a result for each, some of them "not run".

    A file whose tests are not known has one result for all of them.
    """
    run = PytestRun(targets, folder, benchmarks=benchmarks, without=without)
    try:
        late = wait(run, test_s, stop_at)
    finally:
        run.end()
    code = run.process.returncode
    events = run.events()
    results = results_of(events)
    for result in results:
        if result["outcome"] == "began":
            result["outcome"] = "failed"
            result["reason"] = late or f"its process ended with {code}"
            result["details"] = tail(run.log)
    if code in COMPLETE and any(event["kind"] == "collected" for event in events):
        return results
    why = late or f"pytest ended with {code} before any test"
    known = {result["test"].partition("::")[0] for result in results}
    files = files_of(targets)
    for file in sorted(set(map(relative, files)) - known):
        result = not_run(file, why)
        if len(files) == 1:
            result |= {"outcome": "failed", "details": tail(run.log)}
        results.append(result)
    return results


def files_of(targets: list[str]) -> set[str]:
    """Return the files of targets, which are files or tests."""
    return {target.partition("::")[0] for target in targets}


def run_group(
    paths: list[Path], test_s: float, stop_at: float, folder: Path, *, without: str = ""
) -> Iterator[list[Result]]:
    """Run the tests of a group; yield their results each time a process of pytest ends.

    ``without`` is an expression for tests to leave out. All files run in one process. If it ends
    before all tests have run, the remaining tests run file by file, each file in new processes,
    until all its tests have run.
    """
    benchmarks = is_benchmark(paths[0])
    if benchmarks or RECIPES in paths:
        test_s = BENCHMARK_S
    pending = [[str(path) for path in paths]]  # targets of the next processes
    while pending:
        targets = pending.pop(0)
        if time.monotonic() >= stop_at:
            yield [not_run(relative(target), "the time was up") for target in targets]
            continue
        results = run_once(targets, test_s, stop_at, folder, benchmarks=benchmarks, without=without)
        left = [result for result in results if result["outcome"] == "not run"]
        yield [result for result in results if result["outcome"] != "not run"]
        if left == results and len(files_of(targets)) == 1:  # no progress
            yield [{**result, "reason": "pytest ended before this test"} for result in left]
        elif left:
            tests: dict[str, list[str]] = {}
            for result in left:
                test = os.path.join(ROOT, result["test"])  # not Path, for names with slashes
                tests.setdefault(test.partition("::")[0], []).append(test)
            pending = [*tests.values(), *pending]


class RunBeside:
    """Another run of this script, in a process of its own, while this one goes on."""

    def __init__(self, path: Path, stop_at: float, folder: Path) -> None:
        self.path = path
        self.report = folder / "beside"
        self.log = folder / "beside.log"
        minutes = max(0.0, stop_at - time.monotonic()) / 60
        command = [sys.executable, __file__, path, "--minutes", minutes, "--commit", "beside"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "--report", str(self.report)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def results(self, stop_at: float) -> list[Result]:
        """Wait for its end, and return its results."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It ends by itself at that time, and then ends its own processes.
            self.process.wait(timeout=max(0.0, stop_at - time.monotonic()) + 15)
        self.end()
        written = self.report.with_suffix(".json")
        if written.exists():
            results: list[Result] = json.loads(written.read_text())["results"]
            return results
        result = not_run(relative(str(self.path)), f"its run ended with {self.process.returncode}")
        return [result | {"outcome": "failed", "details": tail(self.log)}]

    def end(self) -> None:
        """End the run, which ends its own processes."""
        for end in (self.process.terminate, self.process.kill):
            if self.process.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=15)


def runs(
    files: list[Path], reason: str | None, test_s: float, stop_at: float, folder: Path
) -> Generator[list[Result], None, None]:
    """Run files, or all that needs a GPU; yield results as they come.

    ``reason``: why no benchmark can run.
    """
    if not files:
        beside = RunBeside(RECIPES, stop_at, folder)
        try:
            yield from run_group(gpu_tests(), test_s, stop_at, folder)
            yield beside.results(stop_at)
        finally:
            beside.end()
    for group in grouped(files) if files else [gpu_benchmarks()]:
        if is_benchmark(group[0]) and reason:
            skipped = {"outcome": "skipped", "seconds": 0.0, "reason": reason}
            yield [{"test": relative(str(path)), **skipped} for path in group]
        else:
            without = "" if files else BY_HAND
            yield from run_group(group, test_s, stop_at, folder, without=without)


def relative(target: str) -> str:
    """Return a file or a test by its path from the root of the source, if it is there."""
    return target.removeprefix(f"{ROOT}{os.sep}")


def not_run(test: str, reason: str) -> Result:
    """Return the result of a test that was left out."""
    return {"test": test, "outcome": "not run", "seconds": 0.0, "reason": reason}


def wait(run: PytestRun, allowed: float, stop_at: float) -> str | None:
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


def row(facts: dict[str, Any], results: list[Result]) -> dict[str, str]:
    """Return a row for the table of GPU runs in docs/verified.md."""
    outcomes = Counter(result["outcome"] for result in results)
    gpu, driver, *_ = f"{facts['gpu (name, driver, memory)']},".split(",")
    found = {
        "commit, date": f"{facts['commit'][:12]}, {facts['date'][:10]}",
        "card, driver, torch": f"{gpu},{driver}, {facts['torch']}".replace(",,", ","),
        "passed, failed, not run": ", ".join(
            str(outcomes[outcome]) for outcome in ("passed", "failed", "not run")
        ),
    }
    for column, figures in COLUMNS.items():
        numbers = [figure(results, ending, name) for ending, name in figures]
        found[column] = ", ".join("-" if number is None else number for number in numbers)
    return found


def figure(results: list[Result], ending: str, name: str) -> str | None:
    """Return what a benchmark measured, as text of three digits; None if it did not run."""
    for result in results:
        if result["test"].endswith(ending) and "measured" in result:
            measured = result["measured"]
            value = fp8_speed(measured) if name == "with backward" else measured.get(name)
            return None if value is None else f"{float(value):.3g}"
    return None


def fp8_speed(measured: dict[str, Any]) -> float | None:
    """Return the speed of the fastest FP8 backend, relative to bf16; with the backward pass."""
    found = {
        name: re.search(r"([\d.]+) with backward", str(text)) for name, text in measured.items()
    }
    rates = {name: float(rate[1]) for name, rate in found.items() if rate}
    bf16 = rates.pop("bf16", None)
    return max(rates.values()) / bf16 if bf16 and rates else None


def write_report(base: Path, facts: dict[str, Any], results: list[Result], seconds: float) -> None:
    """Write the report to ``base``.json and ``base``.md."""
    counts = Counter(result["outcome"] for result in results)
    report = {"provenance": facts, "seconds": seconds, "counts": counts}
    report |= {"row": row(facts, results), "results": results}
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
        shown = [result["test"], result["outcome"], f"{result['seconds']:.1f}"]
        lines.append(table_line([*shown, result.get("reason", "")]))
    measured = [result for result in results if "median_s" in result]
    if measured:
        lines += ["", "## Benchmarks", ""]
        lines += ["| benchmark | median (s) | rounds | measured |", "|---|---|---|---|"]
        for result in measured:
            shown = [result["test"], f"{result['median_s']:.4g}", result["rounds"]]
            lines.append(table_line([*shown, result["measured"]]))
    columns = row(facts, results)
    lines += ["", "## Row of docs/verified.md", "", table_line(columns.keys())]
    lines += ["|---" * len(columns) + "|", table_line(columns.values())]
    for result in results:
        if result["outcome"] == "failed":
            lines += ["", f"## {result['test']}", "", "```", result.get("details", ""), "```"]
    return "\n".join(lines) + "\n"


def table_line(cells: Iterable[object]) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(map(cell, cells)) + " |"


def cell(value: object) -> str:
    """Return a value as text that is safe in a cell of a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")


def main() -> int:
    """Run and report the tests; return 0 if tests passed, and none failed or was left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("files", nargs="*", type=Path, help="default: all files with GPU tests")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="time limit of the whole run"
    )
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
    files = [path.resolve() for path in arguments.files]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        found_so_far = runs(files, reason, arguments.test_seconds, stop_at, Path(folder))
        stack.enter_context(contextlib.closing(found_so_far))
        for found in found_so_far:
            results += found
            for result in found:
                took = f"{result['outcome']} ({result['seconds']:.1f} s)"
                print(f"{result['test']}: {took} {result.get('reason', '')}", flush=True)
            write_report(arguments.report, facts, results, time.monotonic() - began)
    columns = row(facts, results)
    print(table_line(columns.keys()), table_line(columns.values()), sep="\n")
    print(f"wrote {arguments.report}.md and {arguments.report}.json")
    outcomes = {result["outcome"] for result in results}
    return 0 if "passed" in outcomes and not outcomes & {"failed", "not run"} else 1


if __name__ == "__main__":
    sys.exit(main())
