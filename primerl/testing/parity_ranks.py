"""Run by torchrun for ``parity``: each family, on each mesh, on all ranks; rank 0 writes findings.

Both arguments are paths: the plan that it reads (JSON), and the findings that it adds to (JSON
Lines). A line says which cases are done, so that a launch that dies can be gone on with.
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
from primerl.attention import refuse_unpackable
from primerl.testing.families import BUILD_ERRORS, refuse_full_size, tiny_family
from primerl.testing.parity_checks import Finding, differences, on_mesh
from primerl.testing.parity_training import (
    Training,
    batches_of,
    each_alone,
    packed,
    tokens_of,
    train,
)

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
    reference, alone = _agreed(lambda: _one_process(family, settings), control)
    if reference is None:
        yield [_trouble(name, "1 process", alone)]
        return
    if not task["done"]:
        yield [Finding(family=name, mesh="1 process", check=c, figure=f) for c, f in reference[1]]
    for number, mesh in enumerate(task["meshes"]):
        if number < task["done"]:
            continue
        saved = folder and folder / "saved"
        how = {"recompute": mesh["recompute"], "sizes": mesh["sizes"], "folder": saved}
        found, trouble = _agreed(partial(on_mesh, family, settings, reference[0], **how), control)
        if found is None:
            yield [_trouble(name, mesh["name"], trouble)]
        else:
            yield [Finding(family=name, mesh=mesh["name"], check=c, figure=f) for c, f in found]


def _one_process(name: str, settings: dict[str, Any]) -> tuple[Training, list[tuple[str, float]]]:
    """The reference, and how this library's packed logprobs differ from it.

    Raises:
        ValueError: the family is refused.
        AssertionError: ``parallel.shard`` refuses it, and ``loss.model_logprobs`` does not.
    """
    try:
        model = tiny_family(name, **settings)
    except ValueError:
        refuse_full_size(name)  # for a better reason, if there is one
        raise
    batches = batches_of(model)
    try:
        refuse_unpackable(model)
    except ValueError as refusal:
        for batch in batches:
            try:
                packed(model, batch)
            except ValueError:
                continue
            raise AssertionError(f"shard refuses what model_logprobs does not: {refusal}") from None
        raise
    trained = tokens_of(batches)
    try:
        reference = train(model, batches, each_alone, trained=trained)
    except BUILD_ERRORS as error:
        raise ValueError(f"transformers itself fails to run it: {error}") from error
    ours = train(tiny_family(name, **settings), batches, packed, trained=trained)
    return reference, list(differences(ours, reference))


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
