"""Run in a new user and network namespace by test_network.py: a trainer and a server on two hosts.

The server's process has a network namespace of its own, and reaches the trainer by one link only.
"""

import json
import subprocess
import sys
from pathlib import Path

from publishing import Replica, same_bits, train

from primerl import models, testing, weights
from primerl.weights.transports.publications.manifests import read_manifest

TRAINER, SERVER = "10.77.0.1", "10.77.0.2"


def ip(command):
    subprocess.run(["ip", *command.split()], check=True, timeout=60)


def serve():
    """Fetch and load each publication that is named, until the input ends."""
    print("started", flush=True)
    sys.stdin.readline()  # the link is there
    ip(f"address add {SERVER}/24 dev server")
    ip("link set server up")
    replica = Replica(lambda name: "layers.0" in name or "layers" not in name)
    for line in sys.stdin:
        update = json.loads(line)
        replica.prepare(update)
        replica.load(update)
        print(json.dumps(replica.receipt), flush=True)
    replica.close()


class OtherHost:
    """A ``weights.Fetcher`` over a worker in another network, and one in this one."""

    def __init__(self):
        self.near = Replica(lambda name: "layers.1" in name)
        command = ["unshare", "--net", sys.executable, __file__, "serve"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "started\n"
        ip("link set lo up")
        ip("link add trainer type veth peer name server")
        ip(f"link set server netns {self.process.pid}")
        ip(f"address add {TRAINER}/24 dev trainer")
        ip("link set trainer up")
        self._say("\n")

    def _say(self, line):
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        self._say(json.dumps(update) + "\n")
        receipt = json.loads(self.process.stdout.readline())
        self.near.prepare(update)
        self.near.load(update)
        return {f"http://{SERVER}": [receipt, self.near.receipt]}

    def close(self):
        self.near.close()
        self.process.stdin.close()
        self.process.wait(60)


def main(folder):
    model, servers = testing.tiny_model("llama"), OtherHost()
    settings = {"folder": folder / "weights", "towards": SERVER, "encoding": "delta"}
    with weights.Network(model, servers, **settings) as transport:
        receipts = []
        for version in (1, 2):
            train(model, seed=version)
            receipts.append(transport.publish(version))
        found = {
            "kinds": [one.kind for one in receipts],
            "host": read_manifest(folder / "weights", 2).source.host,
        }
    expected = dict(models.checkpoint_tensors(model))
    near = {name: one for name, one in servers.near.tensors.items() if "layers.1" in name}
    found["near"] = same_bits(near, {name: expected[name] for name in near}) and bool(near)
    servers.close()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else main(Path(sys.argv[1]))
