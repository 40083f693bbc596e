"""The tier ``prime``: sandboxes hosted by Prime Intellect, through their ``prime-sandboxes`` SDK.

Each sandbox is a remote virtual machine. The guest program (``guest/single_job.py``) is uploaded
once per sandbox and executes the jobs there. A job is uploaded as a file, and its output comes back
in base64.
"""

import asyncio
import base64
import importlib.util
import math
import secrets
import shlex
import time
from collections.abc import Mapping
from typing import Any

from primerl._common.optional import install_command, require
from primerl.sandbox.errors import Probe, SandboxError, SandboxNotStarted
from primerl.sandbox.guest import messages
from primerl.sandbox.guest.isolation import shared_root
from primerl.sandbox.guest.single_job import NOT_STARTED, READY
from primerl.sandbox.results import Isolation, Result
from primerl.sandbox.tiers import guest_files
from primerl.sandbox.tiers.interface import Job, Options, Tier

_IMAGE = "python:3.11-slim"
_GUEST_FOLDER = "/tmp/.primerl-guest.zip"
_ORDER = "/tmp/.primerl-job"
_GUEST = guest_files.program(_GUEST_FOLDER, "single_job")
_GIB = 1 << 30
_ENDS_LATER_S = 10.0
_SINGLE_LIFETIME_S = 3600.0  # of a sandbox kept ready for a single run


