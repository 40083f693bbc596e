"""Tables of parity findings, for the terminal and in Markdown."""

import platform
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from primerl import optim
from primerl._common.optional import require
from primerl.parity.checks import Finding
from primerl.testing.families import tiny_family

ALONE = "1 process"


def terminal_table(findings: Sequence[Finding]) -> Any:
    """A ``rich`` table of measured and allowed differences and the results."""
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


def page(findings: Sequence[Finding]) -> str:
    """A page of the documentation."""
    refused = {one.family for one in findings if one.mesh == ALONE and one.measured is None}
    failed = {one.family for one in findings if one.result == "FAIL"}
    families = dict.fromkeys(finding.family for finding in findings)
    kept = [name for name in families if name not in refused | failed]
    table = markdown_table(findings) + "\n" + muon_table(kept)
    return PAGE.format(versions=versions(), table=table)


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

Made by `python -m primerl.parity --table docs/families.md` for every `model_type` for which
transformers has a causal language model, with {versions}.

Each family's tiny version is trained for three steps of AdamW on packed documents, on two gloo
ranks, with recomputation of activations, and compared with one process that computes each document
alone in plain Hugging Face code: logprobs, entropies, losses, gradient norms, gradients before and
after clipping, the experts that each token goes to, updates, and a checkpoint's round trip. `loss`
and `gradient norm` are the largest relative differences. A family with windows of attention is
admitted for documents that fit into them; longer ones are refused when they occur. The models are
initialized at random.

{table}"""


def versions() -> str:
    """The versions that the findings were made with."""
    transformers = require("transformers", extra="transformers")
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


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
