# ruff: noqa: E501 - programs for sandboxes
"""The tier of hosted sandboxes, against a stand-in for the service that runs its commands here.

The real service has never been called: it needs an account.
"""

import asyncio
import inspect
import subprocess
from types import SimpleNamespace

import pytest

from primerl.sandbox import (
    SandboxError,
    SandboxLimits,
    SandboxNotStarted,
    SandboxPool,
    SandboxUnavailable,
)
from primerl.sandbox.tiers import prime

sdk = pytest.importorskip("prime_sandboxes")


class Service:
    """As much of ``AsyncSandboxClient`` as the tier uses; ``/tmp`` and ``/sandbox`` are folders."""

    def __init__(self, folder):
        self.folder = folder
        self.requests = []
        self.deleted = []
        self.failure = None

    def local(self, text):
        for name in ("tmp", "sandbox"):
            text = text.replace(f"/{name}", f"{self.folder}/{name}")
        return text

    async def create(self, request):
        self.requests.append(request)
        (self.folder / "tmp").mkdir(exist_ok=True)
        return SimpleNamespace(id=f"sandbox-{len(self.requests)}")

    async def wait_for_creation(self, sandbox_id):
        assert sandbox_id not in self.deleted

    async def upload_bytes(self, sandbox_id, file_path, file_bytes, filename):
        with open(self.local(file_path), "wb") as file:
            file.write(file_bytes)

    async def execute_command(self, sandbox_id, command, timeout=None):
        if self.failure is not None:
            raise self.failure
        # The guest's own home is /sandbox, which this host lacks.
        home = f"import os; os.environ; {prime._GUEST}"
        local = self.local(command.replace(prime._GUEST, home)).replace(
            "single_job.main()",
            f"from primerl.sandbox.guest.jobs import interpreter as i; i.ENVIRONMENT['HOME'] = {str(self.folder / 'sandbox')!r}; single_job.main()".replace(
                "'", "'\"'\"'"
            ),
        )
        done = subprocess.run(
            ["sh", "-c", local], capture_output=True, encoding="utf-8", timeout=timeout
        )
        return sdk.CommandResponse(
            stdout=done.stdout, stderr=done.stderr, exit_code=done.returncode
        )

    async def delete(self, sandbox_id):
        self.deleted.append(sandbox_id)

    async def aclose(self):
        self.closed = True


@pytest.fixture
def service(tmp_path, monkeypatch):
    made = Service(tmp_path)
    monkeypatch.setenv("PRIME_API_KEY", "a-key")
    monkeypatch.setattr(sdk, "AsyncSandboxClient", lambda: made)
    return made


def use(work, **arguments):
    async def run():
        async with SandboxPool(tier="prime", warm=0, **arguments) as pool:
            return await work(pool)

    return asyncio.run(run())


def test_stand_in_has_the_real_methods():
    for name, method in inspect.getmembers(Service, inspect.iscoroutinefunction):
        real = inspect.signature(getattr(sdk.AsyncSandboxClient, name)).parameters
        assert set(inspect.signature(method).parameters) <= set(real), name


def test_run(service):
    async def work(pool):
        code = "import sys; print(sys.stdin.read(), open('a').read()); sys.exit(3)"
        return await pool.run(code, stdin=b"in", files={"a": b"file"}, timeout_s=60)

    result = use(work, allow_network=["pypi.org:443"], limits=SandboxLimits(memory_bytes=2 << 30))
    assert (result.stdout, result.exit, result.limits_hit) == (b"in file\n", 3, ())
    request = service.requests[0]
    assert request.network_allowlist == ["pypi.org:443"]
    assert request.memory_gb == 2.0
    assert request.docker_image == "python:3.11-slim"
    assert service.deleted == ["sandbox-1"]


def test_session(service):
    async def work(pool):
        async with pool.session(lifetime_s=600) as session:
            await session.write("d/x", bytes(range(256)))
            content = await session.read("d/x")
            with pytest.raises(SandboxError, match="keeps its state"):
                await session.python("1")
        return content

    assert use(work) == bytes(range(256))
    assert service.requests[0].timeout_minutes == 10
    assert service.requests[0].network_allowlist == []


def test_too_much_output(service):
    result = use(lambda pool: pool.run("print('x' * 5000)", output_bytes=100, timeout_s=60))
    assert result.limits_hit == ("output",)
    assert result.stdout == b"x" * 100


@pytest.mark.parametrize(
    ("failure", "limit"),
    [
        (sdk.CommandTimeoutError("s", "c", 1), "timeout"),
        (sdk.SandboxOOMError("s"), "memory"),
        (sdk.SandboxNotRunningError("s"), "died"),
    ],
)
def test_ends(service, failure, limit):
    service.failure = failure
    assert use(lambda pool: pool.run("pass")).limits_hit == (limit,)
    assert service.deleted == ["sandbox-1"]


def test_what_the_service_says_is_not_trusted():
    assert prime._result("no base64!\n", 0, 10, 0.0).limits_hit == ("protocol",)
    with pytest.raises(SandboxNotStarted, match="did not start"):
        prime._result("\n\n", 0, 10, 0.0)
    with pytest.raises(SandboxNotStarted, match="did not start"):
        prime._result("Bg==\n\n", 254, 10, 0.0)


def test_no_key(monkeypatch, tmp_path):
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="API key: none"):
        use(lambda pool: pool.run("pass"))
