import json
import logging
import random
import shutil
import threading

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from torch import nn

from primerl import checkpoint, optim, track
from primerl._common.digests import digest_of_file
from primerl.checkpoint import folders, reading, writing
from primerl.checkpoint.generators import generator_states, set_generators


class Net(nn.Module):
    """A weight under two names, a frozen one, saved and unsaved buffers, odd dtypes and shapes."""

    def __init__(self, seed=0, width=4):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 3, bias=False)
        self.tied = self.first
        self.unused = nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.randn(2, 2, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("kept", torch.randn(()).double())
        self.register_buffer("empty", torch.zeros(0, 3, dtype=torch.int64))
        self.register_buffer("dropped", torch.randn(3), persistent=False)


def train(net, optimizer, steps, schedule=None):
    losses = []
    for _ in range(steps):
        loss = net.second(net.first(torch.randn(5, 3))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, lr is a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), capturable=False),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: optim.Muon(
        [
            {"params": [one for one in p if one.ndim == 2]},
            {"params": [one for one in p if one.ndim < 2], "algorithm": "adamw"},
        ],
        lr=0.1,
    ),
    "states on the host": lambda p: optim.Offload(torch.optim.AdamW(p, lr=0.1)),
    "CPUAdamW": lambda p: optim.CPUAdamW(p, lr=0.1),
}


def trainable(net):
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_is_resumed_exactly(tmp_path, kind, asynchronous):
    net = Net()
    optimizer = OPTIMIZERS[kind](trainable(net))
    train(net, optimizer, 3)
    with checkpoint.Checkpoints(tmp_path, net, optimizer, asynchronous=asynchronous) as saves:
        saves.save(3)
        state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        expected = [*train(net, optimizer, 3), np.random.rand()]  # noqa: NPY002

    again = Net(seed=1)
    optimizer = OPTIMIZERS[kind](trainable(again))
    dropped = again.dropped.clone()
    with checkpoint.Checkpoints(tmp_path, again, optimizer) as saves:
        assert saves.load(checkpoint.last_good(tmp_path)) == 3

    assert all(torch.equal(t, state[name]) for name, t in again.state_dict().items())
    assert torch.equal(again.dropped, dropped)
    assert again.unused not in optimizer.state  # it never had a gradient
    assert [*train(again, optimizer, 3), np.random.rand()] == expected  # noqa: NPY002


def test_an_optimizer_that_was_used_before_is_set_to_what_was_saved(tmp_path):
    """Its state of a parameter that had none goes; a learning rate that is a tensor stays one."""
    net, rate = Net(), torch.tensor(0.1)
    optimizer = torch.optim.AdamW(trainable(net), lr=rate)
    train(net, optimizer, 1)
    with checkpoint.Checkpoints(tmp_path, net, optimizer) as saves:
        saves.save(1)
        rate.fill_(0.7)
        net.unused.grad = torch.ones(2)
        optimizer.step()
        assert net.unused in optimizer.state
        saves.close()
        saves.load(checkpoint.last_good(tmp_path))

    assert net.unused not in optimizer.state
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    fresh = torch.optim.AdamW(trainable(net), lr=rate)
    with checkpoint.Checkpoints(tmp_path, net, fresh) as saves:
        saves.load(checkpoint.last_good(tmp_path))
    assert fresh.param_groups[0]["lr"] is rate


def test_what_changes_while_it_is_written_is_not_saved(tmp_path, monkeypatch):
    net, go_on, write = Net(), threading.Event(), writing.write_pieces
    optimizer = torch.optim.AdamW(trainable(net), lr=0.1)
    train(net, optimizer, 1)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    moment = optimizer.state[net.first.weight]["exp_avg"].clone()

    def wait_and_write(*arguments):
        assert go_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(writing, "write_pieces", wait_and_write)
    tables = {"a": 1}
    saves = checkpoint.Checkpoints(tmp_path, net, optimizer)
    saves.save(1, tables=tables)
    train(net, optimizer, 2)
    tables["a"] = 2
    go_on.set()
    saves.close()
    assert not torch.equal(net.first.weight, before["first.weight"])
    saved = checkpoint.last_good(tmp_path)
    saves.load(saved)

    assert saved.get("tables") == {"a": 1}
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.equal(optimizer.state[net.first.weight]["exp_avg"], moment)


def test_pythons_generator_is_restored():
    """By itself, because beartype draws from it where it checks a container."""
    states = generator_states()
    expected = [random.random() for _ in range(700)], random.gauss(), random.gauss()
    set_generators(states)

    assert ([random.random() for _ in range(700)], random.gauss(), random.gauss()) == expected


