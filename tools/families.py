"""Write docs/families.md: which families of models are trained correctly on several ranks.

    python tools/families.py docs/families.md [FAMILY ...] [--findings PATH]

The default is every ``model_type`` for which transformers has a causal language model, which takes
about an hour. ``--findings`` stores the findings in a file (JSON Lines), which a later run extends.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from primerl import optim
from primerl.parity.checks import Finding, MeshPlan
from primerl.parity.command import Task, applicable, compare, versions
from primerl.testing.families import tiny_family

ALONE = "1 process"
MESHES = [MeshPlan(recompute=True), MeshPlan(ep=2, recompute=True), MeshPlan(cp=2, recompute=True)]
MUON = """## Muon

This table lists how `optim.muon_parameters` updates each parameter of the tiny models
([Muon](optimizers.md#muon)):

- *one matrix*: the parameter is orthogonalized as one matrix; where experts are stacked, as one
  matrix per expert.
- *several*: the parameter holds several matrices, which are orthogonalized one by one. `x | y`
  are consecutive parts of the outputs. "4 times in turn" means that the parts repeat 4 times, for
  example once per head.
- *AdamW*: AdamW updates the parameter. Norms and biases always belong here and are left out.

Tests trace how each model's forward pass uses its weights, and find the same roles.

| family | one matrix | several | AdamW |
|---|---|---|---|
"""
PAGE = """# Families of models

This page says which model families `primerl` trains correctly on packed documents and on several
ranks, and why it refuses the others. Look up the `model_type` of your model's `config.json`
before you plan a run.

`python tools/families.py docs/families.md` generates the page, for every `model_type` for which
`transformers` has a causal language model. This version was made with {versions}.

For each family, a tiny, randomly initialized model is trained for three steps of AdamW on packed
documents, on two gloo ranks, with activation recomputation. The reference is one process that
computes each document alone, in plain Hugging Face code. Logprobs, entropies, losses, gradient
norms, gradients before and after clipping, each token's experts, updates, and a saved and
reloaded checkpoint must agree with it. The columns are:

- `packed`: packed documents in one process; `fsdp`, `ep 2` and `cp 2`: fully sharded data
  parallelism, expert parallelism and context parallelism on two ranks. `pass`: everything agrees;
  `FAIL`: a difference is larger than the tolerance; `refused`: an error says that the combination
  is unsupported; empty: it does not apply.
- `loss`, `gradient norm`: the largest relative difference from the reference.

A family with sliding-window attention passes for documents that fit into the window. A longer
document raises an error when it is computed.

{table}"""


def page(findings: Sequence[Finding]) -> str:
    """Format the findings as a page of the documentation."""
    refused = {one.family for one in findings if one.mesh == ALONE and one.measured is None}
    failed = {one.family for one in findings if one.result == "FAIL"}
    families = dict.fromkeys(finding.family for finding in findings)
    kept = [name for name in families if name not in refused | failed]
    table = markdown_table(findings) + "\n" + muon_table(kept)
    return PAGE.format(versions=versions(), table=table)


def markdown_table(findings: Sequence[Finding]) -> str:
    """Format the admitted families with their largest differences, then the refused families."""
    by_family: dict[str, list[Finding]] = {}
    for finding in findings:
        by_family.setdefault(finding.family, []).append(finding)
    meshes = list(dict.fromkeys(_plain(f.mesh) for f in findings if f.mesh != ALONE))
    rows, remarks, refused = [], [], []
    for family, mine in by_family.items():
        alone = [finding for finding in mine if finding.mesh == ALONE]
        if any(finding.measured is None for finding in alone):
            refused.append(f"| `{family}` | {_cell(alone[0].note)} |")
            continue
        cells = [_result(alone)]
        cells += [_result([f for f in mine if _plain(f.mesh) == mesh]) for mesh in meshes]
        cells += [f"{_worst(mine, check):.0e}" for check in ("loss", "gradient norm")]
        rows.append(f"| `{family}` | {' | '.join(cells)} |")
        remarks += [f"- `{family}`, {_plain(f.mesh)}: {f.note}" for f in mine if f.note]
    heads = ["family", "packed", *meshes, "loss", "gradient norm"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows, ""]
    lines += [*remarks, ""] if remarks else []
    if refused:
        lines += ["## Refused", "", "| family | reason |", "|---|---|", *refused]
    return "\n".join(lines) + "\n"


def muon_table(families: Iterable[str]) -> str:
    """Format the roles that ``optim.muon_parameters`` assigns in each family, as Markdown."""
    rows = []
    for family in families:
        cells: dict[str, dict[str, None]] = {name: {} for name in ("one", "several", "adamw")}
        for one in optim.muon_parameters(tiny_family(family)).roles:
            name = _short(one.name)
            if one.matrices is None:
                if one.role not in ("norm", "bias"):
                    cells["adamw"][f"`{name}` ({one.role})"] = None
            elif one.matrices.split is None:
                transposed = " (transposed)" if one.matrices.transposed else ""
                cells["one"][f"`{name}`{transposed}"] = None
            else:
                words = re.sub(r"^\d+ x ", "", one.description)
                cells["several"][f"`{name}`: {words}"] = None
        columns = [_cell(", ".join(cell)) for cell in cells.values()]
        rows.append(f"| `{family}` | {' | '.join(columns)} |")
    return MUON + "\n".join(rows) + "\n"


def _short(name: str) -> str:
    """Return a parameter's name without the prefix of its layer."""
    name = re.sub(r"^.*?\.\d+\.", "", name).removesuffix(".weight")
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _result(findings: Sequence[Finding]) -> str:
    results = {finding.result for finding in findings}
    return next((r for r in ("FAIL", "refused", "pass") if r in results), "")


def _plain(mesh: str) -> str:
    return mesh.removesuffix(", recompute")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _worst(findings: Sequence[Finding], check: str) -> float:
    return max(
        (f.measured for f in findings if f.check == check and f.measured is not None), default=0
    )


def main() -> None:
    """Compare the families, and write the page."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="the file to write")
    parser.add_argument("families", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--findings", type=Path, help="file of findings to create or to continue")
    args = parser.parse_args()
    tasks = [Task(family=one, meshes=applicable(one, MESHES)[0]) for one in args.families]
    args.page.write_text(page(compare(tasks, world=2, findings=args.findings)), encoding="utf-8")


if __name__ == "__main__":
    main()
