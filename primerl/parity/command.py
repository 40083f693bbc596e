"""The command that compares training on several ranks with plain code in one process.

``python -m primerl.parity qwen3_moe --ep 2 --cp 2`` trains the family's tiny version on packed
documents on several ranks of this computer (gloo, CPU), and compares the results with plain Hugging
Face code that computes each document alone, in one process. A family that passes is admitted.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from primerl._common.expert_modules import expert_modules
from primerl._common.optional import require
from primerl.attention.admission import is_sparse
from primerl.parity.checks import CONTEXT_METHODS, Finding, MeshPlan
from primerl.parity.reference import MUON_FAMILIES
from primerl.testing.families import tiny_family

FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2", "glm_moe_dsa")
ADMITTED, FAILED, REFUSED = 0, 1, 3


@attrs.frozen(kw_only=True)
class Task:
    """A family and the meshes on which it is compared."""

    family: str
    """A ``model_type``, or a model folder."""
    meshes: Sequence[MeshPlan]
    settings: dict[str, Any] = attrs.field(factory=dict)
    """Settings that override the tiny configuration."""
    name: str = attrs.field(
        default=attrs.Factory(lambda self: Path(self.family).name, takes_self=True)
    )
    """The family's unique name in the table."""


def parts(*, replicate: int = 1, ep: int = 1, cp: int = 1) -> list[MeshPlan]:
    """Plan each dimension of a mesh alone, and the whole mesh, with various training options."""
    whole: dict[str, Any] = {"replicate": replicate, "ep": ep, "cp": cp}
    plans = [
        MeshPlan(share_prefixes=True, resume=True),
        MeshPlan(optimizer="muon"),
        MeshPlan(replicate=replicate),
        MeshPlan(ep=ep, share_prefixes=True),
    ]
    if cp > 1:
        plans += [
            MeshPlan(cp=cp, context="ulysses", share_prefixes=True),
            MeshPlan(cp=cp, context="gathered"),
            MeshPlan(**whole, context="gathered", recompute=True, share_prefixes=True),
        ]
    plans += [MeshPlan(**whole), MeshPlan(**whole, recompute=True, optimizer="muon", resume=True)]
    return list(dict.fromkeys(plans))


def all_kinds(world: int) -> list[MeshPlan]:
    """Plan all kinds of meshes of a world size, with training options distributed over them."""
    shapes = [
        MeshPlan(),
        MeshPlan(replicate=2),
        MeshPlan(ep=2),
        MeshPlan(ep=4),
        MeshPlan(cp=2),
        MeshPlan(ep=2, cp=2),
    ]
    plans = []
    for shape in shapes:
        if world % (shape.replicate * shape.cp) or shape.ep > world // shape.replicate:
            continue
        for method in CONTEXT_METHODS if shape.cp > 1 else (None,):
            plans.append(attrs.evolve(shape, context=method, share_prefixes=True))
            plans.append(attrs.evolve(shape, context=method, recompute=True, resume=True))
        plans.append(attrs.evolve(shape, optimizer="muon", resume=True))
    return plans


def applicable(
    family: str, plans: Sequence[MeshPlan]
) -> tuple[list[MeshPlan], list[tuple[MeshPlan, str]]]:
    """Remove from mesh plans the options that don't apply to a family.

    Returns:
        The remaining plans, and each plan that was changed, with the reason.
    """
    fitted = fit(family, plans)
    kept = list(dict.fromkeys(remaining for remaining, _ in fitted))
    return kept, [(plan, why) for plan, (_, why) in zip(plans, fitted, strict=True) if why]