def test_a_schedule_and_two_optimizers_are_resumed(tmp_path):
    def build(seed):
        net = Net(seed=seed)
        first = torch.optim.AdamW(net.first.parameters(), lr=1.0, betas=(0.8, 0.9))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(first, T_max=7)
        return net, [first, torch.optim.SGD(net.second.parameters(), lr=0.1)], schedule

    net, optimizers, schedule = build(0)
    train(net, optimizers[0], 2, schedule)
    with checkpoint.Checkpoints(tmp_path, net, optimizers, schedule) as saves:
        saves.save(2)
    rates = [
        schedule.get_last_lr() for _ in range(3) if optimizers[0].step() or not schedule.step()
    ]

    net, optimizers, schedule = build(1)
    optimizers[0].param_groups[0]["betas"] = (0.1, 0.1)
    with checkpoint.Checkpoints(tmp_path, net, optimizers, schedule) as saves:
        saves.load(checkpoint.last_good(tmp_path))

    assert optimizers[0].param_groups[0]["betas"] == (0.8, 0.9)
    again = [
        schedule.get_last_lr() for _ in range(3) if optimizers[0].step() or not schedule.step()
    ]
    assert again == rates


class Counter:
    def __init__(self, state):
        self._state = state

    def state(self):
        return self._state


def test_values_of_rank_0_are_restored(tmp_path):
    net = Net()
    values = {"worker": b"\0\xff", "gate": Counter({"a": [1, 2.5, None]}), "absent": None, "n": 3}
    with checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net))) as saves:
        saves.save(7, **values)

    saved = checkpoint.last_good(tmp_path)

    assert (saved.step, saved.world_size) == (7, 1)
    assert saved.get("worker") == b"\0\xff"
    assert saved.get("gate") == {"a": [1, 2.5, None]}
    assert saved.get("n") == 3
    assert saved.get("absent") is None
    assert saved.get("absent", {}) == {}


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    net = Net()
    with checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net))) as saves:
        with pytest.raises(ValueError, match=r"odd\) must be bytes or have JSON's types"):
            saves.save(1, odd=object())


def test_tensors_can_be_read_by_safetensors_itself(tmp_path):
    net = Net()
    with checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net))) as saves:
        saves.save(1)

    with safe_open(checkpoint.last_good(tmp_path).folder / "rank-00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model/second.weight@0,0"), net.second.weight)
        assert torch.equal(file.get_tensor("model/frozen@0,0"), net.frozen)


@pytest.fixture
def three(tmp_path):
    """Checkpoints after steps 1, 2 and 3; the bias tells which."""
    net = Net()
    with checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net)), keep=3) as saves:
        for step in (1, 2, 3):
            net.first.bias.data.fill_(step)
            saves.save(step)
    return tmp_path


