"""What there is on the host for sandboxes to attack."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile

import pytest


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What there is to be had on the host, by the marks in the attacks."""
    folder = tmp_path_factory.mktemp("host")
    secret = folder / "secret"
    secret.write_text("primerl-secret")
    address = "127.0.0.2"
    tcp = socket.create_server(("0.0.0.0", 0))
    short = tempfile.TemporaryDirectory(dir="/tmp")  # a socket's path has at most 107 bytes
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(f"{short.name}/socket")
    unix.listen()
    name = f"primerl-{secrets.token_hex(8)}"
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{name}")
    abstract.listen()
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    os.environ["PRIMERL_TEST_SECRET"] = "primerl-secret"
    yield {
        "@SECRET@": str(secret),
        "@PID@": str(victim.pid),
        "@PORT@": str(tcp.getsockname()[1]),
        "@ADDRESS@": address,
        "@SOCKET@": f"{short.name}/socket",
        "@ABSTRACT@": name,
        "@MARK@": f"mark-{secrets.token_hex(8)}",
    }
    del os.environ["PRIMERL_TEST_SECRET"]
    victim.kill()
    victim.wait()
    for listener in (tcp, unix, abstract):
        listener.close()
    short.cleanup()
