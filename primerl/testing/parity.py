"""Is a family of models trained on several ranks as one process of plain code would train it?

``python -m primerl.testing.parity qwen3_moe --ep 2 --cp 2`` builds the family's tiny version,
trains it on packed documents on several ranks of this computer (gloo, CPU), and compares with plain
Hugging Face code that computes each document alone, in one process. A family that passes is
admitted.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from primerl._optional import require
from primerl.parallel.experts import expert_modules
from primerl.testing.families import tiny_family
from primerl.testing.parity_checks import Finding
from primerl.testing.parity_table import page, terminal_table, versions

FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2", "glm_moe_dsa")
ADMITTED, FAILED, REFUSED = 0, 1, 3


@attrs.frozen(kw_only=True)
class MeshPlan:
    """A mesh on which families are compared."""

    replicate: int = 1
    ep: int = 1
    cp: int = 1
    recompute: bool = False
    """Whether layers recompute their activations (``parallel.recompute``)."""

    @property
    def sizes(self) -> dict[str, int]:
        """What ``parallel.mesh`` takes."""
        return {"replicate": self.replicate, "ep": self.ep, "cp": self.cp}

    @property
    def name(self) -> str:
        """Such as ``ep 2, cp 2``."""
        parts = [f"hsdp {self.replicate}" if self.replicate > 1 else ""]
        parts += [f"ep {self.ep}" if self.ep > 1 else "", f"cp {self.cp}" if self.cp > 1 else ""]
        name = ", ".join(part for part in parts if part) or "fsdp"
        return name + (", recompute" if self.recompute else "")


@attrs.frozen(kw_only=True)
class Task:
    """A family and the meshes that it is compared on."""

    family: str
    """A ``model_type``, or a model folder."""
    meshes: Sequence[MeshPlan]
    settings: dict[str, Any] = attrs.field(factory=dict)
    """Of the tiny configuration, in place of its own."""
    name: str = attrs.field(
        default=attrs.Factory(lambda self: Path(self.family).name, takes_self=True)
    )
    """In the table; each task has another."""


def parts(*, replicate: int = 1, ep: int = 1, cp: int = 1) -> list[MeshPlan]:
    """A mesh's parts, each alone, then the mesh itself, then that with recomputation."""
    single = [
        MeshPlan(),
        MeshPlan(replicate=replicate),
        MeshPlan(ep=ep),
        MeshPlan(cp=cp),
        MeshPlan(replicate=replicate, ep=ep, cp=cp),
        MeshPlan(replicate=replicate, ep=ep, cp=cp, recompute=True),
    ]
    return list(dict.fromkeys(single))


