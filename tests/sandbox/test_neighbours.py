"""Sandboxes beside one that takes all it can of a counter that the kernel keeps per user."""

import asyncio
import contextlib
import os

import pytest
from sandbox_saboteurs import HONEST, SABOTEURS
from sandboxed import everybodys_python, needed

from primerl.sandbox import Case, SandboxPool, SandboxUnavailable, grade

needed()

TIERS = ["namespaces", "landlock"]
USES = [
    *("passes_descriptors", "writes_to_pipe", "opens_terminal", "locks"),
    *("queues_signals", "polls", "starts_processes"),
]
GRADERS = 16
SUBORDINATE = "PRIMERL_TEST_SUBORDINATE" in os.environ  # set by test_ordinary_user.py
# What the sandboxes of an ordinary user without subordinate users share, as the table in
# docs/sandbox.md says.
SHARED = {"namespaces": {"passes_descriptors", "writes_to_pipe"}}
SHARED["landlock"] = {*SHARED["namespaces"], "queues_signals", "starts_processes"}
LACKED = {"namespaces": set(), "landlock": {"passes_descriptors", "opens_terminal"}}
# An ordinary user's sandboxes without namespaces have one limit of processes.
LAST = {"landlock": {"processes"}}


def one_user_each(sandboxes):
    return sandboxes.isolation.user.startswith("one user per sandbox")


def uses(sandboxes, tier):
    shared = set() if one_user_each(sandboxes) else SHARED[tier]
    return [use for use in USES if use not in shared | LACKED[tier]]


def pool(tier, **arguments):
    return SandboxPool(tier=tier, python=everybodys_python(), **arguments)


async def took(session, kind):
    """Start a saboteur in the background of a session; wait until it took what it can.

    Return what it said, or the limit that ended it by then, or what the shell said. (Sandboxes that
    share a limit of processes may deny each other even the start.)
    """
    await session.write("saboteur.py", SABOTEURS[kind].encode())
    script = """
: > took
python3 -S saboteur.py > took 2>&1 &
while [ ! -s took ]; do sleep 0.05; done
cat took
"""
    done = await session.run(["sh", "-c", script])
    return done.limits_hit or done.stdout or done.stderr


def stopped_or_took(said, possible):
    """Whether a saboteur did what it could: it took, met a limit, or could not start a process."""
    if said in (("files",), ("memory",)):
        return True
    denied = "starts_processes" not in possible and b"Cannot fork" in said
    return said.startswith(b"took") or denied


async def graded(sandboxes, tier):
    """Return the rewards of honest graders, and the verdicts of those that got none."""
    expected = [True] * len(uses(sandboxes, tier))
    cases = [Case(args=(uses(sandboxes, tier),), expected=expected)] * GRADERS
    verdicts = await grade(sandboxes, HONEST, cases, function="probe")
    return [verdict.passed or verdict for verdict in verdicts]


def among(tier, work):
    """Run ``work`` with a pool of the tier, and the kinds of saboteurs that it must withstand."""

    async def run():
        async with pool(tier, concurrency=GRADERS, warm=4) as sandboxes:
            if os.getuid() == 0 or (SUBORDINATE and tier == "namespaces"):
                assert one_user_each(sandboxes)
            last = set() if one_user_each(sandboxes) else LAST.get(tier, set())
            return await work(sandboxes, [kind for kind in SABOTEURS if kind not in last])

    try:
        return asyncio.run(run())
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("tier", TIERS)
def test_honest_graders_beside_all_saboteurs(tier):
    async def work(sandboxes, kinds):
        async with contextlib.AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(sandboxes.session()) for _ in kinds]
            said = await asyncio.gather(*map(took, sessions, kinds))
            for kind, one in zip(kinds, said, strict=True):
                assert stopped_or_took(one, uses(sandboxes, tier)), (kind, one)
            return await graded(sandboxes, tier)

    rewards = among(tier, work)
    assert rewards == [True] * GRADERS


@pytest.mark.thorough
@pytest.mark.parametrize("tier", TIERS)
def test_honest_graders_beside_each_saboteur(tier):
    async def work(sandboxes, kinds):
        rewards = {}
        for kind in kinds:
            async with sandboxes.session() as session:
                said = await took(session, kind)
                assert stopped_or_took(said, uses(sandboxes, tier)), (kind, said)
                rewards[kind] = await graded(sandboxes, tier)
        return rewards

    rewards = among(tier, work)
    assert rewards == {kind: [True] * GRADERS for kind in rewards}
