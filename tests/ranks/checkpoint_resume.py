"""Run by torchrun in test_checkpoint_ranks.py: trains a mixture of experts, and saves.

    checkpoint_resume.py FOLDER kill|resume

``kill`` trains without and with interruption, and is killed while it saves. ``resume`` continues
from what was saved, with another number of ranks.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from primerl import checkpoint, optim, parallel, testing
from primerl.checkpoint import rank_files, writing

STEPS = 5
ROWS = 8


def rows(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, 60, (ROWS, 16), generator=generator)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def muon(model):
    return optim.Muon(optim.muon_parameters(model), lr=1e-2)


class Run:
    """A small mixture of experts in training, sharded over all ranks."""

    def __init__(self, world, ep, seed, optimizer=adamw):
        self.world = world
        self.model = testing.tiny_model("qwen3_moe", seed=seed)
        parallel.shard(self.model, parallel.mesh(ep=ep))
        self.optimizer = optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 1 / (1 + s))

    def saves(self, folder, **options):
        folder = folder if self.world.is_first else None
        return checkpoint.Checkpoints(
            folder, self.model, self.optimizer, self.schedule, timeout_s=60, **options
        )

    def step(self, step):
        x = rows(step).chunk(self.world.world_size)[self.world.rank]
        logits = self.model(input_ids=x, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), x[:, 1:].reshape(-1), reduction="sum"
        ) / (ROWS * 15)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return parallel.all_sum(loss).item()

    def whole(self):
        """All tensors of model and optimizer, gathered."""
        state = {n: p.full_tensor() for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{name} {key}"] = value.full_tensor() if value.ndim else value.clone()
        return state


def refusal(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def uninterrupted(world, folder):
    """Losses of a run that is not interrupted, and whether asynchronous saves hold its moments."""
    run, found = Run(world, 2, seed=0), {"losses": []}
    with run.saves(folder, keep=10) as saves:
        found["begins"] = saves.load(checkpoint.Saved() if world.is_first else None)
        for step in range(STEPS):
            found["losses"].append(run.step(step))
            if step == 1:
                torch.manual_seed(world.rank)
                saves.save(2, worker=b"\0worker" if world.is_first else None, tables={"a": 1})
                found["drawn"] = torch.rand(3).tolist()
                at_two = run.whole()
    found["placements"] = sorted({str(p.placements) for p in run.model.parameters()})
    again = Run(world, 2, seed=1)
    with again.saves(folder, keep=10) as saves:
        found["went_on_at"] = saves.load(checkpoint.last_good(folder) if world.is_first else None)
        found["drawn_again"] = torch.rand(3).tolist()
        whole = again.whole()
        found["exact"] = all(torch.equal(whole[name], at_two[name]) for name in at_two)
        found["tensors"] = len(whole)
        found["after"] = [again.step(step) for step in range(2, STEPS)]
    return found


def one_rank(folder):
    """The losses of a world of one, which saved after step 2; before the ranks connect."""
    run = Run(SimpleNamespace(rank=0, world_size=1, is_first=True), 1, seed=0)
    losses = [run.step(step) for step in range(2)]
    with run.saves(folder) as saves:
        saves.save(2)
    return losses + [run.step(step) for step in range(2, STEPS)]


def from_one_rank(world, folder):
    """The losses of four ranks that resume the training of one."""
    run = Run(world, 2, seed=9)
    with run.saves(folder) as saves:
        first = saves.load(checkpoint.last_good(folder) if world.is_first else None)
    return [run.step(step) for step in range(first, STEPS)]


def by_muon(world, folder):
    """Whether Muon's state, also of expert-parallel stacks, is restored and continues."""
    run = Run(world, 2, seed=0, optimizer=muon)
    run.step(0)
    with run.saves(folder) as saves:
        saves.save(1, wait=True)
    expected = run.whole(), [run.step(step) for step in (1, 2)]
    again = Run(world, 2, seed=3, optimizer=muon)
    with again.saves(folder) as saves:
        saves.load(checkpoint.last_good(folder) if world.is_first else None)
    whole = again.whole()
    same = all(torch.equal(whole[name], tensor) for name, tensor in expected[0].items())
    return same and [again.step(step) for step in (1, 2)] == expected[1]


