"""``python -m primerl.track RUN_DIR [RUN_DIR ...]`` writes the report of runs."""

import sys
from pathlib import Path

from primerl._common.optional import require
from primerl.track.report import write_report


def main(
    runs: tuple[Path, ...], /, *, output: Path | None = None, max_rollouts: int = 10_000
) -> int:
    """Write one HTML file with the curves and rollouts of a run, or of several to compare.

    The runs may be finished, running or killed. The file needs no server and no network.

    Args:
        runs: the folders of the runs.
        output: the file to write; by default report.html in the first run's folder.
        max_rollouts: the most rollouts per run; of more, whole groups are left out evenly.
    """
    try:
        path = write_report(runs, output, max_rollouts=max_rollouts)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(require("tyro", extra="recipes").cli(main, prog="python -m primerl.track"))
