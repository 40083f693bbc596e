import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "parts"))

import branches
from table import ROW, table_of


def pytest_addoption(parser):
    parser.addoption("--agents-table", help="file to which the table of clients is written")
    parser.addoption("--agents-log", help="folder to which the recorded requests are written")


@pytest.fixture
def log(pytestconfig, request):
    """Write what a run left behind to a file, if --agents-log names a folder."""
    folder = pytestconfig.getoption("--agents-log", default=None)

    def write(found):
        if folder is None:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = request.node.name.partition("[")[2].rstrip("]").replace("/", "-")
        lines = [str(one) for one in found.exchanges]
        lines += ["", "output:", found.run.output, f"exit code {found.run.exit_code}"]
        lines += [f"stop {found.played.stop}", str(found.played.metrics)]
        lines += branches.reasons(found.played.conversation)
        Path(folder, f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")

    return write


def pytest_terminal_summary(terminalreporter, config):
    """Write the table, also from the runs of other processes."""
    stats = terminalreporter.stats
    reports = [one for group in ("passed", "failed") for one in stats.get(group, ())]
    rows = [value for one in reports for name, value in one.user_properties if name == ROW]
    if not rows:
        return
    text = table_of(rows)
    path = config.getoption("--agents-table", default=None)
    if path is None:
        terminalreporter.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
