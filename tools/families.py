"""Write docs/families.md: which families of models are trained correctly on several ranks.

    python tools/families.py docs/families.md [FAMILY ...] [--findings PATH]

By default every ``model_type`` for which transformers has a causal language model, in about an
hour. ``--findings`` keeps what was found in a file (JSON Lines), and continues there.
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

The role that `optim.muon_parameters` finds for each parameter of the tiny versions: one matrix (one
for each expert, where experts are stacked), several matrices that are orthogonalized one by one, or
AdamW's (norms and biases, which are always AdamW's, are left out). `x | y` are parts of the
outputs, one after the other; "times in turn" means that they repeat, such as for each head. Tests
that trace the use of weights in each model's forward pass find the same.

| family | one matrix | several | AdamW |
|---|---|---|---|
"""
PAGE = """# Families of models

Made by `python tools/families.py docs/families.md` for every `model_type` for which
transformers has a causal language model, with {versions}.

Each family's tiny version is trained for three steps of AdamW on packed documents, on two gloo
ranks, with recomputation of activations, and compared with one process that computes each document
alone in plain Hugging Face code: logprobs, entropies, losses, gradient norms, gradients before and
after clipping, the experts that each token goes to, updates, and a checkpoint's round trip. `loss`
and `gradient norm` are the largest relative differences. A family with windows of attention is
admitted for documents that fit into them; longer ones are refused when they occur. The models are
initialized at random.

{table}"""


def page(findings: Sequence[Finding]) -> str:
    """A page of the documentation."""
    refused = {one.family for one in findings if one.mesh == ALONE and one.measured is None}
    failed = {one.family for one in findings if one.result == "FAIL"}
    families = dict.fromkeys(finding.family for finding in findings)
    kept = [name for name in families if name not in refused | failed]
    table = markdown_table(findings) + "\n" + muon_table(kept)
    return PAGE.format(versions=versions(), table=table)


def markdown_table(findings: Sequence[Finding]) -> str:
    """Admitted families, with the largest differences of all meshes; then refused ones."""
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
    """The roles that ``optim.muon_parameters`` finds in families, in Markdown."""
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
    """A parameter's name without its layer's."""
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
    parser.add_argument("--findings", type=Path, help="a file of findings, to begin or to continue")
    args = parser.parse_args()
    tasks = [Task(family=one, meshes=applicable(one, MESHES)[0]) for one in args.families]
    args.page.write_text(page(compare(tasks, world=2, findings=args.findings)), encoding="utf-8")


if __name__ == "__main__":
    main()
