"""The common part of the tiers that start one host program per job: gVisor and containers.

The host program starts the guest program (``guest/single_job.py``) inside the sandbox, which reads
the job from stdin. In a session, the files of ``/sandbox`` are kept in a folder on the host.
Everything else starts anew with each job: no process survives from one job to the next.
"""

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from primerl.sandbox.errors import Probe, SandboxError, SandboxNotStarted, SandboxUnavailable
from primerl.sandbox.guest import messages
from primerl.sandbox.guest.removal import remove
from primerl.sandbox.guest.single_job import NOT_STARTED, READY
from primerl.sandbox.results import Result
from primerl.sandbox.tiers import guest_files
from primerl.sandbox.tiers.host import new_folder
from primerl.sandbox.tiers.images.engines import PASSED
from primerl.sandbox.tiers.interface import Job, Options, Tier
from primerl.sandbox.tiers.streams import Input, Output

GUEST_FOLDER = "/.guest"  # path of the guest code inside sandboxes
GUEST = guest_files.program(GUEST_FOLDER, "single_job")
NOBODY = 65534
_ENDS_LATER_S = 10.0  # the guest enforces its timeout this much later, in case the owner crashed
_STOP_S = 30.0
_ANSWER_S = 30.0


class CommandTier(Tier):
    """A tier that starts one host program per job."""

    lacks = frozenset({"network", "roots", "images", "turns", "connections"})

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._folder: Path | None = None
        self._cleaning: set[asyncio.Future[None]] = set()

    @property
    def folder(self) -> Path:
        """The pool's folder on the host.

        Raises:
            SandboxError: the pool isn't running.
        """
        if self._folder is None:
            raise SandboxError(
                "the pool isn't running: use it as `async with SandboxPool() as pool`"
            )
        return self._folder

    def command(self, name: str, files: Path | None, image: str | None) -> list[str]:
        """Return the command line that runs the guest program in a sandbox of the given name.

        ``files`` is a host folder to mount as ``/sandbox``. If it is None, ``/sandbox`` is an empty
        tmpfs. ``image`` is that of a session; if it is None, the pool's is used.
        """
        raise NotImplementedError

    def removal(self, name: str) -> list[str]:
        """Return the command line that ends and removes the sandbox of the given name."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether the tier was started and not closed."""
        return self._folder is not None

    async def start(self) -> None:
        """Check the requirements, copy the guest code to a folder, and run a test job."""
        await self.require_probes()
        self._folder = new_folder()
        try:
            await asyncio.to_thread(guest_files.copy_guest, self._folder / "guest")
            self._folder.chmod(0o711)
            await self._try()
        except BaseException:
            await self.close()
            raise

    async def make(self, settings: Mapping[str, Any]) -> "CommandSandbox":
        """Create a sandbox, with a host folder for its files if it is a session's."""
        files = None
        if settings.get("session"):
            files = self.folder / f"session-{secrets.token_hex(16)}"
            files.mkdir()
            files.chmod(0o777)  # for any user in the sandbox; no other process knows the name
        ends_in_s = settings.get("lifetime_s", math.inf)
        ends_at = time.monotonic() + ends_in_s
        return CommandSandbox(self, files, ends_at=ends_at, image=settings.get("image"))

    async def close(self) -> None:
        """Wait for pending cleanups, and remove the pool's folder."""
        await asyncio.gather(*self._cleaning, return_exceptions=True)
        if self._folder is not None:
            await asyncio.to_thread(remove, str(self._folder))
            self._folder = None

    def clean(self, name: str, files: Path | None) -> None:
        """Remove what an ended sandbox left behind, in a background task."""
        removal = self.removal(name)

        def work() -> None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(removal, capture_output=True, timeout=_STOP_S)
            if files is not None:
                remove(str(files))

        task = asyncio.ensure_future(asyncio.to_thread(work))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _try(self) -> None:
        sandbox = await self.make({})
        job = Job(
            kind="argv",
            header={"argv": ["true"], "environment": {}, "folder": "."},
            files={},
            stdin=b"",
            timeout_s=self.options.start_timeout_s,
            memory_bytes=self.options.limits.memory_bytes,
            output_bytes=4096,
        )
        try:
            done = await sandbox.execute(job)
            if not done.ok:
                raise SandboxError(
                    f"{done.limits_hit or done.exit} is the limit or exit code that ended a test "
                    f"job, which printed: {done.stderr!r:.300}"
                )
        except SandboxError as error:
            raise SandboxUnavailable(
                f"the tier {self.name!r} can't run sandboxes on this machine: {error}",
                [Probe(name="run", message=str(error))],
            ) from error


