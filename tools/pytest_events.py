"""A pytest plugin that appends each event to the file EVENTS_FILE at once, as one JSON line.

Unlike pytest's own reports, the events survive when the process is killed.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


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


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that can't be imported or that skips itself."""
    if report.outcome != "passed":
        write(kind="uncollected", outcome=report.outcome, reason=reason(report.longrepr))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the tests that will run."""
    write(kind="collected", tests=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record that a test begins."""
    write(kind="began", test=nodeid)


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
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if call.when == "call" and benchmark is not None and benchmark.stats is not None:
        event["median_s"] = benchmark.stats.stats.median
        event["rounds"] = benchmark.stats.stats.rounds
        event["measured"] = dict(benchmark.extra_info)
    write(kind="phase", test=item.nodeid, **event)
    return report
