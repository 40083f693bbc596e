"""A tier of hosted sandboxes: Prime Intellect's, by their SDK ``prime-sandboxes``.

Each sandbox is a virtual machine elsewhere. Our guest (``engine/guest.py``) carries out orders
there, too: it is uploaded once, an order goes as a file, and what came out comes back in base64.
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
from primerl.sandbox.engine import messages
from primerl.sandbox.engine.barriers import skeleton
from primerl.sandbox.engine.guest import READY
from primerl.sandbox.errors import Probe, SandboxError
from primerl.sandbox.results import Isolation, Result
from primerl.sandbox.tiers import shipping
from primerl.sandbox.tiers.interface import Options, Order, Tier

_IMAGE = "python:3.11-slim"
_ENGINE = "/tmp/.primerl-engine.zip"
_ORDER = "/tmp/.primerl-order"
_GUEST = shipping.program(_ENGINE, "guest")
_GIB = 1 << 30
_ENDS_LATER_S = 10.0
_SINGLE_LIFETIME_S = 3600.0  # of one that is kept ready for a run


class Prime(Tier):
    """Hosted virtual machines; an API key is read as the SDK reads it (``PRIME_API_KEY``)."""

    name = "prime"
    lacks = frozenset({"roots", "turns", "connections"})

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._sdk: Any = None
        self._client: Any = None
        self._deleting: set[asyncio.Task[None]] = set()

    @property
    def alive(self) -> bool:
        """See ``Tier``."""
        return self._client is not None

    async def start(self) -> None:
        """See ``Tier``."""
        await self.require_probes()
        self._sdk = require("prime_sandboxes", extra="prime")
        self._client = self._sdk.AsyncSandboxClient()

    async def make(self, settings: Mapping[str, Any]) -> "PrimeSandbox":
        """See ``Tier``."""
        limits = self.options.limits
        lifetime_s = settings.get("lifetime_s", _SINGLE_LIFETIME_S)
        request = self._sdk.CreateSandboxRequest(
            name=f"primerl-{secrets.token_hex(8)}",
            docker_image=self.options.image or _IMAGE,
            memory_gb=max(1.0, limits.memory_bytes / _GIB),
            disk_size_gb=float(max(1, math.ceil(limits.disk_bytes / _GIB))),
            timeout_minutes=max(1, math.ceil(lifetime_s / 60)),
            network_allowlist=[*self.options.allow_network],  # an empty one refuses all
            labels=["primerl"],
        )
        try:
            made = await self._client.create(request)
        except (self._sdk.APIError, RuntimeError) as error:
            raise SandboxError(f"the tier 'prime' made no sandbox: {error}") from error
        sandbox = PrimeSandbox(self, made.id, ends_at=time.monotonic() + lifetime_s)
        try:
            async with asyncio.timeout(self.options.start_timeout_s):
                await self._client.wait_for_creation(made.id)
                await self._client.upload_bytes(
                    made.id, _ENGINE, shipping.engine_archive(), "engine.zip"
                )
        except (self._sdk.APIError, RuntimeError, TimeoutError) as error:
            sandbox.kill()
            raise SandboxError(f"the tier 'prime' started no sandbox: {error}") from error
        except BaseException:
            sandbox.kill()
            raise
        return sandbox

    async def close(self) -> None:
        """See ``Tier``."""
        await asyncio.gather(*self._deleting, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def probes(self) -> list[Probe]:
        """See ``Tier``."""
        if importlib.util.find_spec("prime_sandboxes") is None:
            missing = f"not installed; {install_command('prime')}"
            return [Probe(name="prime-sandboxes", message=missing)]
        sdk = require("prime_sandboxes", extra="prime")
        key = Probe(name="API key")
        if not sdk.Config().api_key:
            key = Probe(name="API key", message="none: set PRIME_API_KEY, or run `prime login`")
        return [Probe(name="prime-sandboxes"), key]

    def isolation(self) -> Isolation:
        """See ``Tier``."""
        network = ", ".join(self.options.allow_network) or "none"
        return Isolation(
            tier=self.name,
            shared_kernel=False,
            memory="that of the virtual machine, at least 1 GiB",
            user="the image's user, in a virtual machine elsewhere",
            layers=("virtual machine (hosted)",),
            stops=(
                "reading and writing this host's files, and reaching its processes and network",
                f"network: all but these servers, by the host's word: {network}",
                "more output and time than allowed",
            ),
            does_not_stop=(
                "the provider's own access: code, files and results leave this machine",
                "more files and processes than allowed",
                "outliving a crashed owner until its timeout, which costs money",
            ),
        )

    def delete(self, identifier: str) -> None:
        """Delete a sandbox, behind the caller's back."""
        task = asyncio.get_running_loop().create_task(self._delete(identifier))
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)

    async def _delete(self, identifier: str) -> None:
        await self._client.delete(identifier)

    async def carry_out(self, identifier: str, order: Order) -> Result:
        """Send an order to a sandbox, and take what comes out.

        Raises:
            SandboxError: the service fails.
        """
        header = order.complete_header | {
            "rlimits": {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": self.options.limits.disk_bytes},
            "ends_in_s": order.timeout_s + _ENDS_LATER_S,
        }
        content = messages.packed(header, [*order.files.values()]) + order.stdin
        started = time.perf_counter()
        try:
            await self._client.upload_bytes(identifier, _ORDER, content, "order")
            response = await self._client.execute_command(
                identifier, _command(order.output_bytes), timeout=math.ceil(order.timeout_s)
            )
        except self._sdk.CommandTimeoutError:
            return _ended("timeout", started)
        except self._sdk.SandboxOOMError:
            return _ended("memory", started)
        except self._sdk.SandboxNotRunningError:
            return _ended("died", started)
        except (self._sdk.APIError, RuntimeError) as error:
            raise SandboxError(f"the tier 'prime' carried out no order: {error}") from error
        return _result(response.stdout, response.exit_code, order.output_bytes, started)


class PrimeSandbox:
    """One hosted sandbox."""

    def __init__(self, tier: Prime, identifier: str, *, ends_at: float) -> None:
        self._tier = tier
        self._identifier = identifier
        self._ends_at = ends_at
        self._ended = False

    @property
    def alive(self) -> bool:
        """See ``Sandbox``."""
        return not self._ended and time.monotonic() < self._ends_at

    async def execute(self, order: Order) -> Result:
        """See ``Sandbox``."""
        result = await self._tier.carry_out(self._identifier, order)
        if result.exit is None and not order.keeps:
            self.kill()
        return result

    def kill(self) -> None:
        """See ``Sandbox``."""
        if not self._ended:
            self._ended = True
            self._tier.delete(self._identifier)


def _command(output_bytes: int) -> str:
    """A shell command that has the guest carry out the order, and prints its outputs in base64."""
    guest = f"python3 -I -c {shlex.quote(_GUEST)} < {_ORDER} > {_ORDER}.out 2> {_ORDER}.err"
    sizes = {"out": output_bytes + len(READY) + 1, "err": output_bytes + 1}
    prints = [f"head -c {size} {_ORDER}.{name} | base64 -w 0; echo" for name, size in sizes.items()]
    home = skeleton.HOME
    return f"mkdir -p {home}; cd {home}; {guest}; code=$?; {'; '.join(prints)}; exit $code"


def _result(printed: str, code: int, output_bytes: int, started: float) -> Result:
    try:
        stdout, stderr = (base64.b64decode(line, validate=True) for line in printed.split("\n")[:2])
    except ValueError:
        return _ended("protocol", started)
    if not stdout.startswith(READY):
        raise SandboxError(f"the tier 'prime': the guest did not start: {stderr!r:.500}")
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
