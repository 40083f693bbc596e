"""Tasks of the swe-folder environment and their scoring."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import attrs
import verifiers.v1 as vf

from primerl.sandbox import SandboxPool
from swe_folder import git, grading
from swe_folder.git import Files
from swe_folder.grading import verdict
from swe_folder.issues import IMAGE, Issue, read
from swe_folder.layouts import by_names
from swe_folder.patches import without_steering
from swe_folder.runtimes import apply, fresh, listed, made_in, put, taken

SYSTEM = (
    "Resolve the issue in this repository. edit replaces a text that occurs once in a file; bash "
    "runs a command. When it is resolved, say so."
)


class IssueData(vf.TaskData):
    """Data of a task: an issue. Only the host sees the patches and the names of tests."""

    base_commit: str
    patch: str
    test_patch: str
    expected: tuple[str, ...]
    test_command: tuple[str, ...]
    modules: tuple[str, ...]
    inputs: tuple[str, ...]
    folder: str | None = None
    place: str = "."

    @property
    def issue(self) -> Issue:
        """The issue, without its statement."""
        names = [
            field.name for field in attrs.fields(Issue) if field.name in type(self).model_fields
        ]
        given = {name: getattr(self, name) for name in names}
        return Issue(**given | {"statement": "", "workdir": self.place})


class ResolveConfig(vf.TaskConfig):
    """Options for running the tests.

    ``grading="isolated"`` runs pytest in one sandbox and the code under test in another, where it
    can't manipulate the results. ``grading="command"`` runs the test command in the same sandbox as
    the code, for test suites that need it and for images. ``packages`` are folders that contain
    pytest and the tests' dependencies; sandboxes must be able to read them.
    """

    grading: Literal["isolated", "command"] = "isolated"
    packages: list[str] = []
    grading_timeout_s: float = 300.0


class Resolve(vf.Task[IssueData, vf.State, ResolveConfig]):
    """Task: make the hidden tests pass without breaking the other tests."""

    def base(self, patch: str = "") -> Files:
        """Return the repository as the agent finds it, by path, with a patch applied.

        Raises:
            RuntimeError: the repository is in an image.
            ValueError: the commit can't be read, or the patch does not apply.
        """
        if self.data.folder is None:
            raise RuntimeError(f"the repository of {self.data.id} is in its image, not in a folder")
        return git.committed(self.data.folder, self.data.base_commit, patch)

    async def setup(self, runtime: vf.Runtime) -> None:
        """Write the repository into the sandbox, unless its image has it."""
        if self.data.folder is not None:
            await put(runtime, await asyncio.to_thread(self.base))

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
        """Apply a patch to the repository in the agent's sandbox.

        Raises:
            ValueError: the patch does not apply.
        """
        if self.data.folder is not None:
            files = await asyncio.to_thread(self.base, patch)
            removed = sorted({*await asyncio.to_thread(self.base)} - {*files})
            await put(runtime, files, removed=removed)
            return
        await apply(runtime, self.data.place, patch)

    async def graded(self, runtime: vf.Runtime) -> tuple[bool, str]:
        """Run the tests on the agent's files, in new sandboxes.

        Returns whether the tests pass, and the reason if they do not.

        Raises:
            ValueError: the issue's repository or patches can't be read.
            SandboxError: the sandboxes failed through no fault of the agent.
        """
        if self.data.folder is None:
            return await self._graded_in_image(runtime)
        pool = getattr(runtime, "pool", None)
        try:
            changed = await taken(runtime)
        except (vf.SandboxError, OSError, ValueError) as error:
            # An agent may end its own sandbox, and then gets 0. It can't close the pool.
            if pool is not None and not pool.alive:
                raise
            return False, f"the repository can't be read: {error}"
        issue = self.data.issue
        packages = self.config.packages
        await asyncio.to_thread(grading.source, issue, tuple(packages))
        async with contextlib.AsyncExitStack() as stack:
            if pool is None:
                own = SandboxPool(concurrency=2, warm=0, readable=packages)
                pool = await stack.enter_async_context(own)
            return await grading.graded(
                pool,
                issue,
                changed,
                grading=self.config.grading,
                packages=packages,
                timeout_s=self.config.grading_timeout_s,
            )

    async def _graded_in_image(self, runtime: vf.Runtime) -> tuple[bool, str]:
        place, pool = self.data.place, getattr(runtime, "pool", None)
        try:
            patch = await made_in(runtime, place, self.data.base_commit)
        except (vf.SandboxError, OSError, ValueError) as error:
            if pool is not None and not pool.alive:
                raise
            return False, f"the agent's changes can't be read: {error}"
        async with fresh(runtime, self.config.grading_timeout_s) as other:
            hidden = {path for pair in git.names(self.data.test_patch) for path in pair}
            layout = by_names(await listed(other, place), self.data.issue.files, hidden)
            try:
                await apply(other, place, await asyncio.to_thread(without_steering, patch, layout))
                await apply(other, place, self.data.test_patch)
            except ValueError as error:
                return False, str(error)
            command = ["sh", "-c", 'cd "$0" && exec "$@"', place, *self.data.test_command]
            try:
                done = await other.run(command, {})
            except vf.SandboxError as error:
                if pool is not None and not pool.alive:
                    raise
                return False, f"the sandbox of the tests ended: {error}"
        return verdict(done, self.data.expected)


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
    for name in ("statement", "workdir"):
        del given[name]
    return IssueData(
        **given,
        system_prompt=SYSTEM,
        prompt=issue.statement,
        workdir=issue.workdir if issue.image else None,
        place=issue.workdir,
    )