def bias_after_loading(folder):
    net = Net(seed=1)
    with checkpoint.Checkpoints(folder, net, torch.optim.SGD(trainable(net))) as saves:
        saves.load(checkpoint.last_good(folder))
    return net.first.bias[0].item()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link(path):
    """The same file, but elsewhere."""
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGES = {
    "rank-00000.safetensors is damaged": lambda at: flip(at / "rank-00000.safetensors"),
    "rank-00000.safetensors has": lambda at: (at / "rank-00000.safetensors").write_bytes(b"short"),
    "rank-00000.safetensors is missing": lambda at: (at / "rank-00000.safetensors").unlink(),
    "state.json is damaged": lambda at: flip(at / "state.json"),
    "manifest.json is missing": lambda at: (at / "manifest.json").unlink(),
    "manifest.json cannot be read": lambda at: (at / "manifest.json").write_text('{"manifest": '),
    "manifest.json is damaged": lambda at: (at / "manifest.json").write_text(
        (at / "manifest.json").read_text().replace('"step": 3', '"step": 4')
    ),
    "it is a symbolic link": lambda at: (
        at.rename(at.with_name("mine")) and at.symlink_to(at.with_name("mine"))
    ),
    "state.json is a symbolic link": lambda at: link(at / "state.json"),
    "rank-00000.safetensors is a symbolic link": lambda at: link(at / "rank-00000.safetensors"),
    "manifest.json is a symbolic link": lambda at: link(at / "manifest.json"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(three, caplog, message):
    damaged = three / "checkpoints" / "step-00000003"
    DAMAGES[message](damaged)

    with caplog.at_level(logging.WARNING):
        assert bias_after_loading(three) == 2
    assert f"{damaged} is skipped: {message}" in caplog.text
    left = sorted(path.name for path in (three / "checkpoints").glob("step-*"))
    assert left == ["step-00000001", "step-00000002", "step-00000003.skipped"]


def sealed(at, *, manifest=None, state=None):
    """Forge content in a checkpoint, with correct digests."""
    whole = json.loads((at / "manifest.json").read_text())
    content = whole["manifest"]
    if state is not None:
        (at / "state.json").write_bytes(state)
        content["files"]["state.json"] = {
            "size": len(state),
            "digest": digest_of_file(at / "state.json"),
        }
    content = content if manifest is None else manifest(content)
    sum_ = folders.manifest_digest(content)
    (at / "manifest.json").write_text(json.dumps({"manifest": content, "digest": sum_}))


STATE = {"step": 3, "optimizer": {"groups": [], "numbers": {}}, "schedule": None, "values": {}}
DEEP = "[" * 100_000 + "]" * 100_000


def state_that_names(name):
    return {"state": json.dumps(STATE | {"bytes": {"worker": name}}).encode()}


MADE_UP = {
    "a list for a manifest": {"manifest": lambda content: [content]},
    "no files": {"manifest": lambda content: content | {"files": None}},
    "a file without a size": {"manifest": lambda content: content | {"files": {"state.json": {}}}},
    "sizes of text": {
        "manifest": lambda content: content | {"files": {"state.json": {"size": "1", "digest": ""}}}
    },
    "no format": {"manifest": lambda content: {}},
    "another format": {"manifest": lambda content: content | {"format": 2}},
    "another step": {"manifest": lambda content: content | {"step": 7}},
    "ranks that are not there": {"manifest": lambda content: content | {"world_size": 2}},
    "very many ranks": {"manifest": lambda content: content | {"world_size": 10**15}},
    "a list for a state": {"state": b"[]"},
    "nothing in the state": {"state": b"{}"},
    "null for values": {"state": json.dumps(STATE | {"values": None, "bytes": {}}).encode()},
    "numbers for names of files": {"state": json.dumps(STATE | {"bytes": {"a": 1}}).encode()},
    "a deep state": {"state": DEEP.encode()},
    "no UTF-8": {"state": b"\xff"},
    "a file two folders up": state_that_names("../../secret"),
    "a file by its full path": state_that_names("/etc/hostname"),
    "the folder above": state_that_names(".."),
    "the folder itself": state_that_names(""),
    "a file that is not in the manifest": state_that_names("stranger"),
    "a file of the manifest two folders up": {
        "manifest": lambda content: (
            content
            | {"files": content["files"] | {"../../secret": {"size": 6, "digest": SECRET_DIGEST}}}
        )
    },
}
SECRET_DIGEST = xxhash.xxh3_128_hexdigest(b"secret")


@pytest.mark.parametrize("kind", MADE_UP)
def test_a_forged_checkpoint_is_skipped_like_a_damaged_one(three, caplog, kind):
    """Whatever is in the files: the checkpoint before it is taken, and nothing outside is read."""
    (three / "secret").write_bytes(b"secret")
    damaged = three / "checkpoints" / "step-00000003"
    (damaged / "stranger").write_bytes(b"stranger")
    sealed(damaged, **MADE_UP[kind])

    saved = checkpoint.last_good(three)

    assert saved.step == 2
    assert f"{damaged} is skipped" in caplog.text
    assert saved.get("worker") is None


def test_a_deep_manifest_is_skipped(three):
    (three / "checkpoints" / "step-00000003" / "manifest.json").write_text(DEEP)

    assert checkpoint.last_good(three).step == 2


def test_numbers_that_are_not_finite_are_restored(tmp_path):
    net = Net()
    with checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net))) as saves:
        saves.save(1, gate={"least": float("inf")})

    assert checkpoint.last_good(tmp_path).get("gate") == {"least": float("inf")}


