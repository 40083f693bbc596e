"""Run by torchrun in test_parallel.py: every check once, on all ranks; rank 0 reports."""

import json
import math
import sys
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from primerl import loss, models, packing, parallel, testing, weights
from primerl.loss import linear_head
from primerl.types import NOT_SAMPLED, TrainingSample

LENGTHS = [5, 17, 9, 3, 30, 12, 2, 8, 21, 4]
FAMILIES = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen3": {"num_hidden_layers": 3},
    "qwen3_moe": {},
}
STEPS = 3


@attrs.frozen(eq=False)
class Bundle:
    """Fields of every kind that may be sent."""

    ids: torch.Tensor
    mask: torch.Tensor
    half: torch.Tensor
    table: torch.Tensor
    scalar: torch.Tensor
    empty: torch.Tensor
    nothing: torch.Tensor | None
    sometimes: torch.Tensor | None
    number: float
    text: str


def bundle(rank, index):
    generator = torch.Generator().manual_seed(10 * rank + index)
    length = 1 + 7 * rank + 3 * index

    def random(*shape, dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Bundle(
        ids=torch.arange(length) * 2**40,
        mask=random(length, dtype=torch.float32) > 0,
        half=random(length, dtype=torch.bfloat16),
        table=random(length, 3, dtype=torch.float64).T,  # not contiguous
        scalar=torch.tensor(float("nan")),
        empty=torch.zeros(0, 4, dtype=torch.int32),
        nothing=None,
        sometimes=random(2, dtype=torch.float16) if rank % 2 else None,
        number=0.1 + rank,
        text="dépêche",
    )


def same(a, b):
    for field in attrs.fields(type(a)):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            if x.dtype != y.dtype or x.shape != y.shape:
                return False
            if not torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)):
                return False
        elif x != y or type(x) is not type(y):
            return False
    return True


def samples():
    rng = np.random.default_rng(0)
    made = []
    for length in LENGTHS:
        mask = np.arange(length) >= 1 + length // 3
        made.append(
            TrainingSample(
                token_ids=rng.integers(2, 60, length),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -4 - 0.1 * rng.random(length), 0.0),
                versions=np.where(mask, 0, NOT_SAMPLED),
                advantages=np.where(mask, rng.standard_normal(length), 0.0),
            )
        )
    return made


def packed_for(world_size):
    """Each rank's micro-batches; in the last of them one rank alone has a row to train."""
    many = packing.pack(samples(), max_tokens=30, ranks=world_size)
    one = packing.pack(samples()[:1], max_tokens=30, ranks=world_size)
    return [[*ranks, *last] for ranks, last in zip(many, one, strict=True)]


HEADS = []  # of each forward pass: the rows and the shape of the weight that stood in for the head


def recorded(hidden, weight, labels, temperature, rows):
    HEADS.append((int(rows.sum()), list(weight.shape), type(weight).__name__))
    return linear_head.head_logprobs(hidden, weight, labels, temperature, rows)