def all_kinds(world: int) -> list[MeshPlan]:
    """All kinds of meshes of a world, with recomputation."""
    sizes = [{}, {"replicate": 2}, {"ep": 2}, {"ep": 4}, {"cp": 2}, {"ep": 2, "cp": 2}]
    fits = [s for s in sizes if world % (s.get("replicate", 1) * s.get("cp", 1)) == 0]
    fits = [s for s in fits if s.get("ep", 1) <= world // s.get("replicate", 1)]
    return [MeshPlan(**s, recompute=True) for s in fits]


SURVEY = [MeshPlan(recompute=True), MeshPlan(ep=2, recompute=True), MeshPlan(cp=2, recompute=True)]
"""The meshes, of two ranks, of the table of all families."""


def of_use(family: str, meshes: Sequence[MeshPlan]) -> list[MeshPlan]:
    """Meshes without divided experts or recomputation, for a family that has none."""
    try:
        model = tiny_family(family)
    except ValueError:  # its refusal comes with the others
        return list(meshes)
    if not model.supports_gradient_checkpointing:
        meshes = [attrs.evolve(mesh, recompute=False) for mesh in meshes]
    experts = bool(expert_modules(model))
    return [mesh for mesh in meshes if experts or mesh.ep == 1]


def all_families() -> list[str]:
    """Every ``model_type`` of which transformers has a causal language model."""
    auto = require("transformers.models.auto.modeling_auto", extra="transformers")
    return sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def compare(
    tasks: Sequence[Task],
    *,
    world: int = 4,
    timeout_s: float = 60.0,
    findings: Path | None = None,
) -> list[Finding]:
    """Compare families on meshes, in one launch of ``world`` ranks (and one more where it dies).

    Args:
        tasks: the families, in their order; a mesh without use for one (experts are divided, and
            it has none) is better left out.
        world: ranks, on the CPU of this computer.
        timeout_s: how long ranks wait for each other, in seconds.
        findings: a file (JSON Lines) that keeps them; what it has is not done again.
    """
    with tempfile.TemporaryDirectory() as name:
        plan, results = Path(name, "plan.json"), findings or Path(name, "findings.jsonl")
        results.touch()
        # Cases: the reference, and then the meshes.
        done = [_cases_done(_read(results), task) for task in tasks]
        while any(count <= len(task.meshes) for count, task in zip(done, tasks, strict=True)):
            left = [i for i, task in enumerate(tasks) if done[i] <= len(task.meshes)]
            plan.write_text(_plan([(tasks[i], done[i]) for i in left], timeout_s))
            allowed = 30 + timeout_s * sum(1 + len(tasks[i].meshes) for i in left)
            said = _launch(world, plan, results, timeout_s=allowed)
            found = _read(results)
            for index in left:
                done[index] = _cases_done(found, tasks[index])
            stopped = next((i for i in left if done[i] <= len(tasks[i].meshes)), None)
            if stopped is not None:
                task, case = tasks[stopped], done[stopped]
                where = "1 process" if case == 0 else task.meshes[case - 1].name
                died = Finding(family=task.name, mesh=where, check="raised", note=said)
                with results.open("a") as file:
                    file.write(json.dumps(attrs.asdict(died)) + "\n")
                done[stopped] = _cases_done(_read(results), task)
        return _read(results)


def _plan(tasks: Sequence[tuple[Task, int]], timeout_s: float) -> str:
    written = [
        {
            "name": task.name,
            "family": task.family,
            "settings": task.settings,
            "meshes": [
                {"name": m.name, "sizes": m.sizes, "recompute": m.recompute} for m in task.meshes
            ],
            "done": max(done - 1, 0),
        }
        for task, done in tasks
    ]
    return json.dumps({"tasks": written, "timeout_s": timeout_s})


def _launch(world: int, plan: Path, results: Path, *, timeout_s: float) -> str:
    """Run the ranks; what the first that failed said, if one did."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", "-m", "primerl.testing.parity_ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(
            [*command, str(plan), str(results)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the ranks did not end within {timeout_s:.0f} s"
    if ended.returncode == 0:
        return "the ranks left it out"
    lines = ended.stderr.splitlines()
    failed = [line for line in lines if "Error: rank" in line and "failed: " in line]
    errors = [line for line in lines if "Error: " in line]
    return (failed or errors or lines or [f"exit status {ended.returncode}"])[0].strip()


def _read(results: Path) -> list[Finding]:
    return [Finding(**json.loads(line)) for line in results.read_text().splitlines()]


def _cases_done(findings: Sequence[Finding], task: Task) -> int:
    """How many cases of a task are done: the reference, and then meshes in their order."""
    mine = [finding for finding in findings if finding.family == task.name]
    names = {finding.mesh for finding in mine}
    if any(f.mesh == "1 process" and f.figure is None for f in mine):
        return 1 + len(task.meshes)
    return ("1 process" in names) + sum(mesh.name in names for mesh in task.meshes)


def main(
    families: tuple[str, ...] = (),
    /,
    *,
    world: int = 4,
    replicate: int = 1,
    ep: int = 1,
    cp: int = 1,
    matrix: bool = False,
    table: Path | None = None,
    timeout_s: float = 60.0,
    findings: Path | None = None,
) -> int:
    """Is a family trained on several ranks as one process of plain code would train it?

    Prints what came out. The exit status is 0 if all is equal (admitted), 1 if it is not, and 3 if
    the family or the mesh is refused; the last line says why.

    Args:
        families: each a model_type, such as qwen3_moe, or a model folder, whose config.json is
            shrunk.
        world: ranks, on the CPU of this computer.
        replicate: copies of the model (HSDP).
        ep: ranks among which experts are divided.
        cp: ranks among which the rows of each micro-batch are divided.
        matrix: all kinds of meshes, with recomputation; of seven families, if none are named.
        table: write a Markdown table of these families, or of all that transformers has.
        timeout_s: how long ranks wait for each other.
        findings: a file that keeps what came out; what it has is not done again.
    """
    console = require("rich.console", extra="recipes").Console(width=120)
    started = time.monotonic()
    if table is not None:
        world, planned = 2, {f: of_use(f, SURVEY) for f in families or all_families()}
    elif matrix:
        planned = {f: of_use(f, all_kinds(world)) for f in families or FAMILIES}
    elif families:
        planned = dict.fromkeys(families, parts(replicate=replicate, ep=ep, cp=cp))
    else:
        print("name a family: a model_type, such as qwen3_moe, or a model folder")  # noqa: T201
        return 2
    tasks = [Task(family=family, meshes=meshes) for family, meshes in planned.items()]
    found = compare(tasks, world=world, timeout_s=timeout_s, findings=findings)
    if table is not None:
        table.write_text(page(found))
    console.print(terminal_table(found))
    console.print(f"{versions()}; {time.monotonic() - started:.0f} s")
    return _concluded(found)


def _concluded(findings: Sequence[Finding]) -> int:
    """Print the last line, and return the exit status."""
    bad = [f for f in findings if f.result == "FAIL"]
    refused = [f for f in findings if f.result == "refused"]
    if bad:
        one = bad[0]
        print(f"failed: {one.family}, {one.mesh}: {one.check} {one.note or one.figure}")  # noqa: T201
        return FAILED
    if refused:
        one = refused[0]
        print(f"refused: {one.family}, {one.mesh}: {one.note}")  # noqa: T201
        return REFUSED
    print("admitted: " + ", ".join(dict.fromkeys(f.family for f in findings)))  # noqa: T201
    return ADMITTED


if __name__ == "__main__":
    sys.exit(require("tyro", extra="recipes").cli(main))