def snapshot(folder):
    return {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_again(three):
    """An error that names each, what is wrong with it, and what to do; and nothing changes."""
    flip(three / "checkpoints" / "step-00000001" / "state.json")
    (three / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    (three / "checkpoints" / "step-00000003" / "rank-00000.safetensors").unlink()
    before = snapshot(three)

    with pytest.raises(ValueError, match="none of the 3 checkpoint.* is undamaged") as refused:
        checkpoint.last_good(three)

    for part in (
        "step-00000001: state.json is damaged",
        "step-00000002: manifest.json is missing",
        "step-00000003: rank-00000.safetensors is missing",
        "Restore one of these folders from a copy; to start again from step 0, choose another",
    ):
        assert part in str(refused.value)
    assert snapshot(three) == before


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "has no checkpoint to resume from .no .*checkpoints/step-NNNNNNNN"),
        (["notes.txt"], "has no checkpoint to resume from"),
        (["checkpoints/step-00000001.partial/state.json"], "has only step-00000001.partial from"),
        (["checkpoints/step-00000001.skipped/state.json"], "has only step-00000001.skipped from"),
        (["checkpoints/mine/state.json"], "has no checkpoint to resume from"),
    ],
)
def test_a_folder_without_a_checkpoint_is_no_run_to_resume(tmp_path, names, message):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = snapshot(tmp_path)

    with pytest.raises(ValueError, match=message):
        checkpoint.last_good(tmp_path)

    assert snapshot(tmp_path) == before


def test_a_missing_folder_is_not_created(tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*mistyped to resume from"):
        checkpoint.last_good(tmp_path / "mistyped")

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("begin", ["load", "save"])
def test_a_new_run_refuses_a_folder_that_holds_checkpoints_and_changes_nothing(three, begin):
    (three / "checkpoints" / "step-00000004.partial").mkdir()
    before = snapshot(three)
    net = Net()
    saves = checkpoint.Checkpoints(three, net, torch.optim.SGD(trainable(net)), keep=1)

    with pytest.raises(ValueError, match="already holds checkpoints, up to step-00000003"):
        saves.load(checkpoint.Saved()) if begin == "load" else saves.save(1, wait=True)

    assert snapshot(three) == before


def test_a_load_that_fails_changes_nothing(three):
    flip(three / "checkpoints" / "step-00000003" / "state.json")
    (three / "checkpoints" / "step-00000009.partial").mkdir()
    before = snapshot(three)
    other = Net(width=5)
    with checkpoint.Checkpoints(three, other, torch.optim.SGD(trainable(other))) as saves:
        with pytest.raises(ValueError, match="does not fit"):
            saves.load(checkpoint.last_good(three))

    assert snapshot(three) == before


def test_skipped_checkpoints_are_all_kept(three):
    for _ in range(2):
        flip(three / "checkpoints" / "step-00000003" / "state.json")
        net = Net()
        with checkpoint.Checkpoints(three, net, torch.optim.SGD(trainable(net)), keep=3) as saves:
            saves.load(checkpoint.last_good(three))
            saves.save(3)

    left = sorted(path.name for path in (three / "checkpoints").glob("step-00000003*"))
    assert left == ["step-00000003", "step-00000003.skipped", "step-00000003.skipped-2"]


def test_only_what_saves_left_is_removed(tmp_path):
    """What only looks like it is not, nor what a link leads to."""
    inside = tmp_path / "checkpoints"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    (inside / "step-by-step.partial").mkdir(parents=True)
    (inside / "step-00000003.partial").mkdir()
    (inside / "step-00000002.removed").write_text("a file")
    (inside / "step-00000001.removed").symlink_to(tmp_path / "mine")
    net = Net()
    with checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net))) as saves:
        saves.save(1)

    assert (tmp_path / "mine" / "file").read_text() == "kept"
    assert sorted(path.name for path in inside.iterdir()) == [
        "step-00000001",
        "step-00000001.removed",
        "step-00000002.removed",
        "step-by-step.partial",
    ]


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/b", "..", ""])
def test_a_value_s_name_does_not_lead_out_of_the_folder(tmp_path, name):
    net = Net()
    with checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net))) as saves:
        with pytest.raises(ValueError, match="a value is named"):
            saves.save(1, **{name: b"content"})


def test_without_verification_only_sizes_are_compared(three):
    flip(three / "checkpoints" / "step-00000003" / "rank-00000.safetensors")

    assert checkpoint.last_good(three, verify=False).step == 3
    assert checkpoint.last_good(three).step == 2


def test_what_was_not_verified_is_verified_by_the_load(three):
    flip(three / "checkpoints" / "step-00000003" / "rank-00000.safetensors")
    net = Net()
    with checkpoint.Checkpoints(three, net, torch.optim.SGD(trainable(net))) as saves:
        before = net.state_dict()
        with pytest.raises(ValueError, match=r"step-00000003 is damaged .*rank-00000.*skipped"):
            saves.load(checkpoint.last_good(three, verify=False))
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        saved = checkpoint.last_good(three, verify=False)
        assert not saved.verified
        assert saves.load(saved) == 2
    left = [path.name for path in (three / "checkpoints").glob("step-00000003*")]
    assert left == ["step-00000003.skipped"]