def train(model, packed, *, is_first):
    """The loss and gradient norm of a few steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    history = []
    for _ in range(STEPS):
        batches = parallel.scatter(packed if is_first else None, packing.PackedBatch)
        trained = parallel.all_sum(sum(int(batch.loss_mask.sum()) for batch in batches))
        total = torch.zeros(())
        for b in batches:
            logprobs, entropy = loss.model_logprobs_and_entropy(
                model, b.token_ids, b.position_ids, b.labels, rows=b.loss_mask
            )
            per_token, _ = loss.dppo(logprobs, b.behavior_logprobs, b.advantages)
            per_token = per_token - 0.01 * entropy
            mean = loss.token_mean(per_token, b.loss_mask, denom=trained)
            mean.backward()
            total += mean.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        history.append([parallel.all_sum(total).item(), norm.item()])
    return history


class Engine:
    def update_weights(self, tensors, *, version, timeout_s=1.0):
        self.taken = {name: tensor.clone() for name, tensor in tensors.items()}


def alone(model, packed):
    """The same training, before the ranks connect: a world of one."""
    return {"history": train(model, packed, is_first=True), "weights": model.state_dict()}


def family(kind, config, world, reference, folder):
    """How a sharded model of one family compares with the unsharded one."""
    # Only rank 0's weights count.
    model = testing.tiny_model(kind.split(",")[0], seed=world.rank, **config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    distinct = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    names = sorted(set(before) & distinct)
    whole = sum(parameter.numel() for parameter in model.parameters())
    engine = Engine()
    parallel.shard(model)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    transport = weights.SharedMemory(model, *([engine] if world.is_first else []))
    transport.publish(0)
    found = {"shares": parallel.all_sum(held).item() / whole}
    if world.is_first:
        found["sent"] = sorted(engine.taken)
        found["names"] = names
        found["sent_exactly"] = all(torch.equal(engine.taken[n], before[n]) for n in engine.taken)
    packed = packed_for(world.world_size)
    HEADS.clear()
    found["history"] = train(model, packed, is_first=world.is_first)
    found["heads"] = list(HEADS)
    found["head_shape"] = list(before["lm_head.weight"].shape)
    transport.publish(1)
    head = model.get_output_embeddings().weight
    found["tied"] = head is model.get_input_embeddings().weight
    target = folder / kind.replace(", ", "-") if world.is_first else None
    tokenizer = testing.character_tokenizer("abc")
    models.save_pretrained(model, target, tokenizer=tokenizer)
    if world.is_first:
        found["micro_batches"] = len(packed[0])
        found["single"] = reference["history"]
        gaps = [(engine.taken[n] - reference["weights"][n]).abs().max() for n in engine.taken]
        found["moved"] = max((engine.taken[n] - before[n]).abs().max() for n in names).item()
        found["weights"] = max(gaps).item()
        loaded = models.load_pretrained(target)[0].state_dict()
        found["saved"] = all(torch.equal(loaded[n], engine.taken[n]) for n in engine.taken)
        found["loaded"] = sorted(loaded) == sorted(before)
    return found


def refusal(call):
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return None


def guarded(world):
    """Updates of a sharded model in which one rank meets a NaN, in its loss or in its gradient."""
    model = parallel.shard(testing.tiny_model("llama", seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = parallel.UpdateGuard(on_nonfinite="skip")
    allowed, moved = [], []
    for bad_loss, bad_gradient in [(None, None), (1, None), (None, 2), (None, None)]:
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        logprobs = loss.model_logprobs(
            model,
            torch.tensor([5, 6, 7]),
            torch.arange(3),
            torch.tensor([6, 7, 8]),
            rows=torch.tensor([True, True, False]),
        )
        (logprobs.sum() * (math.nan if world.rank == bad_gradient else 1.0)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        allowed.append(guard.allows(math.nan if world.rank == bad_loss else 0.0, norm))
        if allowed[-1]:
            optimizer.step()
        optimizer.zero_grad()
        after = [parameter.to_local() for parameter in model.parameters()]
        moved.append(any(not torch.equal(x, y) for x, y in zip(before, after, strict=True)))
    stopping = parallel.UpdateGuard(on_nonfinite="stop")
    try:
        stopping.allows(math.inf if world.rank == 1 else 0.0, 1.0)
    except RuntimeError as error:
        stopped = str(error)
    by_name = {"b": torch.tensor([1.0, world.rank]), "a": torch.tensor(world.rank)}
    sums = {name: total.tolist() for name, total in parallel.all_sum(by_name).items()}
    return [allowed, moved, guard.skipped, stopped, sums]


def split_head(world):
    """How far the logprobs of a model whose head is split over ranks are from those of one."""
    model = testing.tiny_model("qwen3", seed=0, vocab_size=63)
    inputs = (torch.tensor([5, 6, 7]), torch.arange(3), torch.tensor([6, 7, 8]))
    rows = torch.tensor([True, True, False])
    expected = loss.model_logprobs(model, *inputs, rows=rows)
    mesh = init_device_mesh("cpu", (world.world_size,))
    columns = ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
    parallelize_module(model, mesh, {"lm_head": columns})
    return (loss.model_logprobs(model, *inputs, rows=rows) - expected).abs().max().item()


class Shares(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.layers[1].weight = self.layers[0].weight


def main(folder):
    torch.set_num_threads(1)
    loss.logprobs.head_logprobs = recorded
    world = parallel.process_group(timeout_s=120)
    references = {}
    if world.is_first:
        packed = packed_for(1)
        for kind, config in FAMILIES.items():
            model = testing.tiny_model(kind.split(",")[0], seed=0, **config)
            references[kind] = alone(model, packed)
    found = {}
    with world:
        sent = None
        if world.is_first:
            sent = [[bundle(r, i) for i in range(2)] for r in range(world.world_size)]
        got = parallel.scatter(sent, Bundle)
        right = len(got) == 2 and all(same(bundle(world.rank, i), got[i]) for i in range(2))
        found["scattered_exactly"] = parallel.all_sum(int(right)).item()
        found["nothing_scattered"] = parallel.all_sum(
            len(parallel.scatter([[] for _ in range(3)] if world.is_first else None, Bundle))
        ).item()
        few = packing.pack(samples()[:1], max_tokens=40, ranks=3) if world.is_first else None
        (batch,) = parallel.scatter(few, packing.PackedBatch)
        found["fillers"] = parallel.all_sum(int(not batch.loss_mask.any())).item()
        found["first"] = parallel.from_first_rank([world.rank, "a"])
        unsendable = refusal(lambda: parallel.from_first_rank(torch.ones(1)))
        found["unsendable"] = unsendable
        rows = [{"r": torch.tensor([world.rank, 7]), "s": torch.zeros(0)}, {}]
        found["gathered"] = [
            [{name: value.tolist() for name, value in one.items()} for one in mine]
            for mine in parallel.gather(rows)
        ]
        found["nothing_gathered"] = parallel.gather([])
        if world.is_first:
            found["uneven_rows"] = refusal(lambda: parallel.gather([{}]))
        else:
            parallel.gather([])
        found["sums"] = [
            parallel.all_sum(2**40 + world.rank).item(),
            parallel.all_sum(0.1 * world.rank).item(),
            parallel.all_sum(torch.tensor([1.0, float(world.rank)])).tolist(),
        ]
        if not world.is_first:
            found["batches_of_others"] = refusal(lambda: parallel.scatter([[bundle(0, 0)]], Bundle))
        else:
            found["too_few_lists"] = refusal(lambda: parallel.scatter([[]], Bundle))
            uneven = [[bundle(0, 0)], [], []]
            found["uneven"] = refusal(lambda: parallel.scatter(uneven, Bundle))
        misplaced = [] if world.is_first else [Engine()]
        found["engines"] = refusal(lambda: weights.SharedMemory(nn.Linear(2, 2), *misplaced))
        found["shared"] = refusal(lambda: parallel.shard(Shares()))
        found["guarded"] = guarded(world)
        found["split_head"] = split_head(world)
        for kind, config in FAMILIES.items():
            found[kind] = family(kind, config, world, references.get(kind), folder)
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
