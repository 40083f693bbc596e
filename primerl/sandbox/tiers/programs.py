"""Finding the programs that some tiers are made of."""

import asyncio
import shutil
import subprocess

from primerl.sandbox.errors import Probe

_ANSWER_S = 30.0


def find(name: str) -> str | None:
    """The absolute path of an installed program."""
    return shutil.which(name)


async def answers(name: str, *arguments: str) -> Probe:
    """Whether a program is installed and does something."""
    path = find(name)
    title = " ".join([name, *arguments])
    if path is None:
        return Probe(name=title, message=f"{name} is not installed (not on the PATH)")
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(name=title, message=str(error))
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        return Probe(name=title, message=f"exit code {done.returncode}: {said[-300:]}")
    return Probe(name=title)
