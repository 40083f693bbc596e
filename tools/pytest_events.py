"""A pytest plugin that appends each event to the file EVENTS_FILE at once, as one JSON line.

Unlike pytest's own reports, the events survive when the process is killed.
"""

import gc
import json
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# After such an error, every later use of the GPU in the same process fails too.
CUDA_ERROR = re.compile(r"CUDA error|CUDA driver error|device-side assert|\bC\w+_STATUS_\w+")


def write(**event: Any) -> None:
    """Append one event."""
    with Path(os.environ["EVENTS_FILE"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event, default=str) + "\n")


def reason(representation: Any) -> str:
    """Return the message of an error, or the reason of a skip, in one line."""
    if isinstance(representation, tuple):  # file, line and reason of a skip
        return str(representation[2]).removeprefix("Skipped: ")
    if hasattr(representation, "reprcrash") and representation.reprcrash is not None:
        return str(representation.reprcrash.message).split("\n")[0]
    lines = str(representation).strip().splitlines() or [""]
    raised = [line for line in lines if line.startswith("E  ")]
    return (raised or lines)[-1].removeprefix("E").strip()


def name_of(item: pytest.Item) -> str:
    """Return the name of a test; pytest's own has no file if that is outside of the root."""
    return f"{item.path}::{item.nodeid.partition('::')[2]}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Record a file that can't be imported or that skips itself."""
    report = yield
    if report.outcome != "passed":
        why = reason(report.longrepr)
        write(kind="uncollected", file=str(collector.path), outcome=report.outcome, reason=why)
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the tests that will run."""
    write(kind="collected", tests=[name_of(item) for item in session.items])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Record that a test begins."""
    write(kind="began", test=name_of(item))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a file, free the GPU's memory, and forget compiled code."""
    if nextitem is not None and nextitem.path == item.path:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
    if torch is not None and "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record the end of a phase of a test: setup, call or teardown."""
    report = yield
    event = {"outcome": report.outcome, "seconds": call.duration, "phase": call.when}
    if report.outcome != "passed":
        event["reason"] = reason(report.longrepr)
        event["details"] = str(report.longrepr)
    if report.failed and CUDA_ERROR.search(event["details"]):
        item.session.shouldstop = "the GPU can't be used by this process any more"
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if call.when == "call" and benchmark is not None and benchmark.stats is not None:
        event["median_s"] = benchmark.stats.stats.median
        event["rounds"] = benchmark.stats.stats.rounds
        event["measured"] = dict(benchmark.extra_info)
    write(kind="phase", test=name_of(item), **event)
    return report
