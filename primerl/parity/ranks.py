"""Run by torchrun for ``parity``: each family, on each mesh, on all ranks; rank 0 writes findings.

Both arguments are paths: the plan that it reads (JSON), and the findings that it adds to (JSON
Lines). A line says which cases are done, so that the next launch continues after one that dies.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from primerl import parallel
from primerl.attention.admission import refuse_unpackable
from primerl.parity import training as parity_training
from primerl.parity.checks import Finding, MeshPlan, differences, on_mesh
from primerl.parity.reference import Document, Training, sampled, train
from primerl.parity.training import batches_of, documents_of, score
from primerl.testing.families import BUILD_ERRORS, refuse_full_size, tiny_family

T = TypeVar("T")
SAID = 400
"""Bytes of what went wrong on a rank that the others learn."""


def main(plan_file: str, findings_file: str) -> None:
    """Compare every family of the plan on all of its meshes, but for those that are done."""
    torch.set_num_threads(1)
    plan = json.loads(Path(plan_file).read_text())
    world = parallel.process_group(timeout_s=plan["timeout_s"])
    with world, tempfile.TemporaryDirectory() as folder:
        control = dist.new_group(timeout=timedelta(seconds=2 * plan["timeout_s"]))
        for task in plan["tasks"]:
            for findings in _family(task, control, Path(folder) if world.is_first else None):
                if world.is_first:
                    with Path(findings_file).open("a") as file:
                        file.writelines(json.dumps(attrs.asdict(f)) + "\n" for f in findings)


def _family(task: dict[str, Any], control: dist.ProcessGroup, folder: Path | None) -> Any:
    """The findings of one family: of one process, then of each mesh."""
    name, family, settings = task["name"], task["family"], task["settings"]
    plans = [MeshPlan(**fields) for fields in task["meshes"]]
    optimizers = {plan.optimizer for plan in plans} | {"adamw"}
    alone, trouble = _agreed(lambda: _one_process(family, settings, optimizers), control)
    if alone is None:
        yield [_trouble(name, "1 process", trouble)]
        return
    if not task["done"]:
        yield [Finding(family=name, mesh="1 process", check=c, figure=f) for c, f in alone.figures]
    for number, plan in enumerate(plans):
        if number < task["done"]:
            continue
        saved = folder and folder / f"{name}-{number}"
        compare = partial(on_mesh, family, settings, alone.sequences, plan=plan, folder=saved)
        found, trouble = _agreed(partial(compare, alone.references[plan.optimizer]), control)
        if found is None:
            yield [_trouble(name, plan.name, trouble)]
        else:
            yield [Finding(family=name, mesh=plan.name, check=c, figure=f) for c, f in found]


@attrs.frozen(eq=False)
class _Alone:
    """What one process found."""

    sequences: list[Document]
    references: dict[str, Training]
    """By optimizer."""
    figures: list[tuple[str, float]]
    """How this library differs from the reference, packed but not sharded."""


def _one_process(name: str, settings: dict[str, Any], optimizers: set[str]) -> _Alone:
    """The references, and how this library's packed training differs from the first.

    Raises:
        ValueError: the family is refused.
        AssertionError: ``parallel.shard`` refuses it, and ``loss.model_logprobs`` does not.
    """
    try:
        model = tiny_family(name, **settings)
    except ValueError:
        refuse_full_size(name)  # for a better reason, if there is one
        raise
    drawn = documents_of(model)
    try:
        refuse_unpackable(model)
    except ValueError as refusal:
        _require_refusal(model, drawn, refusal)
        raise
    try:
        sequences = sampled(model, drawn)
        references = {
            optimizer: train(tiny_family(name, **settings), sequences, optimizer=optimizer)
            for optimizer in sorted(optimizers)
        }
    except BUILD_ERRORS as error:
        raise ValueError(f"transformers itself fails to run it: {error}") from error
    (batches,) = batches_of(sequences)
    model = tiny_family(name, **settings)
    ours = parity_training.train(model, batches, references["adamw"], all_sum=torch.as_tensor)
    return _Alone(sequences, references, list(differences(ours, references["adamw"])))


def _require_refusal(model: Any, drawn: list[Document], refusal: ValueError) -> None:
    (batches,) = batches_of(drawn)
    for batch in batches:
        if len(batch.cu_seqlens) > 2:  # one document alone leaks nothing
            try:
                score(model, batch)
            except ValueError:
                continue
            raise AssertionError(f"shard refuses what model_logprobs does not: {refusal}") from None


def _agreed(compute: Callable[[], T], control: dist.ProcessGroup) -> tuple[T | None, str]:
    """The result of ``compute``, if no rank raised; otherwise what was said, by the first to.

    Raises:
        RuntimeError: some ranks raised and some did not, so that they can't go on together.
    """
    result, said = None, ""
    try:
        result = compute()
    except (*BUILD_ERRORS, dist.DistError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        said = (kind or "refused: ") + " ".join(str(error).split())
    text = said.encode()[:SAID].ljust(SAID, b"\0")
    every = [torch.zeros(SAID, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.frombuffer(bytearray(text), dtype=torch.uint8), group=control)
    words = [bytes(one.numpy()).rstrip(b"\0").decode(errors="replace") for one in every]
    if not any(words):
        return result, ""
    own = [w for w in words if w and "gloo" not in w]  # not those that only lost a connection
    if all(words) and len(own) == len(words):
        return None, own[0]
    rank = words.index(own[0]) if own else words.index(max(words))
    raise RuntimeError(f"rank {rank} failed: {words[rank]}")


def _trouble(family: str, mesh: str, said: str) -> Finding:
    check = "refused" if said.startswith("refused: ") else "raised"
    return Finding(family=family, mesh=mesh, check=check, note=said.removeprefix("refused: "))


if __name__ == "__main__":
    main(*sys.argv[1:])
