"""Run the README's commands in awkward environments, and print a table of the outcomes.

    python tools/anywhere.py [SITUATION ...] [--command "make test"] [--report PATH]

Each situation is a fresh clone of this repository with its own folder, shell and environment;
``--list`` names the situations. The script needs root, to switch to an ordinary user and to replace
``/dev/shm``. Each clone installs everything, so one situation takes about twenty minutes.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
USER = 20_000  # a user and group id without an account
IGNORED = "trap '' INT HUP QUIT"
NO_NAMESPACES = (
    "unshare --user --map-root-user sh -c 'echo 0 > /proc/sys/user/max_user_namespaces; "
    'exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin "$@"\' sh'
)
SMALL_SHARED_MEMORY = (
    "unshare --mount sh -c 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec \"$@\"' sh"
)
AS_USER = f"setpriv --reuid={USER} --regid={USER} --clear-groups"


@attrs.frozen(kw_only=True)
class Situation:
    """The conditions under which a command is started."""

    about: str
    folder: str = "/var/tmp/primerl-anywhere"
    shell: str = ""
    """Shell commands to run before the command."""
    wrapper: str = ""
    """Program that starts the command."""
    ordinary: bool = False
    """Whether the clone belongs to an ordinary user."""


SITUATIONS = {
    "plain": Situation(about="root, below /var/tmp"),
    "tmp": Situation(about="below /tmp", folder="/tmp/primerl-anywhere"),
    "shm": Situation(about="below /dev/shm", folder="/dev/shm/primerl-anywhere"),
    "home": Situation(about="below /home", folder="/home/primerl-anywhere"),
    "spaces": Situation(
        about="a path with spaces and non-ASCII letters",
        folder="/var/tmp/primerl anywhere/größer als é",
    ),
    "background": Situation(about="SIGINT, SIGHUP and SIGQUIT ignored", shell=IGNORED),
    "user": Situation(about="an ordinary user", wrapper=AS_USER, ordinary=True),
    "umask": Situation(about="umask 077", shell="umask 077"),
    "homeless": Situation(about="HOME not set", shell="unset HOME"),
    "read-only-home": Situation(about="HOME can't be written", shell="export HOME=/proc"),
    "ascii": Situation(about="LANG=C, LC_ALL=C", shell="export LANG=C LC_ALL=C"),
    "far": Situation(about="TZ far from UTC", shell="export TZ=Pacific/Kiritimati"),
    "narrow": Situation(about="a terminal of 40 columns", shell="export COLUMNS=40"),
    "small-shm": Situation(about="64 MB of /dev/shm", wrapper=SMALL_SHARED_MEMORY),
    "few-files": Situation(about="ulimit -n 1024", shell="ulimit -n 1024"),
    "no-namespaces": Situation(about="no user namespaces", wrapper=NO_NAMESPACES),
    # Combined conditions: if a combination passes, each of its conditions does. If it fails, test
    # the conditions one by one.
    "all-root": Situation(
        about="below /tmp, signals ignored, umask 077, no HOME, LC_ALL=C, TZ, ulimit, small shm",
        folder="/tmp/primerl-anywhere",
        shell=f"{IGNORED}; umask 077; unset HOME; ulimit -n 1024; "
        "export LANG=C LC_ALL=C TZ=Pacific/Kiritimati",
        wrapper=SMALL_SHARED_MEMORY,
    ),
    "all-user": Situation(
        about="an ordinary user, below /dev/shm, spaces and non-ASCII letters, HOME not writable",
        folder="/dev/shm/primerl anywhere/größer als é",
        shell="export HOME=/proc COLUMNS=40",
        wrapper=AS_USER,
        ordinary=True,
    ),
}


@attrs.frozen(kw_only=True)
class Outcome:
    """Outcome of one command in one situation."""

    name: str
    command: str
    passed: bool
    seconds: float
    said: str


@contextlib.contextmanager
def cloned(situation: Situation) -> Iterator[Path]:
    """Open a clone in the situation's folder, and remove the folder at the end."""
    folder = Path(situation.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    clone = folder / "primerl"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    if situation.ordinary:
        subprocess.run(["chown", "-R", f"{USER}:{USER}", folder], check=True)
    try:
        yield clone
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(name: str, command: str, clone: Path, logs: Path) -> Outcome:
    """Run the command in the clone, and write its output to ``logs``."""
    situation = SITUATIONS[name]
    words = f"{situation.wrapper} {command}".strip()
    script = f"cd {shlex.quote(str(clone))}; {situation.shell or ':'}; {words}"
    log = logs / f"{name}-{re.sub('[^a-z]+', '-', command)}.log"
    began = time.monotonic()
    with log.open("w") as output:
        # No terminal, as in a CI runner.
        done = subprocess.run(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            check=False,
        )
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    return Outcome(
        name=name,
        command=command,
        passed=done.returncode == 0,
        seconds=time.monotonic() - began,
        said=next(
            (line for line in reversed(lines) if " passed" in line or "->" in line), lines[-1]
        ),
    )


def table(outcomes: list[Outcome]) -> str:
    """Format the outcomes as a Markdown table."""
    rows = ["| situation | command | outcome | minutes |", "|---|---|---|---|"]
    for one in outcomes:
        about = SITUATIONS[one.name].about
        outcome = one.said.strip("= ") if one.passed else f"**failed**: {one.said.strip('= ')}"
        rows.append(f"| {about} | `{one.command}` | {outcome} | {one.seconds / 60:.1f} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Run the situations of the command line; return 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("situations", nargs="*", metavar="SITUATION", help="all by default")
    parser.add_argument("--list", action="store_true", help="list the situations and stop")
    parser.add_argument(
        "--command",
        action="append",
        help="command to run; may be repeated (default: make demo, make test and make test-vllm)",
    )
    parser.add_argument("--report", type=Path, help="file to write the table to")
    parser.add_argument("--logs", type=Path, default=Path("runs/anywhere"), help="for log files")
    args = parser.parse_args()
    if args.list:
        for name, situation in SITUATIONS.items():
            print(f"{name:16} {situation.about}")
        return 0
    unknown = set(args.situations) - SITUATIONS.keys()
    if unknown:
        parser.error(f"unknown situations: {', '.join(sorted(unknown))}; --list names them")
    if os.geteuid() != 0:
        parser.error("expected root, which can become an ordinary user")
    args.logs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for name in args.situations or SITUATIONS:
        with cloned(SITUATIONS[name]) as clone:
            for command in args.command or ["make demo", "make test", "make test-vllm"]:
                sys.stderr.write(f"{name}: {command}\n")
                outcomes.append(run(name, command, clone, args.logs))
                if args.report is not None:
                    args.report.write_text(table(outcomes), encoding="utf-8")
    sys.stdout.write(table(outcomes))
    return 0 if all(one.passed for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
