"""A pytest plugin: writes what happens, as it happens, to the file EVENTS_FILE, one JSON a line.

What has been written stays when the process is killed, which pytest's own reports do not.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


def write(**event: Any) -> None:
    """Appends one event."""
    with Path(os.environ["EVENTS_FILE"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event, default=str) + "\n")


def reason(representation: Any) -> str:
    """What an error says, or why a test was skipped, in a line."""
    if isinstance(representation, tuple):  # file, line and reason of a skip
        return str(representation[2]).removeprefix("Skipped: ")
    if hasattr(representation, "reprcrash") and representation.reprcrash is not None:
        return str(representation.reprcrash.message).split("\n")[0]
    lines = str(representation).strip().splitlines() or [""]
    raised = [line for line in lines if line.startswith("E  ")]
    return (raised or lines)[-1].removeprefix("E").strip()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported, or that skips itself."""
    if report.outcome != "passed":
        write(kind="uncollected", outcome=report.outcome, reason=reason(report.longrepr))


def pytest_collection_finish(session: pytest.Session) -> None:
    """All that will run."""
    write(kind="collected", tests=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    write(kind="began", test=nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """One of the three phases of a test has ended: its set-up, the test, what comes after it."""
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
