"""Environments whose agent is a command-line program that samples through the gateway."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from primerl._common.processes import launch
from primerl._common.processes.supervisor import remove_folder
from primerl.rollout.agents.limits import AgentLimits
from primerl.rollout.agents.tools import Runtime
from primerl.rollout.conversations.messages import clipped
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.environments.environment import Task, reward_of
from primerl.rollout.gateways.server import Gateway, gateway
from primerl.rollout.gateways.sessions import GatewaySession
from primerl.types import Rollout, SamplingParams

KILL_S = 5.0
HOME = "home"
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")

Command = Callable[[Task, GatewaySession], Sequence[str]]
CommandReward = Callable[[Task, "CommandRun"], float | Awaitable[float]]


@attrs.frozen(kw_only=True, eq=False)
class CommandRun:
    """The outcome of one run of a command-line agent.

    ``exit_code`` is None if the time limit ended the program, and 128 + the signal's number if a
    signal ended it. ``output`` is the beginning and end of what the program printed. ``folder`` is
    the folder in which it ran; None if it ran in a runtime.
    """

    session: GatewaySession
    exit_code: int | None
    output: str
    folder: Path | None
    runtime: Runtime | None


def command_agent(
    command: Command,
    tokenizer: Any,
    *,
    reward: CommandReward,
    prepare: Callable[[Task, Path], None] | None = None,
    runtime: Callable[[Task], contextlib.AbstractAsyncContextManager[Runtime]] | None = None,
    variables: Mapping[str, str] | None = None,
    renderer: Any = None,
    limits: AgentLimits | None = None,
    keep_reasoning: bool = False,
    side_jobs: bool = True,
    ignore_fields: Collection[str] = (),
    keep_conversation: bool = False,
) -> "CommandAgent":
    """Return an environment whose agent is a program: any that accepts a base URL and a key.

        def command(task, session):
            return ["mini", "--yolo", "--task", task["prompt"], "--model", "openai/policy"]

        environment = rollout.command_agent(command, tokenizer, reward=tests_pass)

    The environment variables ``OPENAI_BASE_URL``, ``ANTHROPIC_BASE_URL`` and the matching API keys
    tell the program how to reach the gateway. ``command`` may also use ``session.base_url`` and
    ``session.key``. Without a ``runtime``, the program runs as a process of this machine, in a new
    folder, with a home folder of its own and few of this process's environment variables. This does
    not protect the machine from commands that a model writes: for untrusted commands, pass a
    runtime that isolates them. A runtime on another machine needs a network connection to the
    gateway, which listens on 127.0.0.1 only.

    Args:
        command: ``(task, session) -> argv``.
        tokenizer: a Hugging Face tokenizer with a chat template.
        reward: ``(task, run) -> number``, called while the folder or runtime still exists.
        prepare: ``(task, folder)``; writes the files that the agent works on.
        runtime: ``(task) -> async context manager``, which yields a place to run the program, such
            as a sandbox with the methods of verifiers' ``Runtime``.
        variables: further environment variables for the program.
        renderer: as in ``rollout.verifiers``.
        limits: limits on turns, tokens and time, and on the characters of output that are kept.
        keep_reasoning: whether the policy's reasoning stays in its context if the program does not
            send it back; see ``History``.
        side_jobs: whether side jobs of the program, such as the title of a conversation, are
            trained; see ``History.side_jobs``.
        ignore_fields: see ``gateway``.
        keep_conversation: whether each rollout stores its messages in ``conversation``.
    """
    return CommandAgent(
        command=command,
        tokenizer=tokenizer,
        reward=reward,
        prepare=prepare,
        runtime=runtime,
        variables=dict(variables or {}),
        renderer=renderer,
        limits=limits or AgentLimits(),
        keep_reasoning=keep_reasoning,
        side_jobs=side_jobs,
        ignore_fields=tuple(ignore_fields),
        keep_conversation=keep_conversation,
    )


@attrs.define(kw_only=True, eq=False, slots=False)
class CommandAgent:
    """An environment, ``async (task, engine, params) -> Rollout``, made by ``command_agent``.

    It can be pickled: the first call on each event loop starts a gateway, which ``aclose`` closes.
    """

    command: Command
    tokenizer: Any
    reward: CommandReward
    prepare: Callable[[Task, Path], None] | None
    runtime: Callable[[Task], contextlib.AbstractAsyncContextManager[Runtime]] | None
    variables: Mapping[str, str]
    renderer: Any
    limits: AgentLimits
    keep_reasoning: bool
    side_jobs: bool
    ignore_fields: tuple[str, ...]
    keep_conversation: bool
    _gateways: dict[asyncio.AbstractEventLoop, "asyncio.Task[Gateway]"] = attrs.field(
        init=False, factory=dict
    )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_gateways": {}}

    async def __call__(self, task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        """Play ``task``.

        Raises:
            FileNotFoundError: the program does not exist.
            Exception: any error of the engine, of ``prepare`` or of the runtime.
        """
        served = await self._gateway()
        async with (
            served.open(engine=engine, params=params, limits=self.limits) as session,
            self._place(task) as (folder, runtime),
        ):
            argv = list(self.command(task, session))
            variables = {**session.variables, **self.variables}
            if runtime is None:
                assert folder is not None
                exit_code, output = await _run_here(argv, variables, folder, self.limits)
            else:
                exit_code, output = await _run_there(argv, variables, runtime, self.limits)
            await session.close()
            run = CommandRun(
                session=session,
                exit_code=exit_code,
                output=output,
                folder=folder,
                runtime=runtime,
            )
            return session.rollout(
                reward=await reward_of(self.reward, task, run),
                stop=_stop(session, exit_code),
                side_jobs=self.side_jobs,
                keep_conversation=self.keep_conversation,
            )

    async def aclose(self) -> None:
        """Close the gateway of this event loop, if there is one."""
        starting = self._gateways.pop(asyncio.get_running_loop(), None)
        if starting is not None:
            await (await starting).__aexit__()

    async def _gateway(self) -> Gateway:
        loop = asyncio.get_running_loop()
        if loop not in self._gateways:
            self._gateways = {k: v for k, v in self._gateways.items() if not k.is_closed()}
            served = gateway(
                None,
                self.tokenizer,
                renderer=self.renderer,
                keep_reasoning=self.keep_reasoning,
                ignore_fields=self.ignore_fields,
            )
            self._gateways[loop] = loop.create_task(served.__aenter__())
        return await asyncio.shield(self._gateways[loop])

    @contextlib.asynccontextmanager
    async def _place(self, task: Task) -> AsyncIterator[tuple[Path | None, Runtime | None]]:
        if self.runtime is not None:
            async with self.runtime(task) as runtime:
                yield None, runtime
            return
        supervised = launch.make_folder("primerl-agent-")
        folder = Path(supervised, "work")  # a subfolder, which does not hold the supervisor's file
        folder.mkdir()
        Path(supervised, HOME).mkdir()
        try:
            if self.prepare is not None:
                self.prepare(task, folder)
            yield folder, None
        finally:
            await asyncio.to_thread(remove_folder, supervised)


def _stop(session: GatewaySession, exit_code: int | None) -> str:
    if exit_code is None:
        return "timeout"
    if session.outcomes["limited"] or session.outcomes["context"] or exit_code == 0:
        return session.stop
    return f"exit_code_{exit_code}"


async def _run_there(
    argv: list[str], variables: dict[str, str], runtime: Runtime, limits: AgentLimits
) -> tuple[int | None, str]:
    try:
        async with asyncio.timeout(limits.timeout_s):
            result = await runtime.run(argv, variables)
    except TimeoutError:
        return None, ""
    return result.exit_code, clipped(result.stdout + result.stderr, limits.max_output)


async def _run_here(
    argv: list[str], variables: dict[str, str], folder: Path, limits: AgentLimits
) -> tuple[int | None, str]:
    """Run a program under a supervisor, which ends all processes that the program started."""
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    home = {"HOME": str(folder.parent / HOME)}  # programs keep settings and caches there
    environment = {**passed_on, **home, **variables}
    program = os.path.join(folder, argv[0]) if os.path.dirname(argv[0]) else argv[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise FileNotFoundError(
            f"the agent's program {argv[0]!r} was not found, or is not executable"
        )
    # Our own pipe: with asyncio's, waiting for the program would also wait for other processes
    # that hold the pipe after the program has ended.
    source, sink = os.pipe()
    reader, pipe = await _opened(source)
    try:
        process = await asyncio.create_subprocess_exec(
            *launch.supervised(argv, folder=str(folder.parent), grace_s=0.0),
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    except BaseException:
        pipe.close()
        raise
    finally:
        os.close(sink)
    reading = asyncio.create_task(_ends_of(reader, limits.max_output))
    exit_code: int | None = None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.timeout_s):
                exit_code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                await process.wait()
                await asyncio.wait([reading])
        pipe.close()
        output = await reading  # ends when the pipe is closed
    return exit_code, output


async def _opened(source: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb")
    )
    return reader, pipe


async def _ends_of(stream: asyncio.StreamReader, limit: int) -> str:
    """Read ``stream`` to its end, and return the beginning and end of its content."""
    head, tail, size = b"", bytearray(), 0
    room = limit - limit // 2
    while chunk := await stream.read(1 << 16):
        size += len(chunk)
        missing = max(0, limit // 2 - len(head))
        head += chunk[:missing]
        tail += chunk[missing:]
        if len(tail) > 2 * room:
            del tail[:-room]
    del tail[: max(0, len(tail) - room)]
    left_out = size - len(head) - len(tail)
    note = f"\n[... {left_out:,} bytes left out ...]\n".encode() if left_out else b""
    return (head + note + bytes(tail)).decode(errors="replace")
