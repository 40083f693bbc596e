"""The storage of a run: by hand, and against what the parts of a run really store."""

import inspect
from pathlib import Path

import pytest
import torch
from cluster_commands import planned_storage

from primerl import checkpoint, parallel, planning, testing, track, weights
from primerl.planning import storage
from primerl.planning.server_memory import published_layers
from primerl.weights.transports.publications.folder_reader import FolderReader
from primerl.weights.transports.receipts import Receipt

TB = 10**12


def rank(**sizes):
    zeros = {"parameters": 0, "gradients": 0, "optimizer": 0, "host": 0}
    return planning.RankMemory(rank=0, **zeros | sizes)


def plan_of(trainer, **changed):
    traffic = planning.Traffic(route_token=2, routes=200, weights=1000, weights_delta=10)
    arguments = {
        "published": [600, 200, 100, 100],
        "final_model": 4000,
        "models": {"FP8": 1000, "bf16": 2000},
        "step_tokens": 100,
        "steps": 5,
        "max_staleness": 3,
        "served": 400,
    }
    return planning.plan_storage(trainer, traffic, **arguments | changed)


def test_storage_is_that_computed_by_hand():
    layout = planning.TrainerLayout(nodes=2, gpus_per_node=2, replicate=2)
    trainer = planning.TrainerPlan(
        layout=layout, ranks=[rank(parameters=40, gradients=40, optimizer=2, host=80)]
    )

    found = plan_of(trainer, snapshot_every=4, checkpoints=1)

    # Rank 0 owns the layer of 600, rank 1 that of 200, and ranks 2 and 3 one of 100 each.
    # Node 0 keeps 800 of 1000 bytes of publications: two full versions and three deltas.
    counted = [160, 0, 2 * (40 + 2 + 80), 2 * 800, 2 * 800, 3 * 8]
    assert list(found.training_node.values()) == counted
    # Two of the four ranks hold a whole model, and one checkpoint is written beside the kept one.
    assert list(found.run_folder.values()) == [2 * 2 * 122, 4000, 16 * 100 * 5]
    assert list(found.shared_folder.values()) == [4 * 200]
    assert found.models == {"FP8": 1000, "bf16": 2000}
    assert sum(found.serving_node.values()) == 800
    total = 2 * 2 * 122 + 4000 + 8000 + 800 + 3000
    assert sum(found.volume.values()) == total
    assert planning.asked(found.volume) == round(1.2 * total)


def test_one_host_has_the_weights_in_its_shared_folder():
    layout = planning.TrainerLayout(nodes=1, gpus_per_node=4)
    found = plan_of(planning.TrainerPlan(layout=layout, ranks=[rank()]), snapshot_every=4)
    assert list(found.shared_folder.values()) == [2000, 3 * 10, 4 * 200]
    assert list(found.training_node.values()) == [0, 0, 0, 2 * 1000]


def test_a_large_step_is_not_recorded_in_full():
    trainer = planning.TrainerPlan(
        layout=planning.TrainerLayout(nodes=1, gpus_per_node=1), ranks=[rank()]
    )
    found = plan_of(trainer, step_tokens=2**30)
    assert found.run_folder["records of 5 steps"] == 5 * 2**22 * 16


def test_defaults_are_those_of_the_parts():
    def default(function, name):
        return inspect.signature(function).parameters[name].default

    planned = planning.plan_storage
    assert default(planned, "checkpoints") == default(checkpoint.Checkpoints, "keep")
    assert default(planned, "snapshot_every") == default(weights.Disk, "snapshot_every")
    assert default(planning.plan_step, "snapshot_every") == default(planned, "snapshot_every")
    assert default(track.Run, "record_tokens") == storage.RECORD_TOKENS


def test_a_plan_shows_storage_unless_the_layout_is_refused():
    def plan(**sizes):
        return planning.plan_run(
            lambda: testing.tiny_model("llama").to("meta"),
            prepare,
            layouts=[planning.TrainerLayout(nodes=1, gpus_per_node=2, **sizes)],
            servers=[1],
            tokens=64,
            step_tokens=1024,
            steps=3,
            max_staleness=2,
            gpu_bytes=10**9,
            max_num_seqs=2,
        )

    text = " ".join(plan().text().split())
    assert "run folder: checkpoints: 2 kept, 1 being written" in text
    assert "memory of a training node to ask for: 20% more" in text
    refused = plan(cp=3)
    assert refused.storage is None
    assert "Storage" not in refused.text()


def prepare(model, mesh):
    parallel.shard(model, mesh)
    return torch.optim.AdamW(model.parameters())


def size_of(folder, pattern="*"):
    return sum(path.stat().st_size for path in Path(folder).rglob(pattern) if path.is_file())


def test_a_checkpoint_takes_what_is_planned(tmp_path):
    model = testing.tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    (trainer,) = planning.plan_trainers(
        lambda: testing.tiny_model("llama").to("meta"),
        prepare,
        [planning.TrainerLayout(nodes=1, gpus_per_node=2)],
        tokens=0,
        gpu_bytes=10**9,
    )
    planned = plan_of(trainer).run_folder["checkpoints: 2 kept, 1 being written"]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    with checkpoint.Checkpoints(tmp_path, model, optimizer) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, wait=True)

    saved = size_of(tmp_path, "*.safetensors") / 2  # two are kept
    assert planned / 3 < saved < planned / 3 + 50_000  # generators, and names


class Server:
    """One server of one worker, in this process; it notes the size of the folder while loading."""

    def __init__(self):
        self.sizes = []

    def load_weights(self, update, *, version, timeout_s=600.0, send=None):
        self.sizes.append(size_of(update["folder"], "*.safetensors"))
        reader = FolderReader(Path(update["folder"]))
        manifest = reader.fetch(version)
        reader.close()
        receipt = {"version": version, "digest": manifest.digest}
        return {"here": [receipt | {"tensors": len(manifest.tensors), "unreached": []}]}


def test_publications_take_what_is_planned(tmp_path):
    """The folder is fullest while a second full version is loaded, after all deltas."""
    model, server = testing.tiny_model("llama"), Server()
    sent = {"encoding": "delta", "dtype": torch.bfloat16, "snapshot_every": 4}
    transport = weights.Disk(model, server, folder=tmp_path, **sent)
    receipts: list[Receipt] = []
    for version in range(6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[version] += 1
        receipts.append(transport.publish(version))

    assert [one.kind for one in receipts] == ["full", *["delta"] * 3, "full", "delta"]
    planned = sum(sum(one) for one in published_layers(model, dtype=torch.bfloat16))
    headers = 2 * (receipts[0].bytes - planned)
    deltas = sum(one.bytes for one in receipts[1:4])
    assert max(server.sizes) == server.sizes[4]
    assert 2 * planned < max(server.sizes) <= 2 * planned + deltas + headers


def test_glm5_takes_what_its_pages_say(root):
    """Three checkpoints of float32 weights and momentum: 8 bytes per parameter."""
    glm5 = planned_storage(root)
    checkpoints = glm5.run_folder["checkpoints: 2 kept, 1 being written"]
    assert checkpoints == pytest.approx(3 * 8 * 743.9e9, rel=2e-3)
    sums = f"{sum(glm5.volume.values()) / TB:.1f}, {planning.asked(glm5.volume) / TB:.1f}"
    assert f"| sum, and with 20% more | {sums} |" in (root / "docs/planning.md").read_text()
    node = round(sum(glm5.training_node.values()) / 1e9)
    page = (root / "docs/glm_swe.md").read_text()
    assert f"| all of a node's host memory that is counted | {node} |" in page
