"""A Ray cluster whose nodes are processes of this machine, in a program of its own.

    python fake_ray.py

The program answers each line of its input, a command in JSON, by a line, and ends with its input.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# A process keeps the first token that it used, so that all clusters of one have the same.
TOKEN = secrets.token_hex(32)


@contextlib.contextmanager
def two_nodes():
    """A cluster with nodes "1" and "2", whose variables this process has meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # names of sockets are short
    fake = FakeRay(folder)
    before = {name: os.environ.get(name) for name in fake.variables}
    os.environ.update(fake.variables)
    try:
        fake.add("1")
        fake.add("2")
        yield fake
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        fake.close()
        shutil.rmtree(folder)


class FakeRay:
    """A cluster with a head that plays nothing, and the named nodes that were added."""

    def __init__(self, folder):
        # Ray would otherwise write a token into the home folder.
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        silent = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(folder)}
        # A node that is killed while it starts a process may leave its empty folder.
        silent["TMPDIR"] = str(folder)
        self._program = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **self.variables, **silent},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        try:
            self.address = self._ask("address")
        except BaseException:
            with self._program:
                self._program.kill()
            raise

    def add(self, name, *, resource="environments", **variables):
        """Add a node with two of a resource. Its processes have NODE=name."""
        self._ask("add", name, {resource: 2}, variables | {"NODE": name})

    def kill(self, name):
        """Kill the raylet of a node with SIGKILL."""
        self._ask("kill", name)

    def drain(self, name, *, seconds=None):
        """Ask a node to leave when its work has ended, or after some seconds."""
        self._ask("drain", name, seconds)

    def name_of(self, node_id):
        """Return the name of the node with Ray's id."""
        return self._ask("name_of", node_id)

    def left(self, name):
        """Return whether the raylet of a node has ended."""
        return self._ask("left", name)

    def remove(self, name):
        """Remove a node, or what a killed raylet has left of it."""
        self._ask("remove", name)

    def close(self):
        with self._program:
            self._program.stdin.close()
        assert self._program.returncode == 0

    def _ask(self, *command):
        self._program.stdin.write(json.dumps(command) + "\n")
        self._program.stdin.flush()
        for line in self._program.stdout:  # Ray prints there, too
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError("the program of the fake cluster has ended")


def serve():
    import ray
    from ray.cluster_utils import Cluster
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    head = {
        "num_cpus": 0,
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
        "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 6},
    }
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=True)
    nodes = {}

    def add(name, resources, variables):
        nodes[name] = cluster.add_node(
            num_cpus=1,
            resources=resources,
            object_store_memory=80 << 20,
            env_vars=variables,
        )

    def kill(name):
        raylet = nodes[name].all_processes["raylet"][0].process
        raylet.kill()
        raylet.wait()  # as long as it is a zombie, the node's workers don't see that it is dead

    def drain(name, seconds):
        client = ray._raylet.GcsClient(address=cluster.address)
        deadline = 0 if seconds is None else int((time.time() + seconds) * 1000)
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, why = client.drain_node(nodes[name].node_id, reason, "a test", deadline)
        assert accepted, why

    def name_of(node_id):
        return next(name for name, node in nodes.items() if node.node_id == node_id)

    def left(name):
        return nodes[name].all_processes["raylet"][0].process.poll() is not None

    def remove(name):
        cluster.remove_node(nodes.pop(name), allow_graceful=False)

    commands = {"address": lambda: cluster.address, "add": add, "kill": kill, "remove": remove}
    commands |= {"drain": drain, "left": left, "name_of": name_of}
    try:
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print("answer", json.dumps(commands[name](*arguments)), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    with contextlib.redirect_stderr(open(os.devnull, "w", encoding="utf-8")):
        serve()
