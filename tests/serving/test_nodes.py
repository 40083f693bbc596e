"""The links between the nodes of one server, with a stand-in for vLLM's application."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from waiting import until

from primerl.serving.server.readiness import free_port

pytest.importorskip("uvicorn")
pytest.importorskip("websockets")

HOST, KEY = "127.0.0.1", "the-key"
FIRST = """
import sys
from types import SimpleNamespace
import uvicorn
from primerl.serving.server.middleware import RequireKey
from primerl.serving.server.nodes import RequireNodes

parallel = SimpleNamespace(
    local_engines_only=False, data_parallel_size=5, data_parallel_size_local=2
)
app = SimpleNamespace(state=SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel)))

async def healthy(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

nodes = RequireNodes(healthy)

async def application(scope, receive, send):
    await nodes(scope | {"app": app}, receive, send)

uvicorn.run(RequireKey(application), port=int(sys.argv[1]), lifespan="off")
"""
FURTHER = """
import sys
from primerl.serving.server.nodes import hold_link
hold_link("127.0.0.1", int(sys.argv[1]), api_key=sys.argv[2], ranks=int(sys.argv[3]))
"""


@pytest.fixture
def start():
    """Starts a node's program; all are killed at the end."""
    started = []

    def start(program, *words):
        node = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, words)],
            env={**os.environ, "PRIMERL_API_KEY": KEY},
        )
        started.append(node)
        return node

    yield start
    for node in started:
        node.kill()
        node.wait()


def health(port):
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health") as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def test_a_server_is_healthy_with_all_of_its_nodes_and_ends_when_one_is_lost(start):
    port = free_port(HOST)
    early = start(FURTHER, port, KEY, 1)  # before the first node listens
    first = start(FIRST, port)
    until(lambda: health(port) is not None)
    start(FURTHER, port, "another-key", 2)
    assert health(port) == 503
    other = start(FURTHER, port, KEY, 2)
    until(lambda: health(port) == 200)
    assert early.poll() is first.poll() is None

    os.kill(early.pid, signal.SIGKILL)

    assert first.wait(timeout=30) == 1
    assert other.wait(timeout=30) == 0  # its link broke


def test_a_server_that_is_stopped_ends_at_once_and_so_do_its_nodes(start):
    port = free_port(HOST)
    first, node = start(FIRST, port), start(FURTHER, port, KEY, 3)
    until(lambda: health(port) == 200)

    first.terminate()

    assert first.wait(timeout=30) in (0, -signal.SIGTERM)
    assert node.wait(timeout=30) == 0