def misfits(world, folder):
    """The errors for a checkpoint of another model, and for a rank that can't write."""
    saved, found = checkpoint.last_good(folder) if world.is_first else None, {}
    other = Run(world, 1, seed=0)
    other.model = testing.tiny_model("qwen3_moe", seed=0, hidden_size=48)
    parallel.shard(other.model)
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    before = contents(folder)
    with other.saves(folder, keep=10) as saves:
        found["other_model"] = refusal(lambda: saves.load(saved))
    with other.saves(folder, keep=10) as saves:
        found["new_run"] = refusal(lambda: saves.load(checkpoint.Saved()))
    found["unchanged"] = contents(folder) == before
    run = Run(world, 2, seed=0)
    with run.saves(folder.with_name("failing")) as saves:
        write, writing.write_pieces = writing.write_pieces, None

        def fail(*arguments):
            if world.rank == 2:
                raise OSError(28, "No space left on device")
            return write(*arguments)

        writing.write_pieces = fail
        found["sync"] = refusal(lambda: saves.save(1, wait=True))
        saves.save(2)
        found["async"] = refusal(saves.close)
        writing.write_pieces = write
        saves.save(3)
        saves.close()
        left = folder.with_name("failing") / "checkpoints"
        found["left"] = sorted(path.name for path in left.iterdir())
    return found


def killed(world, folder):
    """Rank 1 is killed while the save after step 4 is half written; that after 2 was whole."""
    run = Run(world, 2, seed=0)
    saves = run.saves(folder, keep=1, every=2)
    for step in range(STEPS):
        run.step(step)
        if step == 3:
            saves.close()
            slow_down(world)
        if saves.due(step + 1):
            saves.save(step + 1, worker=b"of 2" if step == 1 else b"of 4")
        if step == 4:
            while len(list((folder / "checkpoints").glob("*.partial/*"))) < world.world_size:
                time.sleep(0.01)
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def slow_down(world):
    fsync = os.fsync

    def never(descriptor):
        time.sleep(60)
        fsync(descriptor)

    rank_files.os = type("Os", (), {"fsync": staticmethod(never)})


def resumed(world, folder, ep):
    """Resumes with experts divided among ``ep`` ranks, and saves elsewhere."""
    saved = checkpoint.last_good(folder) if world.is_first else None
    run = Run(world, ep, seed=7)
    with run.saves(folder.with_name(f"resumed-{ep}")) as saves:
        found = {"step": saves.load(saved), "drawn": torch.rand(2).tolist()}
        found["losses"] = [run.step(step) for step in range(found["step"], STEPS)]
    if world.is_first:
        found["worker"] = saved.get("worker").decode()
    return found


def main(folder, mode):
    torch.set_num_threads(1)
    folder, found = Path(folder), {}
    world = parallel.process_group(timeout_s=60)
    if mode == "kill" and world.is_first:
        ranks = os.environ.pop("WORLD_SIZE")  # as in a process that torchrun did not start
        alone = one_rank(folder / "one")
        os.environ["WORLD_SIZE"] = ranks
    with world:
        if mode == "kill":
            found["uninterrupted"] = uninterrupted(world, folder / "uninterrupted")
            found["from_one_rank"] = from_one_rank(world, folder / "one")
            found["one_rank"] = alone if world.is_first else None
            found["muon"] = by_muon(world, folder / "muon")
            found["misfits"] = misfits(world, folder / "uninterrupted")
        else:
            found = {ep: resumed(world, folder / "killed", ep) for ep in (2, 1)}
        (folder / f"{mode}-{world.rank}.json").write_text(json.dumps(found))
        if mode == "kill":
            killed(world, folder / "killed")


if __name__ == "__main__":
    main(*sys.argv[1:])
