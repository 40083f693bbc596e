"""Tasks of the swe-folder environment and their scoring."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Literal

import attrs
import verifiers.v1 as vf
from verifiers.v1.runtimes import provision_runtime

from primerl.sandbox import SandboxPool, grade_repository, verifiers_runtime
from swe_folder import repositories
from swe_folder.issues import IMAGE, Issue, read

SYSTEM = (
    "Resolve the issue in this repository. edit replaces a text that occurs once in a file; bash "
    "runs a command. When it is resolved, say so."
)
MOST_BYTES = repositories.MOST_BYTES
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.+?)(?: - .*)?$", re.MULTILINE)


class IssueData(vf.TaskData):
    """Data of a task: an issue. Only the host sees the patches and the names of tests."""

    base_commit: str
    patch: str
    test_patch: str
    expected: list[str]
    test_command: list[str]
    modules: list[str]
    folder: str | None = None
    place: str = "."


class ResolveConfig(vf.TaskConfig):
    """Options for running the tests.

    ``grading="isolated"`` runs pytest in one sandbox and the code under test in another, where it
    can't manipulate the results. ``grading="command"`` runs the test command in the same sandbox as
    the code, for test suites that need it and for containers. ``packages`` are folders that contain
    pytest and the tests' dependencies; sandboxes must be able to read them.
    """

    grading: Literal["isolated", "command"] = "isolated"
    packages: list[str] = []
    grading_timeout_s: float = 300.0


class Resolve(vf.Task[IssueData, vf.State, ResolveConfig]):
    """Task: make the hidden tests pass without breaking the other tests."""

    @property
    def base(self) -> dict[str, bytes]:
        """The repository as the agent finds it, by path."""
        if self.data.folder is None:
            raise RuntimeError(f"the repository of {self.data.id} is in its image, not in a folder")
        return repositories.committed(self.data.folder, self.data.base_commit)

    async def setup(self, runtime: vf.Runtime) -> None:
        """Write the repository into the sandbox. A container's image already has it."""
        if self.data.folder is not None:
            await put(runtime, await asyncio.to_thread(lambda: self.base))

    @vf.reward
    async def resolved(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """Return 1 if all expected tests pass, else 0; ``trace.info["swe_folder"]`` says why."""
        passed, why = await self.graded(runtime)
        trace.info["swe_folder"] = {"passed": passed, "why": why[-2000:]}
        return float(passed)

    async def validate(self, runtime: vf.Runtime) -> bool:
        """Check that the expected tests pass with the reference patch and fail without it."""
        before, _ = await self.graded(runtime)
        await self.apply(runtime, self.data.patch)
        after, _ = await self.graded(runtime)
        return after and not before

    async def apply(self, runtime: vf.Runtime, patch: str) -> None:
        """Apply a patch to the repository in the agent's sandbox or container.

        Raises:
            ValueError: the patch does not apply.
        """
        if self.data.folder is not None:
            files = await asyncio.to_thread(lambda: repositories.patched(self.base, patch))
            await put(runtime, files)
            return
        await apply(runtime, self.data.place, patch)

    async def graded(self, runtime: vf.Runtime) -> tuple[bool, str]:
        """Run the tests on the agent's files, in new sandboxes or a new container.

        Returns whether the tests pass, and the reason if they do not.

        Raises:
            SandboxError: the sandboxes failed through no fault of the agent.
        """
        if self.data.folder is None:
            return await self._graded_in_container(runtime)
        pool = getattr(runtime, "pool", None)
        try:
            changed = await taken(runtime)
        except (vf.SandboxError, OSError, ValueError) as error:
            # An agent may end its own sandbox, and then gets 0. It can't close the pool.
            if pool is not None and not pool.alive:
                raise
            return False, f"the repository can't be read: {error}"
        base, tests = await asyncio.to_thread(self._with_tests)
        files = repositories.graded(base, changed, tests)
        async with contextlib.AsyncExitStack() as stack:
            if pool is None:
                own = SandboxPool(concurrency=2, warm=0, readable=self.config.packages)
                pool = await stack.enter_async_context(own)
            if self.config.grading == "isolated":
                return await self._graded_in_isolation(pool, files, base)
            return await self._graded_by_command(pool, files)

    def _with_tests(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        base = self.base
        return base, repositories.patched(base, self.data.test_patch)

    async def _graded_in_isolation(
        self, pool: SandboxPool, files: Mapping[str, bytes], base: Mapping[str, bytes]
    ) -> tuple[bool, str]:
        tests = {path: content for path, content in files.items() if repositories.steers(path)}
        subject = {path: content for path, content in files.items() if path not in tests}
        # Only these test files contain expected tests.
        named = {name.split("::", 1)[0] for name in self.data.expected}
        report = await grade_repository(
            pool,
            subject,
            {path: content for path, content in tests.items() if not named or path in named},
            modules=self.data.modules or repositories.modules(base),
            packages=self.config.packages,
            expected=self.data.expected or None,
            timeout_s=self.config.grading_timeout_s,
        )
        if report.passed or (self.data.expected and not report.missing):
            return True, ""
        return False, f"not passed: {', '.join(report.missing)}\n{report.log}"

    async def _graded_by_command(
        self, pool: SandboxPool, files: Mapping[str, bytes]
    ) -> tuple[bool, str]:
        timeout_s = self.config.grading_timeout_s
        runtime = verifiers_runtime(pool, timeout_s=timeout_s)
        await runtime.start()
        try:
            try:
                await put(runtime, files)
            except RuntimeError as error:  # the agent's fault: the original repository fits
                return False, str(error)
            # Folders of packages that the tests need, such as pytest.
            variables = {"PYTHONPATH": ":".join([".", *self.config.packages])}
            done = await runtime.run(list(self.data.test_command), variables)
        finally:
            await runtime.stop()
        return verdict(done, self.data.expected)

    async def _graded_in_container(self, runtime: vf.Runtime) -> tuple[bool, str]:
        place = self.data.place
        changes = [
            "sh",
            "-c",
            f"cd {place} && git add -A && git diff --cached {self.data.base_commit}",
        ]
        made = await runtime.run(changes, {})
        if made.exit_code:
            return False, f"the agent's changes can't be read: {made.stderr}"
        async with fresh(runtime) as other:
            try:
                await apply(other, place, without_steering(made.stdout))
                await apply(other, place, self.data.test_patch)
            except ValueError as error:
                return False, str(error)
            command = ["sh", "-c", f'cd {place} && exec "$@"', "sh", *self.data.test_command]
            async with asyncio.timeout(self.config.grading_timeout_s):
                done = await other.run(command, {})
        return verdict(done, self.data.expected)


@contextlib.asynccontextmanager
async def fresh(runtime: vf.Runtime) -> AsyncIterator[vf.Runtime]:
    """Open a new container with the same configuration as ``runtime``."""
    async with provision_runtime(runtime.config) as other:
        yield other


def verdict(done: vf.ProgramResult, expected: list[str]) -> tuple[bool, str]:
    """Judge a test command by pytest's line for each expected test.

    Without expected tests, the exit code decides. Returns whether the tests passed, and the reason
    if they did not.
    """
    said = f"{done.stdout}\n{done.stderr}"
    if not expected:
        return done.exit_code == 0, "" if done.exit_code == 0 else said
    outcomes: dict[str, set[str]] = {}
    for outcome, name in _OUTCOME.findall(done.stdout):
        outcomes.setdefault(name, set()).add(outcome)
    missing = [name for name in expected if outcomes.get(name) != {"PASSED"}]
    return not missing, f"not passed: {', '.join(missing)}\n{said}" if missing else ""


async def put(runtime: vf.Runtime, files: Mapping[str, bytes]) -> None:
    """Write a repository into the working folder of a runtime.

    Raises:
        RuntimeError: unpacking fails, for lack of space or of tar.
    """
    await runtime.write(".repository.tar", repositories.packed(files))
    done = await runtime.run(["sh", "-c", "tar xf .repository.tar && rm .repository.tar"], {})
    if done.exit_code:
        raise RuntimeError(f"the repository can't be unpacked: {done.stderr}")


async def taken(runtime: vf.Runtime) -> dict[str, bytes]:
    """Read the files of the working folder, which are untrusted.

    Raises:
        ValueError: the files are too large or can't be packed.
    """
    name = "/tmp/.repository.tar"
    command = f"tar cf {name} --exclude=.git --exclude=__pycache__ --exclude=.repository.tar ."
    done = await runtime.run(["sh", "-c", command], {})
    if done.exit_code:
        raise ValueError(f"the folder can't be packed: {done.stderr}")
    return repositories.unpacked(await runtime.read(name, max_bytes=MOST_BYTES))


async def apply(runtime: vf.Runtime, place: str, patch: str) -> None:
    """Apply a patch to the repository at ``place`` in a container.

    Raises:
        ValueError: the patch does not apply.
    """
    if not patch.strip():
        return
    await runtime.write("/tmp/.patch", patch.encode())
    command = f"cd {place} && git apply --whitespace=nowarn /tmp/.patch"
    done = await runtime.run(["sh", "-c", command], {})
    if done.exit_code:
        raise ValueError(f"the patch does not apply: {done.stderr}")


def without_steering(patch: str) -> str:
    """Remove the parts of a patch that change tests or how tests run."""
    parts = re.split(r"(?m)^(?=diff --git )", patch)
    kept = []
    for part in parts:
        named = re.match(r"diff --git a/(\S+) b/(\S+)\n", part)
        if named and not any(
            repositories.steers(path) or ("new file mode" in part and repositories.shadows(path))
            for path in named.groups()
        ):
            kept.append(part)
    return "".join(kept)


class Options(vf.TasksetConfig):
    """Options: ``issues``, JSON lines files, and ``image``, a template with ``{id}``."""

    issues: list[str] = []
    image: str = IMAGE
    task: ResolveConfig = ResolveConfig()


class SweFolder(vf.Taskset[Resolve, Options]):
    """Taskset of issues from JSON lines files."""

    def __init__(self, config: Options) -> None:
        super().__init__(config)
        if not config.issues:
            raise ValueError(
                'swe-folder needs issues: pass config={"taskset": {"issues": ["issues.jsonl"]}}'
            )

    def load(self) -> Iterator[Resolve]:
        """Yield the issues in the order of the files."""
        for path in self.config.issues:
            for issue in read(Path(path), image=self.config.image):
                yield Resolve(_data(issue), self.config.task)


def _data(issue: Issue) -> IssueData:
    given = attrs.asdict(issue)
    return IssueData(
        id=issue.id,
        system_prompt=SYSTEM,
        prompt=issue.statement,
        image=issue.image,
        workdir=issue.workdir if issue.image else None,
        place=issue.workdir,
        **{
            name: given[name]
            for name in ("base_commit", "patch", "test_patch", "expected", "test_command")
        },
        modules=list(issue.modules),
        folder=issue.folder,
    )
