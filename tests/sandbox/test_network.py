# ruff: noqa: E501 - programs for sandboxes
"""The way out through the proxy: to listed servers, and to nothing else."""

import asyncio
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from sandboxed import needed, with_pool

from primerl.sandbox import SandboxLimits
from primerl.sandbox.tiers.local.proxy import Proxy, _target

needed()

CLIENT = """
import socket, sys
def ask(text):
    with socket.create_connection(("127.0.0.1", 3128), timeout=30) as connection:
        connection.sendall(text)
        said = b""
        while chunk := connection.recv(65536): said += chunk
        return said
"""


async def with_servers(test):
    """Run ``test`` with the ports of an allowed server and of another one."""

    async def answer(request):
        return web.Response(text=f"{request.method} {request.path_qs} {request.host}")

    runners = []
    ports = []
    for _ in range(2):
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        ports.append(runner.addresses[0][1])
    try:
        return await test(*ports)
    finally:
        for runner in runners:
            await runner.cleanup()


def run_with_servers(code):
    from primerl.sandbox import SandboxPool

    async def test(allowed, other):
        text = CLIENT + code.replace("@ALLOWED@", str(allowed)).replace("@OTHER@", str(other))
        async with SandboxPool(concurrency=1, allow_network=[f"127.0.0.1:{allowed}"]) as pool:
            assert f"127.0.0.1:{allowed}" in str(pool.isolation)
            return await pool.run(text, timeout_s=60), allowed

    return asyncio.run(with_servers(test))


def test_listed_server_is_reached():
    result, port = run_with_servers(
        "import urllib.request\n"
        "print(urllib.request.urlopen('http://127.0.0.1:@ALLOWED@/a?b=c', timeout=30).read().decode())\n"
        "with socket.create_connection(('127.0.0.1', 3128), timeout=30) as c:\n"
        "    c.sendall(b'CONNECT 127.0.0.1:@ALLOWED@ HTTP/1.1\\r\\n\\r\\n')\n"
        "    assert b' 200 ' in c.recv(1000)\n"
        "    c.sendall(b'GET /tunnel HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n')\n"
        "    said = b''\n"
        "    while chunk := c.recv(65536): said += chunk\n"
        "    print(said.decode())\n"
    )
    assert f"GET /a?b=c 127.0.0.1:{port}" in result.stdout.decode(), result
    assert "GET /tunnel" in result.stdout.decode()


def test_nothing_else_is_reached():
    requests = [
        "CONNECT 127.0.0.1:@OTHER@ HTTP/1.1\r\n\r\n",
        "GET http://127.0.0.1:@OTHER@/ HTTP/1.1\r\nHost: 127.0.0.1:@ALLOWED@\r\n\r\n",
        "GET http://localhost:@ALLOWED@/ HTTP/1.1\r\n\r\n",
        "GET http://user@127.0.0.1:@ALLOWED@/ HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: 127.0.0.1:@ALLOWED@\r\n\r\n",
        "GET file:///etc/passwd HTTP/1.1\r\n\r\n",
        "CONNECT 127.0.0.1:@ALLOWED@@evil:80 HTTP/1.1\r\n\r\n",
        "CONNECT [::1]:@OTHER@ HTTP/1.1\r\n\r\n",
        "garbage\r\n\r\n",
    ]
    code = f"""
for request in {requests!r}:
    print(ask(request.encode()).split(b"\\r\\n")[0].decode())
try: print(ask(b"GET http://127.0.0.1:@ALLOWED@/ HTTP/1.1\\r\\nA: " + b"x" * 100000)[:13].decode())
except OSError: print("HTTP/1.1 431")
for address in (("127.0.0.1", @ALLOWED@), ("127.0.0.1", @OTHER@), ("192.0.2.1", 80)):
    try: socket.create_connection(address, timeout=2); print("CONNECTED")
    except OSError: print("refused")
"""
    result, _ = run_with_servers(code)
    lines = result.stdout.decode().splitlines()
    assert result.ok, result
    assert {line.split()[1] for line in lines[:9]} <= {"403", "400"}, lines
    assert " 431 " in lines[9] + " "
    assert lines[10:] == ["refused"] * 3


def test_host_header_is_the_allowed_server():
    result, port = run_with_servers(
        "print(ask(b'GET http://127.0.0.1:@ALLOWED@/x HTTP/1.1\\r\\nHost: other.example\\r\\n\\r\\n'))"
    )
    assert f"GET /x 127.0.0.1:{port}".encode() in result.stdout


@pytest.mark.parametrize(
    "target", ["http://[::1", "http://h:99999/", "ftp://h/", "//h/", "http://"]
)
def test_odd_targets_name_no_server(target):
    assert _target(b"GET", target)[0] == ""


def test_allowed_servers_are_checked():
    for server in ("host", "host:0", "host:99999", "http://host:80", "*:80", "a b:80"):
        with pytest.raises(ValueError, match="host:port"):
            Proxy([server])


def package_index():
    """The address of the package index that pip uses here, and the servers that it needs."""
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        encoding="utf-8",
    ).stdout.strip()
    code = "from pip._internal.models.index import PyPI as p; print(p.simple_url, p.file_storage_domain)"
    default = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    index, storage = default.stdout.split()
    address = urlsplit(configured or index)
    port = address.port or (443 if address.scheme == "https" else 80)
    servers = [f"{address.hostname}:{port}"]
    return address.geturl(), servers if configured else [*servers, f"{storage}:443"]


@pytest.mark.slow
def test_pip_installs_through_the_proxy():
    """Downloads a small package, which nothing else here needs."""
    index, servers = package_index()
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")

    async def run(pool):
        async with pool.session() as session:
            python = pool._python
            install = [python, "-m", "pip", "install", "--target", "/sandbox/packages"]
            options = ["--index-url", index, "--no-deps", "--no-cache-dir"]
            if certificates.exists():
                options += ["--cert", str(certificates)]
            done = await session.run([*install, *options, "iniconfig"], timeout_s=300)
            used = await session.run(
                "import sys; sys.path.insert(0, '/sandbox/packages'); import iniconfig; print(1)"
            )
            other = await session.run(
                [python, "-c", "import urllib.request as u; u.urlopen('https://example.org')"]
            )
            return done, used, other

    limits = SandboxLimits(memory_bytes=1 << 30)
    done, used, other = with_pool(run, concurrency=1, allow_network=servers, limits=limits)
    assert done.ok, done
    assert used.stdout == b"1\n", used
    assert b"403" in other.stderr