def fit(family: str, plans: Sequence[MeshPlan]) -> list[tuple[MeshPlan, str]]:
    """Return each plan without the options that don't apply to a family, and why; "" if unchanged.

    Routed experts that can't be divided are no such reason: ``parallel.shard`` refuses them.
    """
    try:
        model = tiny_family(family)
    except ValueError:  # reported later by the ranks
        return [(plan, "") for plan in plans]
    missing = {}
    if not has_experts(model):
        missing["ep"] = "no experts to divide"
    if not model.supports_gradient_checkpointing:
        missing["recompute"] = "transformers can't recompute its activations"
    if model.config.model_type not in MUON_FAMILIES:
        missing["optimizer"] = "no list of its matrices for Muon"
    if is_sparse(model):
        missing["context"] = "sparse attention always gathers keys"
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 0)
    plain = MeshPlan()
    fitted = []
    for plan in plans:
        lacking = dict(missing)
        if plan.context == "ulysses" and heads % plan.cp:
            lacking.setdefault("context", f"{heads} heads, which {plan.cp} ranks cannot share")
        changes = {n: getattr(plain, n) for n in lacking if getattr(plan, n) != getattr(plain, n)}
        why = "; ".join(lacking[name] for name in changes)
        fitted.append((attrs.evolve(plan, **changes), why))
    return fitted


def has_experts(model: nn.Module) -> bool:
    """Whether a model has routed experts; ``parallel.shard`` may refuse to divide them."""
    named = any(name.endswith(".experts") for name, _ in model.named_modules())
    return named or bool(expert_modules(model))


def compare(
    tasks: Sequence[Task],
    *,
    world: int = 4,
    timeout_s: float = 60.0,
    findings: Path | None = None,
) -> list[Finding]:
    """Compare families on meshes, in one launch of ``world`` ranks (and another after a crash).

    Args:
        tasks: the families, in order, each with the meshes that apply to it.
        world: the number of ranks, on the CPU of this computer.
        timeout_s: how long ranks wait for each other, in seconds.
        findings: a file (JSON Lines) to append findings to; its cases are not run again.
    """
    with tempfile.TemporaryDirectory() as name:
        plan, results = Path(name, "plan.json"), findings or Path(name, "findings.jsonl")
        results.touch()
        # The cases of a task are the reference, then the meshes.
        done = [_cases_done(_read(results), task) for task in tasks]
        while any(count <= len(task.meshes) for count, task in zip(done, tasks, strict=True)):
            left = [i for i, task in enumerate(tasks) if done[i] <= len(task.meshes)]
            plan.write_text(_plan([(tasks[i], done[i]) for i in left], timeout_s), encoding="utf-8")
            allowed = 30 + timeout_s * sum(1 + len(tasks[i].meshes) for i in left)
            error = _launch(world, plan, results, timeout_s=allowed)
            found = _read(results)
            for index in left:
                done[index] = _cases_done(found, tasks[index])
            stopped = next((i for i in left if done[i] <= len(tasks[i].meshes)), None)
            if stopped is not None:
                task, case = tasks[stopped], done[stopped]
                where = "1 process" if case == 0 else task.meshes[case - 1].name
                died = Finding(family=task.name, mesh=where, check="raised", note=error)
                with results.open("a") as file:
                    file.write(json.dumps(attrs.asdict(died)) + "\n")
                done[stopped] = _cases_done(_read(results), task)
        return _read(results)


def _plan(tasks: Sequence[tuple[Task, int]], timeout_s: float) -> str:
    written = [{**attrs.asdict(task), "done": max(done - 1, 0)} for task, done in tasks]
    return json.dumps({"tasks": written, "timeout_s": timeout_s})


