"""Check issues before a run spends time on them.

    python -m swe_folder check FOLDER

For each issue of FOLDER's *.jsonl files, the tests must pass with the reference patch, must fail
without it, and must fail for a set of cheats. Bad issues are named with the reason.
"""

import argparse
import asyncio
import importlib.util
import os
import sys
from pathlib import Path

from primerl.sandbox import SandboxUnavailable
from swe_folder import checking
from swe_folder.checking import Finding

_ROW = "{:<36} {:>10} {:>12} {:>10} {:>8}  {}"
_BAD = 1
_UNUSABLE = 2
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 if all issues are good, 1 if some are bad, 2 on a wrong usage."""
    chosen = _parser().parse_args(arguments)
    try:
        return asyncio.run(_check(chosen))
    except (ValueError, OSError, SandboxUnavailable) as error:
        print(f"swe_folder: {error}", file=sys.stderr)
        return _UNUSABLE
    except KeyboardInterrupt:
        return _INTERRUPTED


async def _check(chosen: argparse.Namespace) -> int:
    options = checking.Options(
        grading=chosen.grading,
        packages=_packages(chosen.packages),
        timeout_s=chosen.timeout,
        memory_bytes=chosen.memory_mib << 20,
        concurrency=chosen.concurrency,
        with_cheats=not chosen.no_cheats,
    )
    files = [file for place in chosen.place for file in checking.files_with_issues(Path(place))]
    findings = []
    print(_ROW.format("issue", "reference", "empty patch", "cheats", "seconds", "").rstrip())
    async for finding in checking.check(files, options, progress=_progress):
        _clear_progress()
        findings.append(finding)
        print(_row(finding), flush=True)
        for reason in finding.reasons:
            print(f"  {reason}", flush=True)
    _clear_progress()
    if not findings:
        raise ValueError(f"there are no issues in {', '.join(map(str, files))}")
    good = sum(finding.good for finding in findings)
    bad = sum(bool(finding.reasons) for finding in findings)
    unchecked = len(findings) - good - bad
    left = f", {unchecked} not checked: their repositories are in images" if unchecked else ""
    print(f"{good} of {len(findings)} issues are good, {bad} bad{left}")
    if chosen.write:
        target = Path(chosen.write)
        target.write_text(checking.good_lines(findings, target), encoding="utf-8")
        print(f"wrote the good issues to {target}")
    return _BAD if bad else 0


def _row(finding: Finding) -> str:
    words = {None: "-", True: "passes", False: "fails"}
    result = "BAD" if finding.reasons else "good" if finding.checked else "not checked"
    found = finding.cheats
    passing = sum(found.values()) if found else 0
    told = "-" if found is None else f"{passing} pass" if passing else f"{len(found)} fail"
    seconds = "-" if finding.seconds is None else f"{finding.seconds:.1f}"
    name = finding.name if len(finding.name) <= 36 else f"{finding.name[:35]}…"
    reference, empty = words[finding.reference], words[finding.empty]
    return _ROW.format(name, reference, empty, told, seconds, result)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:78]}", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _packages(given: list[str]) -> tuple[str, ...]:
    """Return the folders with pytest: by default, the one of this Python.

    Raises:
        ValueError: there is no pytest, or a folder does not exist.
    """
    if not given:
        found = importlib.util.find_spec("pytest")
        if found is None or found.origin is None:
            raise ValueError("this Python has no pytest: name a folder that has with --packages")
        given = [str(Path(found.origin).parents[1])]
    for folder in given:
        if not Path(folder).is_dir():
            raise ValueError(f"--packages {folder}: there is no such folder")
    return tuple(os.path.abspath(folder) for folder in given)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _parser() -> argparse.ArgumentParser:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m swe_folder", description=__doc__, formatter_class=about
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check", help="check issues", description=__doc__, formatter_class=about
    )
    check.add_argument(
        "place",
        nargs="+",
        metavar="FOLDER",
        help="a folder with *.jsonl files of issues, or a file",
    )
    check.add_argument(
        "--packages",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder with pytest and the tests' dependencies (default: this Python's packages)",
    )
    check.add_argument(
        "--grading",
        choices=["isolated", "command"],
        default="isolated",
        help="as in the environment's configuration (default: isolated)",
    )
    check.add_argument(
        "--timeout", type=_positive, default=300, metavar="SECONDS", help="per grading (300)"
    )
    check.add_argument(
        "--memory-mib", type=_positive, default=1024, metavar="MIB", help="per sandbox (1024)"
    )
    check.add_argument(
        "--concurrency",
        type=_positive,
        default=max(1, (os.cpu_count() or 1) // 2),
        metavar="N",
        help="issues checked at once (default: half the processors)",
    )
    check.add_argument("--no-cheats", action="store_true", help="check the patches only")
    check.add_argument("--write", metavar="FILE", help="write the good issues to a new file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
