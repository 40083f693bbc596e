"""Control groups, on a tree of files like the kernel's; the last test needs a delegated group."""

import os

import pytest
from sandboxed import needed, with_pool

from primerl.sandbox import SandboxLimits
from primerl.sandbox.tiers.local.cgroups import Cgroup, Cgroups, delegated

FILES = ("memory.max", "pids.max", "memory.swap.max", "cgroup.procs", "cgroup.kill")


@pytest.fixture
def tree(tmp_path):
    """A mounted hierarchy with one group, and this process in it."""

    def make(*, controllers="cpu memory pids", enabled="", own="work/leaf"):
        root = tmp_path / "mount"
        leaf = root / own
        leaf.mkdir(parents=True)
        for group in (root, *leaf.parents[: len(leaf.relative_to(root).parts) - 1], leaf):
            (group / "cgroup.procs").touch()
            (group / "cgroup.subtree_control").write_text(enabled)
            (group / "cgroup.controllers").write_text(controllers if group != leaf else "")
        (tmp_path / "mountinfo").write_text(
            "22 1 0:1 / /proc rw - proc proc rw\n"
            f"30 1 0:26 / {root} rw shared:4 - cgroup2 none rw\n"
        )
        (tmp_path / "cgroup").write_text(f"5:cpu:/x\n0::/{own}\n")
        return root

    return make


def found(tmp_path):
    return delegated(groups=tmp_path / "cgroup", mounts=tmp_path / "mountinfo")


def test_group_above_a_leaf_is_delegated(tree, tmp_path):
    root = tree()
    assert found(tmp_path) == (root / "work", "")
    assert (root / "work/cgroup.subtree_control").read_text() == "+memory +pids"


def test_enabled_controllers_are_left_alone(tree, tmp_path):
    root = tree(enabled="cpu memory pids")
    assert found(tmp_path) == (root / "work", "")
    assert (root / "work/cgroup.subtree_control").read_text() == "cpu memory pids"


def test_processors_are_shared_equally_where_that_is_delegated(tree, tmp_path):
    root = tree(enabled="memory pids")
    assert found(tmp_path) == (root / "work", "")
    assert (root / "work/cgroup.subtree_control").read_text().startswith("+cpu")


def test_missing_controllers_are_named(tree, tmp_path):
    tree(controllers="cpu memory")
    group, reason = found(tmp_path)
    assert group is None
    assert "lacks the controllers pids" in reason
    (tmp_path / "mountinfo").write_text("22 1 0:1 / /proc rw - proc proc rw\n")
    assert found(tmp_path) == (None, "cgroup v2 is not mounted")


def test_nothing_above_the_mount_is_tried(tree, tmp_path):
    tree(own="leaf")
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mount/cgroup.controllers").write_text("")
    assert "above the mount" in found(tmp_path)[1]


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A group whose files appear with its folder, as the kernel's do."""
    path = tmp_path / "group"
    mkdir = type(path).mkdir

    def make(self):
        mkdir(self)
        for name in FILES:
            (self / name).touch()

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "mkdir", make)
        made = Cgroup(path, memory_bytes=100 << 20, processes=8)
    yield made
    made.close()


def test_limits_of_a_group(group):
    assert int((group.path / "memory.max").read_text()) == 132 << 20
    assert (group.path / "pids.max").read_text() == "10"
    assert (group.path / "memory.swap.max").read_text() == "0"
    assert os.fstat(group.entrance).st_ino == (group.path / "cgroup.procs").stat().st_ino
    assert not group.ran_out_of_memory()
    (group.path / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert group.ran_out_of_memory()
    assert not group.ran_out_of_memory()  # not again


def test_closed_group_is_killed_and_removed_later(group, tmp_path):
    groups = Cgroups(tmp_path)
    groups.close(group)
    assert (group.path / "cgroup.kill").read_text() == "1"
    assert groups.remove_closed() == 1  # as while processes are left in it
    for name in group.path.iterdir():
        name.unlink()
    assert groups.remove_closed() == 0


def test_hard_limit_where_delegated():
    """The real thing, where this process's group is delegated to it."""
    needed()
    if delegated()[0] is None:
        pytest.skip(delegated()[1])

    async def run(pool):
        assert "control group" in pool.isolation.memory
        code = "import os; pids = [os.fork() for _ in range(4)]; x = b'x' * (80 << 20)"
        first = await pool.run(code, memory_bytes=200 << 20)
        return first, await pool.run("print(1)")

    killed, after = with_pool(run, limits=SandboxLimits(memory_bytes=256 << 20))
    assert killed.limits_hit == ("memory",)
    assert after.stdout == b"1\n"
