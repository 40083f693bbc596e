"""Run by test_killed_broadcasters.py: a rank is killed while it broadcasts, and a run after it.

The servers are in the test's process, and outlive the ranks. The arguments are the run's name, its
folder, its versions, and the rank that is killed in the middle of the last one, -1 for none.
"""

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

from killed_publishers import follow
from publishing import StoreMeeting

from primerl import parallel, testing, weights

TIMEOUT_S = 5.0


class ServersElsewhere:
    """A ``BroadcastServers`` whose servers are in another process."""

    def __init__(self, address):
        self.address = str(address)

    def _ask(self, question, send=None):
        with Client(self.address) as connection:
            connection.send(question)
            if send is not None:
                send()
            answer, error = connection.recv()
        if error:
            raise RuntimeError(error)
        return answer

    def workers(self):
        return self._ask(None)

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        return self._ask(update, send)


class Broadcasting:
    """A communicator that kills its process when it has broadcast as many tensors as are left."""

    left = 10**9

    def __init__(self, communicator):
        self.communicator = communicator

    def broadcast(self, tensor, src):
        if not Broadcasting.left:
            os.kill(os.getpid(), signal.SIGKILL)
        Broadcasting.left -= 1
        self.communicator.broadcast(tensor, src)

    def destroy(self):
        self.communicator.destroy()


def publish(world, folder, versions, killed):
    """Publish versions; the rank ``killed`` is killed in the middle of the last one."""
    store = StoreMeeting(folder)
    model = parallel.shard(testing.tiny_model("llama", num_hidden_layers=6))
    transport = weights.NCCL(
        model,
        *([ServersElsewhere(folder / "servers")] if world.is_first else []),
        connect=lambda place, device: Broadcasting(store.connect(place, device)),
        unique_id=store.unique_id,
        timeout_s=TIMEOUT_S,
    )
    for version in versions:
        follow(model, version)
        if world.rank == killed and version == versions[-1]:
            Broadcasting.left = 3
        transport.publish(version)


def main(name, folder, versions, killed):
    found = {"ended": None}
    began = time.monotonic()
    try:
        with parallel.process_group(timeout_s=60.0) as world:
            publish(world, folder, versions, killed)
    except (RuntimeError, OSError) as error:
        found["ended"] = str(error)
    found["seconds"] = time.monotonic() - began
    (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))