def test_what_rank_0_saved_is_verified_in_any_case(three):
    flip(three / "checkpoints" / "step-00000003" / "state.json")
    assert checkpoint.last_good(three, verify=False).step == 2


@pytest.mark.parametrize(("saved", "world_size"), [(5, 1), (5, 2), (5, 3), (2, 4)])
def test_ranks_share_the_files_to_verify(tmp_path, monkeypatch, saved, world_size):
    files = {
        folders.rank_file(rank): reading.FileRecord(0, f"digest {rank}") for rank in range(saved)
    }
    manifest = reading.CheckpointManifest(format=1, step=3, world_size=saved, files=files)
    monkeypatch.setattr(reading, "read_manifest", lambda path: manifest)
    monkeypatch.setattr(reading, "member", lambda folder, name: folder / name)
    seen = []
    monkeypatch.setattr(reading, "_require_digest", lambda file, record: seen.append(file.name))
    for rank in range(world_size):
        reading.verify_share(tmp_path, rank=rank, world_size=world_size)
    assert sorted(seen) == sorted(files)


def test_no_folder_is_a_new_run(tmp_path):
    saved = checkpoint.last_good(None)

    assert (saved.folder, saved.step, saved.get("worker")) == (None, 0, None)
    net = Net()
    with checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net))) as saves:
        assert saves.load(saved) == 0


def test_the_last_ones_are_kept_and_remains_are_removed(tmp_path):
    net = Net()
    folder = tmp_path / "checkpoints"
    for name in ("step-00000009.partial", "step-00000001.removed"):
        (folder / name).mkdir(parents=True)
    (folder / "mine").mkdir()
    with checkpoint.Checkpoints(
        tmp_path, net, torch.optim.SGD(trainable(net)), keep=2, every=2
    ) as saves:
        for step in filter(saves.due, range(1, 10)):
            saves.save(step)

    assert sorted(path.name for path in folder.iterdir()) == [
        "mine",
        "step-00000006",
        "step-00000008",
    ]


def test_the_same_step_can_be_saved_again(three):
    net = Net()
    with checkpoint.Checkpoints(three, net, torch.optim.SGD(trainable(net)), keep=1) as saves:
        saves.load(checkpoint.last_good(three))
        net.first.bias.data.fill_(30)
        saves.save(3)

    assert len(list((three / "checkpoints").iterdir())) == 1
    assert bias_after_loading(three) == 30


def test_a_step_that_is_saved_again_is_there_while_the_earlier_one_is_removed(three, monkeypatch):
    kept = []
    rmtree = folders.shutil.rmtree

    def looking(path, **options):
        kept.append(checkpoint.last_good(three).step)
        rmtree(path, **options)

    net = Net()
    with checkpoint.Checkpoints(three, net, torch.optim.SGD(trainable(net)), keep=1) as saves:
        saves.load(checkpoint.last_good(three))
        monkeypatch.setattr(folders.shutil, "rmtree", looking)
        saves.save(3)

    assert kept
    assert set(kept) == {3}


def test_by_default_no_checkpoint_is_due(tmp_path):
    net = Net()
    with checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net))) as saves:
        assert not any(map(saves.due, range(10)))


def test_the_last_step_is_due_in_any_case(tmp_path):
    net = Net()
    optimizer = torch.optim.SGD(trainable(net))
    with checkpoint.Checkpoints(tmp_path, net, optimizer, every=4, last=6) as saves:
        assert [step for step in range(1, 9) if saves.due(step)] == [4, 6, 8]
    with checkpoint.Checkpoints(tmp_path, net, optimizer, last=6) as saves:
        assert [step for step in range(1, 9) if saves.due(step)] == [6]


def test_an_interrupted_run_says_how_to_resume_in_its_only_line(three, capsys, monkeypatch):
    monkeypatch.chdir(three.parent)
    net = Net()
    optimizer = OPTIMIZERS["plain SGD"](trainable(net))

    with pytest.raises(SystemExit) as ended, track.interruptible():
        with checkpoint.Checkpoints(three, net, optimizer):
            raise KeyboardInterrupt

    assert ended.value.code == 130
    assert capsys.readouterr().err == (
        f"stopped by Ctrl-C; step 3 is saved. To continue: --resume {three.name}\n"
    )


