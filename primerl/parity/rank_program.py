"""The program that torchrun runs on each rank for ``parity``: compares families on meshes.

Its arguments are two paths: the plan (JSON), and the findings to append to (JSON Lines). Rank 0
writes findings, from which the next launch continues after a crash.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
import torch
import torch.distributed as dist

from primerl import parallel
from primerl._common.ranks import exchange
from primerl.attention.admission import refuse_unpackable
from primerl.parity import mesh_training as parity_training
from primerl.parity.checks import Finding, MeshPlan, differences, on_mesh
from primerl.parity.mesh_training import make_batches, model_documents, score
from primerl.parity.reference import ReferenceDocument, Training, sampled, train
from primerl.testing.families import BUILD_ERRORS, refuse_full_size, tiny_family

T = TypeVar("T")


def main(plan_file: str, findings_file: str) -> None:
    """Compare every model family of the plan on its remaining meshes, and append the findings."""
    torch.set_num_threads(1)
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    world = parallel.process_group(timeout_s=plan["timeout_s"])
    with world, tempfile.TemporaryDirectory() as folder:
        control = dist.new_group(timeout=timedelta(seconds=2 * plan["timeout_s"]))
        for task in plan["tasks"]:
            for findings in _family(task, control, Path(folder) if world.is_first else None):
                if world.is_first:
                    with Path(findings_file).open("a", encoding="utf-8") as file:
                        file.writelines(json.dumps(attrs.asdict(f)) + "\n" for f in findings)


def _family(task: dict[str, Any], control: dist.ProcessGroup, folder: Path | None) -> Any:
    """Yield the findings for one family: in one process, then on each mesh."""
    name, family, settings = task["name"], task["family"], task["settings"]
    plans = [MeshPlan(**fields) for fields in task["meshes"]]
    optimizers = {plan.optimizer for plan in [*plans, MeshPlan()]}
    alone, trouble = _agreed(lambda: _one_process(family, settings, optimizers), control)
    if alone is None:
        yield [_trouble(name, "1 process", trouble)]
        return
    if not task["done"]:
        yield [
            Finding(family=name, mesh="1 process", check=c, measured=f)
            for c, f in alone.measurements
        ]
    for number, plan in enumerate(plans):
        if number < task["done"]:
            continue
        saved = folder and folder / f"{name}-{number}"
        compare = partial(on_mesh, family, settings, alone.sequences, plan=plan, folder=saved)
        found, trouble = _agreed(partial(compare, alone.references[plan.optimizer]), control)
        if found is None:
            yield [_trouble(name, plan.name, trouble)]
        else:
            yield [Finding(family=name, mesh=plan.name, check=c, measured=f) for c, f in found]


@attrs.frozen(eq=False)
class _Alone:
    """The reference results of one process, and differences without sharding."""

    sequences: list[ReferenceDocument]
    references: dict[Literal["adamw", "muon"], Training]
    """Reference results by optimizer."""
    measurements: list[tuple[str, float]]
    """Differences between unsharded packed training by this library and the reference."""


def _one_process(
    name: str, settings: dict[str, Any], optimizers: set[Literal["adamw", "muon"]]
) -> _Alone:
    """Train the references, and compare this library's packed training with AdamW's."""
    try:
        model = tiny_family(name, **settings)
    except ValueError:
        refuse_full_size(name)  # its error may give a better reason
        raise
    drawn = model_documents(model)
    try:
        refuse_unpackable(model)
    except ValueError as refusal:
        _require_refusal(model, drawn, refusal)
        raise
    try:
        sequences = sampled(plain_family(name, **settings), drawn)
        references = {
            optimizer: train(plain_family(name, **settings), sequences, optimizer=optimizer)
            for optimizer in sorted(optimizers)
        }
    except BUILD_ERRORS as error:
        raise ValueError(f"plain transformers code fails to train it: {error}") from error
    (batches,) = make_batches(sequences)
    model = tiny_family(name, **settings)
    ours = parity_training.train(model, batches, references["adamw"], all_sum=torch.as_tensor)
    return _Alone(sequences, references, list(differences(ours, references["adamw"])))


def plain_family(name: str, **settings: Any) -> Any:
    """Make a family's tiny model with the attention of its definition.

    With capped scores that is ``eager``: in transformers, ``sdpa`` does not cap them.
    """
    model = tiny_family(name, **settings)
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


def _require_refusal(model: Any, drawn: list[ReferenceDocument], refusal: ValueError) -> None:
    (batches,) = make_batches(drawn)
    for batch in batches:
        if len(batch.cu_seqlens) > 2:  # one document alone leaks nothing
            try:
                score(model, batch)
            except ValueError:
                continue
            raise AssertionError(f"model_logprobs accepts what shard refuses: {refusal}") from None


def _agreed(compute: Callable[[], T], control: dist.ProcessGroup) -> tuple[T | None, str]:
    """Call ``compute`` on all ranks; return its result and "", or None and an error's text.

    The error is that of the first rank that raised.

    Raises:
        RuntimeError: only some of the ranks raised, so that they can't continue together.
    """
    result, message = None, ""
    try:
        result = compute()
    except (*BUILD_ERRORS, dist.DistError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        message = (kind or "refused: ") + " ".join(str(error).split())
    words = exchange(message, control)
    if not any(words):
        return result, ""
    own = [w for w in words if w and "gloo" not in w]  # without errors of lost connections
    if all(words) and len(own) == len(words):
        return None, own[0]
    rank = words.index(own[0]) if own else words.index(max(words))
    raise RuntimeError(f"rank {rank} failed: {words[rank]}")


def _trouble(family: str, mesh: str, error: str) -> Finding:
    check = "refused" if error.startswith("refused: ") else "raised"
    return Finding(family=family, mesh=mesh, check=check, note=error.removeprefix("refused: "))


if __name__ == "__main__":
    main(*sys.argv[1:])
