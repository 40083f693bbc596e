"""Write docs/families.md: which families of models are trained correctly on several ranks.

    python -m tools.families docs/families.md [FAMILY ...] [--findings PATH]

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
from tools.family_checks import quantized, replayed, sampled

ALONE = "1 process"
# Families with encoders, whose language model has no class of its own.
MULTIMODAL = ("glm4v_moe", "kimi_k25", "qwen3_vl", "qwen3_vl_moe")
MESHES = [
    MeshPlan(recompute=True),
    MeshPlan(ep=2, recompute=True),
    MeshPlan(cp=2, recompute=True),
    MeshPlan(share_prefixes=True, recompute=True),
]
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
REFUSED = """{families} families are refused, of which {decoders} are decoders; the others have an
encoder, or attend to later tokens. Mamba, Mamba 2 and Falcon Mamba are refused although the same
layers are supported in hybrid models: their models do not pass on to the layers where documents
begin. Zamba has a block that several layers share, which cannot be sharded. Reformer and Doge have
attention of their own kind, with hashed keys and with masks computed from values. `dbrx`,
`musicgen`, `musicgen_melody` and Gemma 4's assistants, which are draft models, could not be
checked: `transformers` can't create a small model of them from a configuration alone."""
PAGE = """# Families of models

This page says which model families `primerl` trains correctly on packed documents and on several
ranks, and why it refuses the others. Look up the `model_type` of your model's `config.json`
before you plan a run.

`python -m tools.families docs/families.md` generates the page, for every `model_type` for which
`transformers` has a causal language model, and for some with image encoders. This version was
made with {versions}.

For each family, a tiny, randomly initialized model is trained for three steps of AdamW on packed
documents, on two gloo ranks, with activation recomputation. The reference is one process that
computes each document alone, in plain Hugging Face code. Logprobs, entropies, losses, gradient
norms, gradients before and after clipping, each token's experts, updates, and a saved and
reloaded checkpoint must agree with it. The columns are:

- `packed`: packed documents in one process; `fsdp`, `ep 2` and `cp 2`: fully sharded data
  parallelism, expert parallelism and context parallelism on two ranks; `prefixes`: `fsdp` with
  documents that share their first tokens (`packing.pack(share_prefixes=True)`). `pass`:
  everything agrees; `FAIL`: a difference is larger than the tolerance; `refused`: an error says
  that the combination is unsupported; empty: it does not apply.
- `engine`: whether `rollout.TransformersEngine` serves the family; the logprobs of sampled tokens
  must agree with those of a forward pass within 2e-5.
- `replay`: [router replay](router-replay.md) in two packed documents. Routes that the model chose
  itself may change nothing when they are forced. Random routes must reach the experts, change a
  logprob by more than 1e-3, and leave nonzero gradients finite and nonzero. Empty without experts.
- `fp8`: training in [FP8](fp8.md) in blocks of 16, including the experts. Every FP8 weight must get
  a gradient. Logprobs must change, on average by at most half of their standard deviation
  (the largest change of a family is 0.38 standard deviations, the median 0.09). The published
  values must be those by which the layers multiply, bit for bit.
- `loss`, `gradient norm`: the largest relative difference from the reference.

The tiny models' windows and chunks of attention have 8 tokens, and the longest document 31. Linear
attention, state-space layers, convolutions, and the attention of MiniMax-M3 and DeepSeek-V4, are
computed document by document. [Faults](verified.md#faults-in-tiny-models) such as a window that is
one longer move the logprobs of these models by far more than the tolerance.

Models with image encoders are trained on text. `models.load_pretrained` loads the encoders and the
projections of their outputs, too, and freezes them, so that they are saved and published under the
names of the checkpoint. If a family also has a class without encoders, such as `gemma3`, the table
shows the language model alone. A folder is loaded with encoders if its `architectures` name them.

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
        served, reason = sampled(family)
        replaying, no_replay = replayed(family)
        in_fp8, no_fp8 = quantized(family)
        cells += [served, replaying, in_fp8]
        cells += [f"{_worst(mine, check):.0e}" for check in ("loss", "gradient norm")]
        rows.append(f"| `{family}` | {' | '.join(cells)} |")
        remarks += [f"- `{family}`, {_plain(f.mesh)}: {f.note}" for f in mine if f.note]
        reasons = {"engine": reason, "replay": no_replay, "fp8": no_fp8}
        remarks += [f"- `{family}`, {column}: {why}" for column, why in reasons.items() if why]
    heads = ["family", "packed", *meshes, "engine", "replay", "fp8", "loss", "gradient norm"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows, ""]
    lines += [*remarks, ""] if remarks else []
    if refused:
        lines += ["## Refused", "", _refused_kinds(refused), ""]
        lines += ["| family | reason |", "|---|---|", *refused]
    return "\n".join(lines) + "\n"


def _refused_kinds(refused: Sequence[str]) -> str:
    """Say how many of the refused families are decoders, and why some of these are refused."""
    others = [row for row in refused if "encoder" in row or "attends to later tokens" in row]
    return REFUSED.format(families=len(refused), decoders=len(refused) - len(others))


def muon_table(families: Iterable[str]) -> str:
    """Format the roles that ``optim.muon_parameters`` assigns in each family, as Markdown."""
    rows = []
    for family in families:
        cells: dict[str, dict[str, None]] = {name: {} for name in ("one", "several", "adamw")}
        try:
            roles = optim.muon_parameters(tiny_family(family)).roles
        except ValueError:
            rows.append(f"| `{family}` | not known; pass `roles` | | |")
            continue
        for one in roles:
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
    plain = mesh.removesuffix(", recompute")
    return "prefixes" if plain == "fsdp, prefixes" else plain


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
    known = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL})
    parser.add_argument("families", nargs="*", default=known)
    parser.add_argument("--findings", type=Path, help="file of findings to create or to continue")
    args = parser.parse_args()
    tasks = [Task(family=one, meshes=applicable(one, MESHES)[0]) for one in args.families]
    args.page.write_text(page(compare(tasks, world=2, findings=args.findings)), encoding="utf-8")


if __name__ == "__main__":
    main()
