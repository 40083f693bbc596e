"""A server over two nodes, both on this machine: started, updated, lost and restarted as one.

The second node has no HTTP server of its own. vLLM 0.32 does not notice when it is lost.
"""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from publishing import train
from waiting import until

from primerl import models, serving, weights

pytestmark = pytest.mark.slow  # seven processes
LOST_S = 60.0  # vLLM's processes take some seconds to end


def lose(node, other):
    """Kill a node, and wait until the other one has ended because of that."""
    os.kill(node.pid, signal.SIGKILL)
    until(lambda: not node.alive and not other.alive, within_s=LOST_S)
    assert other.wait() == 1


def test_a_server_over_two_nodes(dense, two_nodes, tmp_path):
    first, second = two_nodes
    model, _ = models.load_pretrained(dense)
    with contextlib.closing(serving.VLLMEngine(first)) as engine:
        transport = weights.Disk(model, engine, folder=tmp_path / "w", encoding="delta")
        for version, kind in ((1, "full"), (2, "delta")):
            train(model, scale=0.05, fraction=0.01, seed=version)
            receipt = transport.publish(version)
            assert receipt.kind == kind
        weights.Canary(model, engine).check(2)

        for lost, other in ((second, first), (first, second)):
            lose(lost, other)
            until(lambda: not engine.servers()[0]["alive"])
            with ThreadPoolExecutor() as threads:
                list(threads.map(lambda node: node.restart(), two_nodes))
            until(lambda: engine.servers()[0]["serving"], within_s=300)
            (row,) = engine.servers()
            assert (row["version"], row["ranks"]) == (2, 2)
            weights.Canary(model, engine).check(2)
