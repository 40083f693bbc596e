"""Run by torchrun in test_parallel.py: rank 1 fails; the errors of the others, and when."""

import json
import sys
import time
from pathlib import Path

import attrs

from primerl import parallel


@attrs.frozen
class Nothing:
    number: int = 0


def wait(world):
    if world.rank == 0:
        time.sleep(120)  # as for rollouts
    elif world.rank == 1:
        raise ValueError("the loss is NaN")
    else:
        parallel.scatter(None, Nothing)


def main(folder):
    began, world = time.monotonic(), parallel.process_group(timeout_s=120)
    try:
        with world:
            world.should_stop()  # SIGTERM waits from now on, but not for this
            began = time.monotonic()
            wait(world)
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
        found["seconds"] = time.monotonic() - began
        (folder / f"failed-{world.rank}.json").write_text(json.dumps(found))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
