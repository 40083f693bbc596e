"""Mutation testing: check that some test fails for every small fault in the numerics.

    python tools/mutants.py [FILE ...] [--fresh] [--workers N] [--list]

Each mutant runs in a fork of a process that has imported everything but primerl and the tests. A
mutant therefore takes about a second, since torch is not imported again. In the fork, imports find
the mutated source in place of one file (no file on disk changes). pytest then runs the tests that
reach the mutated lines, the fastest first, until one fails. docs/mutants.md explains the results.
"""

# Existing libraries don't fit. mutmut 3.8 skips decorated functions (@of_rewards, properties,
# lru_cache) and calls pytest twice in a process, which jaxtyping's import hook refuses. cosmic-ray
# and pytest-gremlins start a new interpreter per mutant: 5 s of imports, over an hour in total.

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

from hypothesis import settings
from mutations import Mutant, mutants
from trials import RESULTS, ROOT, Forks, Result, survey, trial

SOURCES = ["loss/**/*.py", "advantage/**/*.py", "packing/**/*.py"]
# Subprocesses that these tests start import the original source, not the mutant.
TESTS = ["tests/advantage", "tests/loss", "tests/packing", "tests/test_filters.py"]
DEAD = ("killed", "timeout")


def tests_that_reach(mutant: Mutant, surveyed: Result) -> list[str]:
    """Return the tests that run the mutated lines; for lines run at import, their scope's tests."""
    lines = {int(n): tests for n, tests in surveyed["lines"][str(ROOT / mutant.path)].items()}
    module = min(lines, default=0), max(lines, default=0)
    for first, last in (mutant.statement, mutant.scope, module):
        tests = {test for n in range(first, last + 1) for test in lines.get(n, [])}
        if not tests:
            return []
        if tests - {""}:
            return sorted(tests - {""}, key=lambda test: surveyed["seconds"][test])
    return []


def prepare(forks: Forks, files: list[Path], tests: list[str]) -> Result:
    """Survey the tests, import the modules that they import, and check that they pass in forks."""
    surveyed: Result = {}
    forks.start(3600, surveyed.update, survey, [str(file) for file in files], tests)
    forks.finish()
    if surveyed.get("failures", True):
        sys.exit(f"the tests must pass without a fault: {surveyed.get('failures', surveyed)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in surveyed["modules"]:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    settings.load_profile("mutants")
    gc.freeze()
    for file in files:
        source = ast.unparse(ast.parse(file.read_text()))
        reached = {test for tests in surveyed["lines"][str(file)].values() for test in tests} - {""}
        control: Result = {}
        if reached:
            forks.start(3600, control.update, trial, str(file), source, sorted(reached))
            forks.finish()
        if control.get("verdict", "survived") != "survived":
            sys.exit(f"{file} without a fault, in a fork: {control}")
    return surveyed


def run(forks: Forks, faults: list[Mutant], surveyed: Result, results: dict[str, Result]) -> None:
    """Try each mutant that has no verdict or survived other tests, and log results immediately."""
    tried = hashlib.sha256(b"".join(f.read_bytes() for f in sorted(Path("tests").rglob("*.py"))))
    tests_now = tried.hexdigest()[:16]

    def note(mutant: Mutant, result: Result) -> None:
        results[mutant.key] = result
        place = f"{mutant.path}:{mutant.line}"
        row = {"key": mutant.key, "place": place, "tests": tests_now, **result}
        with (RESULTS / "verdicts.jsonl").open("a") as log:
            log.write(json.dumps({**row, "diff": mutant.diff}) + "\n")
        done = sum(fault.key in results for fault in faults)
        print(f"{done}/{len(faults)} {place} {result['verdict']}", flush=True)

    for mutant in faults:
        known = results.get(mutant.key, {})
        if known.get("verdict") in DEAD or known.get("tests") == tests_now:
            continue
        if tests := tests_that_reach(mutant, surveyed):
            limit_s = 15 + 5 * sum(surveyed["seconds"][test] for test in tests)
            file = str(ROOT / mutant.path)
            forks.start(limit_s, partial(note, mutant), trial, file, mutant.source, tests)
        else:
            note(mutant, {"verdict": "no tests", "by": ""})
    forks.finish()


def report(faults: list[Mutant], results: dict[str, Result]) -> str:
    """Format a table of the verdicts by file, then the diff of each surviving mutant."""
    verdicts = {fault: results.get(fault.key, {}).get("verdict", "not run") for fault in faults}
    columns = [*DEAD, "survived", "no tests"]
    rows = [f"| file | mutants | {' | '.join(columns)} | killed, % |", "|---|" + "---:|" * 6]
    for path in [*dict.fromkeys(fault.path for fault in faults), "all"]:
        count = Counter(verdicts[fault] for fault in faults if path in (fault.path, "all"))
        share = 100 * sum(count[verdict] for verdict in DEAD) / (count.total() or 1)
        numbers = " | ".join(str(count[column]) for column in columns)
        rows.append(f"| {path} | {count.total()} | {numbers} | {share:.1f} |")
    for fault, verdict in verdicts.items():
        if verdict not in DEAD:
            rows += ["", f"{fault.path}:{fault.line} {verdict}", "```diff", fault.diff, "```"]
    return "\n".join(rows)


def known_verdicts(log: Path) -> dict[str, Result]:
    """Load the results of earlier runs by mutant key, which changes with the module's source."""
    rows = (
        [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        if log.exists()
        else []
    )
    return {row["key"]: row for row in rows}


def main() -> None:
    """Try the mutants, and write ``.mutants/report.md``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", help="default: all of SOURCES")
    parser.add_argument("--fresh", action="store_true", help="discard the verdicts of earlier runs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="show the mutants without running them")
    args = parser.parse_args()
    os.chdir(ROOT)
    files = [Path(file).resolve() for file in args.files]
    files = files or sorted({f for glob in SOURCES for f in (ROOT / "primerl").glob(glob)})
    faults = [m for f in files for m in mutants(str(f.relative_to(ROOT)), f.read_text())]
    if args.list:
        print("\n".join(f"{fault.path}:{fault.line}\n{fault.diff}\n" for fault in faults))
        return
    shutil.rmtree(RESULTS / "scratch", ignore_errors=True)
    RESULTS.mkdir(exist_ok=True)
    if args.fresh:
        (RESULTS / "verdicts.jsonl").unlink(missing_ok=True)
    results = known_verdicts(RESULTS / "verdicts.jsonl")
    started = time.monotonic()
    forks = Forks(args.workers)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command resumes"))
    try:
        run(forks, faults, prepare(forks, files, TESTS), results)
    finally:
        forks.stop()
    text = report(faults, results)
    (RESULTS / "report.md").write_text(text + "\n")
    print(f"\n{text}\n\n{time.monotonic() - started:.0f} s; .mutants/ has the report and the log")


if __name__ == "__main__":
    main()
