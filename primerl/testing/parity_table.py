"""The tables of ``parity``: on the terminal, and of all families in Markdown."""

import platform
from collections.abc import Iterable, Sequence
from typing import Any

from primerl._optional import require
from primerl.testing.parity_checks import Finding

ALONE = "1 process"


def terminal_table(findings: Sequence[Finding]) -> Any:
    """A ``rich`` table: what was measured, what is allowed, and the result."""
    table_of = require("rich.table", extra="recipes")
    escape = require("rich.markup", extra="recipes").escape
    table = table_of.Table(box=require("rich.box", extra="recipes").SIMPLE_HEAD)
    for heading in ("family", "mesh", "check"):
        table.add_column(heading, no_wrap=True)
    table.add_column("measured", justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("result")
    colors = {"pass": "green", "FAIL": "red", "refused": "yellow"}
    before = ("", "")
    for one in findings:
        same = before[0] == one.family, before == (one.family, one.mesh)
        before = one.family, one.mesh
        table.add_row(
            "" if same[0] else escape(one.family),
            "" if same[1] else one.mesh,
            one.check,
            "" if one.figure is None else f"{one.figure:.1e}",
            "" if one.allowed is None else f"{one.allowed:.0e}",
            f"[{colors[one.result]}]{one.result}[/] {escape(one.note)}".strip(),
        )
    return table


def markdown_table(findings: Sequence[Finding]) -> str:
    """Families that are admitted, with the worst figures of all meshes; then those refused."""
    families = list(dict.fromkeys(finding.family for finding in findings))
    meshes = list(dict.fromkeys(f.mesh for f in findings if f.mesh != ALONE))
    admitted, refused = [], []
    for family in families:
        mine = [finding for finding in findings if finding.family == family]
        alone = [finding for finding in mine if finding.mesh == ALONE]
        if any(finding.figure is None for finding in alone):
            refused.append(f"| `{family}` | {_result(alone)}{_notes(alone)} |")
            continue
        cells = [_result(alone), *(_result([f for f in mine if f.mesh == m]) for m in meshes)]
        figures = [f"{_worst(mine, check):.0e}" for check in ("loss", "gradient norm")]
        admitted.append(f"| `{family}` | {' | '.join([*cells, *figures])} |{_notes(mine)}")
    notes = [line.rpartition(" |")[2] for line in admitted]
    rows = [line.rpartition(" |")[0] + " |" for line in admitted]
    heads = ["family", "packed", *meshes, "loss", "gradient norm"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows, ""]
    remarks = dict.fromkeys(note for note in notes if note)
    lines += [*(f"- {remark.strip()}" for remark in remarks), ""] if remarks else []
    lines += ["## Refused", "", "| family | reason |", "|---|---|", *refused]
    return "\n".join(lines) + "\n"


def page(findings: Sequence[Finding]) -> str:
    """A page of the documentation."""
    return PAGE.format(versions=versions(), table=markdown_table(findings))


PAGE = """# Families of models

Made by `python -m primerl.testing.parity --table docs/families.md`, with {versions}, for every
`model_type` of which transformers has a causal language model. Each family's tiny version is
trained for three steps of AdamW on packed documents, on two gloo ranks, with recomputation of
activations, and compared with one process that computes each document alone in plain Hugging Face
code: losses, gradient norms, gradients, the experts that each token goes to, parameters after the
steps, and a checkpoint's round trip. `loss` and `gradient norm` are the largest relative
differences. A family with windows of attention is admitted for documents that fit into them;
longer ones are refused when they come.

{table}"""


def versions() -> str:
    """Of what the findings were made with."""
    torch, transformers = require("torch", extra="transformers"), None
    transformers = require("transformers", extra="transformers")
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def _result(findings: Sequence[Finding]) -> str:
    results = {finding.result for finding in findings}
    return next((r for r in ("FAIL", "refused", "pass") if r in results), "")


def _notes(findings: Iterable[Finding]) -> str:
    return "; ".join(dict.fromkeys(_short(f.note) for f in findings if f.note))


def _short(note: str) -> str:
    return note.replace("|", "\\|")


def _worst(findings: Sequence[Finding], check: str) -> float:
    return max((f.figure for f in findings if f.check == check and f.figure is not None), default=0)