def _launch(world: int, plan: Path, results: Path, *, timeout_s: float) -> str:
    """Run the ranks; return the error of the first rank that failed, or why none is known."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", "-m", "primerl.parity.rank_program"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(
            [*command, str(plan), str(results)],
            env=environment,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the ranks did not end within {timeout_s:.0f} s"
    if ended.returncode == 0:
        return "the ranks ended without a finding"
    lines = ended.stderr.splitlines()
    failed = [line for line in lines if "Error: rank" in line and "failed: " in line]
    errors = [line for line in lines if "Error: " in line]
    return (failed or errors or lines or [f"exit status {ended.returncode}"])[0].strip()


def _read(results: Path) -> list[Finding]:
    return [
        Finding(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines()
    ]


def _cases_done(findings: Sequence[Finding], task: Task) -> int:
    """Count the finished cases of a task: the reference, then meshes in order."""
    mine = [finding for finding in findings if finding.family == task.name]
    names = {finding.mesh for finding in mine}
    if any(f.mesh == "1 process" and f.measured is None for f in mine):
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
    timeout_s: float = 60.0,
) -> int:
    """Compare training of model families on several ranks with plain code in one process.

    Prints a table. The exit status is 0 if all checks pass (admitted), 1 if one fails, and 3 if the
    family or the mesh is refused; the last line says why. Options that do not apply to a family,
    such as expert parallelism without experts, are listed as not applicable.

    Args:
        families: model_types, such as qwen3_moe, or model folders, whose config.json is shrunk.
        world: the number of ranks, on the CPU of this computer.
        replicate: the number of replicas of the model (HSDP).
        ep: the number of ranks that share the experts.
        cp: the number of ranks that share the rows of each micro-batch.
        matrix: compare on all kinds of meshes; by default seven families.
        timeout_s: how long ranks wait for each other, in seconds.
    """
    console = require("rich.console", extra="recipes").Console(width=120)
    started = time.monotonic()
    plans = parts(replicate=replicate, ep=ep, cp=cp)
    if matrix:
        plans, families = all_kinds(world), families or FAMILIES
    if not families:
        print("name a family: a model_type, such as qwen3_moe, or a model folder")  # noqa: T201
        return 2
    planned = {family: applicable(family, plans) for family in families}
    tasks = [Task(family=family, meshes=kept) for family, (kept, _) in planned.items()]
    found = compare(tasks, world=world, timeout_s=timeout_s)
    for task in tasks:
        for plan, reason in planned[task.family][1]:
            without = Finding(family=task.name, mesh=plan.name, check="not applicable", note=reason)
            found.append(without)
    found.sort(key=lambda one: [task.name for task in tasks].index(one.family))
    console.print(terminal_table(found))
    console.print(f"{versions()}; {time.monotonic() - started:.0f} s")
    return _concluded(found)


def terminal_table(findings: Sequence[Finding]) -> Any:
    """Make a ``rich`` table of measured and allowed differences, and results."""
    table_of = require("rich.table", extra="recipes")
    escape = require("rich.markup", extra="recipes").escape
    table = table_of.Table(box=require("rich.box", extra="recipes").SIMPLE_HEAD)
    for heading in ("family", "mesh", "check"):
        table.add_column(heading, no_wrap=True)
    table.add_column("measured", justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("result")
    colors = {"pass": "green", "FAIL": "red", "refused": "yellow", "not applicable": "dim"}
    before = ("", "")
    for one in findings:
        same = before[0] == one.family, before == (one.family, one.mesh)
        before = one.family, one.mesh
        table.add_row(
            "" if same[0] else escape(one.family),
            "" if same[1] else one.mesh,
            one.check,
            "" if one.measured is None else f"{one.measured:.1e}",
            "" if one.allowed is None else f"{one.allowed:.0e}",
            f"[{colors[one.result]}]{one.result}[/]{escape(one.note and f': {one.note}')}",
        )
    return table


def versions() -> str:
    """Return the versions of torch, transformers and Python, as text."""
    transformers = require("transformers", extra="transformers")
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def _concluded(findings: Sequence[Finding]) -> int:
    """Print the last line, and return the exit status."""
    bad = [f for f in findings if f.result == "FAIL"]
    refused = [f for f in findings if f.result == "refused"]
    if bad:
        one = bad[0]
        print(f"failed: {one.family}, {one.mesh}: {one.check} {one.note or one.measured}")  # noqa: T201
        return FAILED
    if refused:
        one = refused[0]
        print(f"refused: {one.family}, {one.mesh}: {one.note}")  # noqa: T201
        return REFUSED
    print("admitted: " + ", ".join(dict.fromkeys(f.family for f in findings)))  # noqa: T201
    return ADMITTED