def test_a_loop_that_was_told_to_stop_leaves_with_exit_code_143():
    stopped = checkpoint.Stopped(5)

    assert stopped.code == 143
    assert str(stopped).startswith("told to stop after step 5")
    assert isinstance(stopped, SystemExit)


def test_an_error_while_writing_is_raised_by_the_next_call(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    net = Net()
    saves = checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net)))
    saves.save(1)
    saves.close()
    monkeypatch.setattr(writing, "write_pieces", fail)
    saves.save(2)
    with pytest.raises(RuntimeError, match="an earlier checkpoint could not be saved: .*No space"):
        saves.save(3)
    with pytest.raises(RuntimeError, match="No space"):
        saves.save(4, wait=True)
    saves.close()

    assert checkpoint.last_good(tmp_path).step == 1


def test_close_does_not_wait_for_ever(tmp_path, monkeypatch):
    net, go_on = Net(), threading.Event()
    saves = checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net)), timeout_s=0.1)

    def wait(*arguments):
        go_on.wait(60)
        raise ValueError

    monkeypatch.setattr(writing, "write_pieces", wait)
    saves.save(1)
    with pytest.raises(RuntimeError, match="took longer than 0 s"):
        saves.close()
    go_on.set()


def saved_by(net, optimizer, folder, schedule=None):
    with checkpoint.Checkpoints(folder, net, optimizer, schedule) as saves:
        saves.save(1)
    return checkpoint.last_good(folder)


def wider(net):
    return Net(width=5)


def lacks_a_parameter(net):
    del net.unused
    return net


def has_another(net):
    net.another = nn.Parameter(torch.zeros(1))
    return net


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wider, r"model/first.weight is \(\(5, 3\), torch.float32\) here, but \(\(4, 3\)"),
        (lacks_a_parameter, "the model has no unused, which was saved"),
        (has_another, "another is in only one of them"),
        (
            lambda net: net.double(),
            r"torch.float64\) here, but .*torch.float32\) in the checkpoint",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change, message):
    saved = saved_by(net := Net(), torch.optim.SGD(trainable(net)), tmp_path)
    other = change(Net())
    with checkpoint.Checkpoints(tmp_path, other, torch.optim.SGD(trainable(other))) as saves:
        with pytest.raises(ValueError, match=message):
            saves.load(saved)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    net = Net()
    optimizer = torch.optim.SGD(trainable(net), momentum=0.9)
    train(net, optimizer, 1)
    saved = saved_by(net, optimizer, tmp_path)
    for other, message in [
        (torch.optim.AdamW(trainable(net)), "exp_avg was not saved"),
        (torch.optim.SGD(net.first.parameters()), "is in only one of them"),
        (torch.optim.SGD([{"params": [p]} for p in trainable(net)]), "grouped differently"),
    ]:
        with checkpoint.Checkpoints(tmp_path, net, other) as saves:
            with pytest.raises(ValueError, match=message):
                saves.load(saved)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    with checkpoint.Checkpoints(tmp_path / "new", net, stranger) as saves:
        with pytest.raises(ValueError, match="not the model's; create the optimizer after"):
            saves.save(1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with checkpoint.Checkpoints(tmp_path, net, optimizer, schedule) as saves:
        with pytest.raises(ValueError, match="a schedule was given, but none was saved"):
            saves.load(saved)


def test_a_part_that_is_missing_is_named(tmp_path):
    from primerl._common.tensor_pieces import TensorPiece
    from primerl.checkpoint.resharding import whole_shapes

    half = TensorPiece(name="w", shape=(4, 2), offsets=(2, 0), values=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="w: only 4 of its 8 elements were saved"):
        whole_shapes([half])


def test_a_folder_can_be_moved(three):
    moved = three.with_name("moved")
    shutil.move(three, moved)

    assert bias_after_loading(moved) == 3


def test_no_pickle_is_written(three):
    for path in three.rglob("*"):
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.is_file():
            assert path.suffix == ".safetensors"


@pytest.mark.parametrize("wrong", [{"every": -1}, {"keep": 0}, {"timeout_s": 0}])
def test_numbers_out_of_range_are_refused(tmp_path, wrong):
    net = Net()
    with pytest.raises(ValueError, match="expected every of at least 0"):
        checkpoint.Checkpoints(tmp_path, net, torch.optim.SGD(trainable(net)), **wrong)
    with pytest.raises(ValueError, match="folder is None on rank 0"):
        checkpoint.Checkpoints(None, net, torch.optim.SGD(trainable(net)))