class Prime(Tier):
    """The tier of hosted virtual machines; the SDK reads the API key (``PRIME_API_KEY``)."""

    name = "prime"
    lacks = frozenset({"roots", "turns", "connections"})

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._sdk: Any = None
        self._client: Any = None
        self._deleting: set[asyncio.Task[None]] = set()

    @property
    def alive(self) -> bool:
        """Whether the tier was started and not closed."""
        return self._client is not None

    async def start(self) -> None:
        """Check the requirements, and create the SDK's client."""
        await self.require_probes()
        self._sdk = require("prime_sandboxes", extra="prime")
        self._client = self._sdk.AsyncSandboxClient()

    async def make(self, settings: Mapping[str, Any]) -> "PrimeSandbox":
        """Create a hosted sandbox, and upload the guest code to it."""
        limits = self.options.limits
        lifetime_s = settings.get("lifetime_s", _SINGLE_LIFETIME_S)
        request = self._sdk.CreateSandboxRequest(
            name=f"primerl-{secrets.token_hex(8)}",
            docker_image=settings.get("image") or self.options.image or _IMAGE,
            memory_gb=max(1.0, limits.memory_bytes / _GIB),
            disk_size_gb=float(max(1, math.ceil(limits.disk_bytes / _GIB))),
            timeout_minutes=max(1, math.ceil(lifetime_s / 60)),
            network_allowlist=[*self.options.allow_network],  # an empty list refuses all
            labels=["primerl"],
        )
        try:
            made = await self._client.create(request)
        except (self._sdk.APIError, RuntimeError) as error:
            raise SandboxNotStarted(
                f"the tier 'prime' could not create a sandbox: {error}"
            ) from error
        sandbox = PrimeSandbox(self, made.id, ends_at=time.monotonic() + lifetime_s)
        try:
            async with asyncio.timeout(self.options.start_timeout_s):
                await self._client.wait_for_creation(made.id)
                await self._client.upload_bytes(
                    made.id, _GUEST_FOLDER, guest_files.guest_archive(), "guest.zip"
                )
        except (self._sdk.APIError, RuntimeError, TimeoutError) as error:
            sandbox.kill()
            raise SandboxNotStarted(
                f"the tier 'prime' could not start a sandbox: {error}"
            ) from error
        except BaseException:
            sandbox.kill()
            raise
        return sandbox

    async def fetch(self, image: str) -> None:
        """Do nothing: the service pulls images."""

    async def close(self) -> None:
        """Wait for pending deletions, and close the client."""
        await asyncio.gather(*self._deleting, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def probes(self) -> list[Probe]:
        """Check that the SDK is installed and an API key is set."""
        if importlib.util.find_spec("prime_sandboxes") is None:
            missing = f"not installed; {install_command('prime')}"
            return [Probe(name="prime-sandboxes", message=missing)]
        sdk = require("prime_sandboxes", extra="prime")
        key = Probe(name="API key")
        if not sdk.Config().api_key:
            key = Probe(name="API key", message="none: set PRIME_API_KEY or run `prime login`")
        return [Probe(name="prime-sandboxes"), key]

    def isolation(self) -> Isolation:
        """Describe the isolation by hosted virtual machines."""
        network = ", ".join(self.options.allow_network) or "none"
        return Isolation(
            tier=self.name,
            shared_kernel=False,
            memory="the memory of the virtual machine, at least 1 GiB",
            user="the image's user, in a remote virtual machine",
            layers=("virtual machine (hosted)",),
            stops=(
                "reading and writing this host's files, and reaching its processes and network",
                f"network access except to these servers, as the provider enforces it: {network}",
                "more output and time than allowed",
            ),
            does_not_stop=(
                "the provider's own access: code, files and results leave this machine",
                "more files and processes than allowed",
                "sandboxes outliving a crashed owner until their timeout, which costs money",
            ),
        )

    def delete(self, identifier: str) -> None:
        """Delete a sandbox in a background task."""
        task = asyncio.get_running_loop().create_task(self._delete(identifier))
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)

    async def _delete(self, identifier: str) -> None:
        await self._client.delete(identifier)

    async def carry_out(self, identifier: str, job: Job) -> Result:
        """Send a job to a sandbox and return its result.

        Raises:
            SandboxNotStarted: the hosted machine could not start the job.
            SandboxError: a request to the hosting service failed.
        """
        header = job.complete_header | {
            "rlimits": {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": self.options.limits.disk_bytes},
            "ends_in_s": job.timeout_s + _ENDS_LATER_S,
        }
        content = messages.packed(header, [*job.files.values()]) + job.stdin
        started = time.perf_counter()
        try:
            await self._client.upload_bytes(identifier, _ORDER, content, "job")
            response = await self._client.execute_command(
                identifier, _command(job.output_bytes), timeout=math.ceil(job.timeout_s)
            )
        except self._sdk.CommandTimeoutError:
            return _ended("timeout", started)
        except self._sdk.SandboxOOMError:
            return _ended("memory", started)
        except self._sdk.SandboxNotRunningError:
            return _ended("died", started)
        except (self._sdk.APIError, RuntimeError) as error:
            raise SandboxError(f"the tier 'prime' could not execute a job: {error}") from error
        return _result(response.stdout, response.exit_code, job.output_bytes, started)


class PrimeSandbox:
    """A hosted sandbox."""

    host = ""

    def __init__(self, tier: Prime, identifier: str, *, ends_at: float) -> None:
        self._tier = tier
        self._identifier = identifier
        self._ends_at = ends_at
        self._ended = False

    @property
    def alive(self) -> bool:
        """Whether the sandbox can take jobs: it was not killed, and is within its lifetime."""
        return not self._ended and time.monotonic() < self._ends_at

    async def execute(self, job: Job) -> Result:
        """Execute a job remotely; kill the sandbox if a limit ended the job."""
        result = await self._tier.carry_out(self._identifier, job)
        if result.exit is None and not job.keeps:
            self.kill()
        return result

    def kill(self) -> None:
        """Delete the hosted sandbox in the background."""
        if not self._ended:
            self._ended = True
            self._tier.delete(self._identifier)


def _command(output_bytes: int) -> str:
    """Return a shell command that executes the job and prints its stdout and stderr in base64."""
    guest = f"python3 -I -c {shlex.quote(_GUEST)} < {_ORDER} > {_ORDER}.out 2> {_ORDER}.err"
    sizes = {"out": output_bytes + len(READY) + 1, "err": output_bytes + 1}
    prints = [f"head -c {size} {_ORDER}.{name} | base64 -w 0; echo" for name, size in sizes.items()]
    home = shared_root.HOME
    return f"mkdir -p {home}; cd {home}; {guest}; code=$?; {'; '.join(prints)}; exit $code"


def _result(printed: str, code: int, output_bytes: int, started: float) -> Result:
    try:
        stdout, stderr = (base64.b64decode(line, validate=True) for line in printed.split("\n")[:2])
    except ValueError:
        return _ended("protocol", started)
    if not stdout.startswith(READY) or code == NOT_STARTED:
        raise SandboxNotStarted(f"the tier 'prime': the job did not start: {stderr!r:.500}")
    stdout = stdout[len(READY) :]
    overflowed = max(len(stdout), len(stderr)) > output_bytes
    return Result(
        stdout=stdout[:output_bytes],
        stderr=stderr[:output_bytes],
        exit=None if overflowed else code,
        limits_hit=("output",) if overflowed else (),
        wall_s=time.perf_counter() - started,
    )


def _ended(limit: str, started: float) -> Result:
    wall_s = time.perf_counter() - started
    return Result(stdout=b"", stderr=b"", exit=None, limits_hit=(limit,), wall_s=wall_s)