class CommandSandbox:
    """A sandbox that exists as a host program while a job runs, and as a folder between jobs."""

    host = ""

    def __init__(
        self, tier: CommandTier, files: Path | None, *, ends_at: float, image: str | None
    ) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self._tier = tier
        self._image = image
        self._files = files
        self._ends_at = ends_at
        self._process: subprocess.Popen[bytes] | None = None
        self._name = ""
        self._ended = False

    @property
    def alive(self) -> bool:
        """Whether the sandbox can take jobs: it was not killed, and is within its lifetime."""
        return not self._ended and time.monotonic() < self._ends_at

    async def execute(self, job: Job) -> Result:
        """Start the host program, send it the job, and return the result.

        Raises:
            SandboxNotStarted: the host program, or the job inside, could not be started.
        """
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        begun: asyncio.Future[None] = loop.create_future()
        over: asyncio.Future[str] = loop.create_future()

        def end(reason: str) -> None:
            if not over.done():
                over.set_result(reason)

        def begin() -> None:
            if not begun.done():
                begun.set_result(None)

        given = Input(messages.packed(self._header(job), [*job.files.values()]) + job.stdin)
        outputs = [
            Output(job.output_bytes + len(READY), lambda: end("output"), begin),
            Output(job.output_bytes, lambda: end("output")),
        ]
        handle = -1
        try:
            handle = await self._start(given, outputs)
            loop.add_reader(handle, end, "")
            limit_s = min(job.timeout_s, self._ends_at - time.monotonic())
            reason = await _first(begun, over, self._tier.options.start_timeout_s, limit_s)
            self._stop()
            assert self._process is not None
            code = await asyncio.to_thread(self._process.wait)
            stdout, stderr = [await output.finish() for output in outputs]
        finally:
            self._stop()
            if handle >= 0:
                loop.remove_reader(handle)
                os.close(handle)
            given.close()
            for output in outputs:
                output.close()
        if not stdout.startswith(READY) or (not reason and code == NOT_STARTED):
            said = stderr.decode(errors="replace").strip()
            raise SandboxNotStarted(
                f"the tier {self._tier.name!r} could not start a sandbox: {said[-500:]}"
            )
        overflowed = any(output.overflowed for output in outputs)
        limits = ("output",) if overflowed else (reason,) if reason else ()
        return Result(
            stdout=stdout[len(READY) :],
            stderr=stderr,
            exit=None if reason else code,
            limits_hit=limits,
            wall_s=time.perf_counter() - started,
        )

    def kill(self) -> None:
        """End the host program, and remove the sandbox's files."""
        self._stop()
        if not self._ended:
            self._ended = True
            self.on_end()
            self._tier.clean(self._name, self._files)

    async def _start(self, given: Input, outputs: Sequence[Output]) -> int:
        """Start the host program and return its pidfd."""
        self._name = f"primerl-{secrets.token_hex(8)}"
        theirs = [given.theirs, *(output.theirs for output in outputs)]
        start = asyncio.to_thread(
            _start_process, self._tier.command(self._name, self._files, self._image), theirs
        )
        try:
            self._process = await asyncio.shield(asyncio.ensure_future(start))
        except OSError as error:
            raise SandboxNotStarted(
                f"the tier {self._tier.name!r} could not start its program: {error}"
            ) from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return os.pidfd_open(self._process.pid)

    def _stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            self._tier.clean(self._name, None)

    def _header(self, job: Job) -> dict[str, Any]:
        limits = self._tier.options.limits
        seconds = math.ceil(job.timeout_s) * limits.processes
        rlimits = {
            "RLIMIT_AS": limits.address_space_bytes or job.memory_bytes,
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": seconds,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_NOFILE": limits.open_files,
        }
        ends_in_s = job.timeout_s + _ENDS_LATER_S
        return job.complete_header | {"rlimits": rlimits, "ends_in_s": ends_in_s}


async def _first(
    begun: "asyncio.Future[None]", over: "asyncio.Future[str]", start_s: float, limit_s: float
) -> str:
    """Wait for the end of a job; return the limit that ended it, or "" if its program exited."""
    either: list[asyncio.Future[Any]] = [begun, over]
    await asyncio.wait(either, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done() and not over.done():
        raise SandboxNotStarted(f"a sandbox did not start within {start_s} s")
    await asyncio.wait([over], timeout=max(0.0, limit_s))
    return over.result() if over.done() else "timeout"


def _start_process(command: list[str], streams: Sequence[int]) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={name: os.environ[name] for name in PASSED if name in os.environ},
        cwd="/",
        start_new_session=True,
    )


async def answers(name: str, *arguments: str) -> Probe:
    """Check that a program is installed and exits with 0 when run with these arguments."""
    path = shutil.which(name)
    title = " ".join([name, *arguments])
    if path is None:
        return Probe(name=title, message=f"{name} is not installed (not on the PATH)")
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(name=title, message=str(error))
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        return Probe(name=title, message=f"exit code {done.returncode}: {said[-300:]}")
    return Probe(name=title)
