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
from primerl.parity.checks import EXCEPTIONS, TOLERANCES, Finding, MeshPlan
from primerl.parity.command import Task, applicable, compare, fit, versions
from primerl.testing.families import tiny_family
from tools.family_checks import quantized, replayed, sampled

ALONE = "1 process"
# Families with encoders, whose language model has no class of its own.
MULTIMODAL = ("glm4v_moe", "kimi_k25", "minimax_m3_vl", "qwen3_vl", "qwen3_vl_moe")
# Models with encoders, of families that have a language model without them, too.
WITH_ENCODERS = (
    "Gemma3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# The mesh of each column.
MESHES = {
    "fsdp": MeshPlan(recompute=True),
    "ep 2": MeshPlan(ep=2, recompute=True),
    "cp 2": MeshPlan(cp=2, recompute=True),
    "gathered": MeshPlan(cp=2, context="gathered", recompute=True),
    "prefixes": MeshPlan(share_prefixes=True, recompute=True),
}
# Refused families that are no decoder-only language models: what they are instead. This was decided
# by reading the code of each.
OTHER_KINDS = {
    # They attend to later tokens by default.
    **dict.fromkeys(
        ("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
         "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
         "xlm-roberta-xl", "xlnet", "xmod"),
        "encoder",
    ),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp",
         "pegasus", "plbart", "prophetnet", "whisper"),
        "encoder with decoder",
    ),
    # They attend to the outputs of an encoder of text or images, without which they are not used.
    **dict.fromkeys(
        ("bert-generation", "git", "musicgen", "musicgen_melody", "trocr"),
        "decoder of an encoder's outputs",
    ),
    # They take the hidden states of the model for which they draft.
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "draft model"),
}  # fmt: skip
VLLM = Path(__file__).parents[1] / "docs" / "vllm.md"
MUON = """## Muon

This table lists how `optim.muon_parameters` updates each parameter of the tiny models
([Muon](optimizers.md#muon)):

- *one matrix*: the parameter is orthogonalized as one matrix; where experts are stacked, as one
  matrix per expert.
- *several*: the parameter holds several matrices, which are orthogonalized one by one. `x | y`
  are consecutive parts of the outputs. "4 times in turn" means that the parts repeat 4 times, for
  example once per head.
- *AdamW*: AdamW updates the parameter. Norms and biases always belong here and are left out.
- *not known*: nothing in `optim` says whether the named weight is one matrix or several, such as
  the parts of a state-space layer's projection. State [its role](optimizers.md#muon) yourself, and
  those of other weights that the error names then.

Tests trace how each model's forward pass uses its weights, and find the same roles.

| family | one matrix | several | AdamW |
|---|---|---|---|
"""
REFUSED = """{families} families are refused. {decoders} of them are decoder-only language models
(*decoder*; some have encoders of images or sound, too). The others are encoders, encoders with
decoders, decoders that need an encoder's outputs, or draft models.

Mamba, Mamba 2 and Falcon Mamba are refused although the same layers are supported in hybrid models:
their models do not pass on to the layers where documents begin. Zamba has a block that several
layers share, which cannot be sharded. Reformer and Doge have attention of their own kind, with
hashed keys and with masks computed from values. BLT groups bytes by attention that is not causal.
`dbrx`, `musicgen`, `musicgen_melody` and Gemma 4's assistants could not be checked: `transformers`
can't create a small model of them from a configuration alone."""
PAGE = """# Families of models

This page says which model families `primerl` trains correctly on packed documents and on several
ranks, and why it refuses the others. Look up the `model_type` of your model's `config.json`
before you plan a run.

`python -m tools.families docs/families.md` generates the page, for every `model_type` for which
`transformers` has a causal language model, and for some with image encoders. This version was
made with {versions}.

For each family, a tiny, randomly initialized model is trained for three steps of AdamW on packed
documents, on two gloo ranks, in float32, with activation recomputation (without it where a remark
below says so). The reference is one process that computes each document alone, in plain Hugging
Face code. These must agree with it:

| result | largest difference that passes |
|---|---|
| loss of each step | {loss}, relative to the loss if that is above 1 |
| gradient norm of each step | {gradient norm}, relative |
| logprobs and entropies of the first step | {logprobs} of the largest |
| gradients of the first step, before and after clipping | {gradients} of the gradient norm |
| change of the parameters after three steps | {updates} of its norm |
| each token's experts; a saved and reloaded checkpoint | none |

The columns are:

- `packed`: packed documents in one process; `fsdp`, `ep 2` and `cp 2`: fully sharded data
  parallelism, expert parallelism, and [context parallelism](context.md) by its default method,
  which exchanges heads here (`ulysses`); `gathered`: context parallelism that gathers keys, as
  sparse attention always does; `prefixes`: `fsdp` with documents that share their first tokens
  (`packing.pack(share_prefixes=True)`). `pass`: everything agrees; `FAIL`: a difference is larger
  than the tolerance; `refused`: an error says that the combination is unsupported; empty: the
  family has no experts.
- `engine`: whether `rollout.TransformersEngine` serves the family; the logprobs of sampled tokens
  must agree with those of a forward pass within 2e-5. Recurrent layers compute prompts in segments
  of 8 tokens, so that states continue from one segment to the next.
- `vllm`: publication of weights to vLLM 0.32 on a CPU, [one by one and by hand](vllm.md#families).
  `pass`: the server has the published weights, and its scores are those of the trainer;
  `receipts`: it has the weights, but its forward pass does not run on a CPU; `refused`: the
  publication is an error. Empty: never tried.
- `replay`: [router replay](router-replay.md) in two packed documents. Routes that the model chose
  itself may change nothing when they are forced. Random routes must reach the experts, change a
  logprob by more than 1e-3, and leave nonzero gradients finite and nonzero. Empty without experts.
- `fp8`: training in [FP8](fp8.md) in blocks of 16, including the experts. Every FP8 weight must get
  a gradient. Logprobs must change, on average by at most half of their standard deviation
  (the largest change of a family is 0.38 standard deviations, the median 0.09). The published
  values must be those by which the layers multiply, bit for bit.
- `loss`, `gradient norm`: the largest difference from the reference, over all steps and meshes. It
  is rounding, which later steps multiply: in `ctrl`, plain code itself changes by 9e-7 and 6e-6 if
  the last bit of every weight is changed.

The tiny models' windows and chunks of attention have 8 tokens, and the longest document 31. Linear
attention, state-space layers, convolutions, and the attention of MiniMax-M3 and DeepSeek-V4, are
computed document by document. With context parallelism, one rank computes a whole document in
recurrent layers, and needs the memory for it
([what that costs](context.md#layers-that-carry-a-state)).

The tiny models of Qwen3-Next, Qwen3.5 (all its types) and Kimi Linear have `rms_norm_eps=1e-2`
instead of 1e-6 or 1e-5. Their delta rule begins with a state of 0, so its outputs at the first
tokens of a document may be near 0, and are then normalized, which multiplies rounding. With 1e-6
and random weights, plain code itself could not be compared within these bounds: if the last bit of
every weight is changed, the gradient norms of `qwen3_5_text` change by up to 2e-3 (`qwen3_next`:
5e-5, `kimi_linear`: 2e-5). With 1e-2 they still change by up to 2e-5 in `qwen3_5_text`, so its
bound, and that of `qwen3_5` with and without encoders, is {looser}.

[Faults](verified.md#faults-in-tiny-models) such as a window that is one longer move the logprobs of
the tiny models by far more than the tolerance.

Models with image encoders are trained on text. `models.load_pretrained` loads the encoders and the
projections of their outputs, too, and freezes them, so that they are saved and published under the
names of the checkpoint. If a family also has a class without encoders, such as `gemma3` or
`qwen3_5`, its row shows the language model alone; rows named after classes, such as
`Gemma3ForConditionalGeneration`, show models with encoders. A folder is loaded with encoders if its
`architectures` name them.

{table}"""


def page(findings: Sequence[Finding]) -> str:
    """Format the findings as a page of the documentation."""
    refused = {one.family for one in findings if one.mesh == ALONE and one.measured is None}
    failed = {one.family for one in findings if one.result == "FAIL"}
    families = dict.fromkeys(finding.family for finding in findings)
    kept = [name for name in families if name not in refused | failed]
    table = markdown_table(findings) + "\n" + muon_table(kept)
    bounds = {check: f"{bound:.0e}" for check, bound in TOLERANCES.items()}
    looser = f"{EXCEPTIONS['qwen3_5_text']['gradient norm']:.0e}"
    return PAGE.format(versions=versions(), table=table, looser=looser, **bounds)


def markdown_table(findings: Sequence[Finding]) -> str:
    """Format the admitted families with their largest differences, then the refused families."""
    by_family: dict[str, list[Finding]] = {}
    for finding in findings:
        by_family.setdefault(finding.family, []).append(finding)
    published = published_to_vllm(VLLM.read_text(encoding="utf-8"))
    rows, remarks, refused = [], [], {}
    for family, mine in by_family.items():
        alone = [finding for finding in mine if finding.mesh == ALONE]
        if any(finding.measured is None for finding in alone):
            refused[family] = alone[0].note
            continue
        cells, notes = _mesh_cells(family, mine)
        columns = {
            "engine": sampled(family),
            "vllm": published.get(family, ("", "")),
            "replay": replayed(family),
            "fp8": quantized(family),
        }
        notes |= {column: why for column, (_, why) in columns.items() if why}
        cells = [_result(alone), *cells, *(result for result, _ in columns.values())]
        cells += [f"{_worst(mine, check):.1e}" for check in ("loss", "gradient norm")]
        rows.append(f"| `{family}` | {' | '.join(cells)} |")
        remarks += [f"- `{family}`, {where}: {why}" for where, why in notes.items()]
    heads = ["family", "packed", *MESHES, "engine", "vllm", "replay", "fp8", "loss"]
    heads.append("gradient norm")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows, ""]
    lines += [*remarks, ""] if remarks else []
    if refused:
        lines += ["## Refused", "", _refused_kinds(refused), ""]
        lines += ["| family | kind | reason |", "|---|---|---|"]
        lines += [f"| `{f}` | {_kind(f)} | {_cell(why)} |" for f, why in refused.items()]
    return "\n".join(lines) + "\n"


def _mesh_cells(family: str, findings: Sequence[Finding]) -> tuple[list[str], dict[str, str]]:
    """Return the results on each column's mesh, and remarks by the columns to which they belong."""
    cells: list[str] = []
    columns: dict[str, list[str]] = {}
    fitted = fit(family, list(MESHES.values()))
    for (column, plan), (run, _) in zip(MESHES.items(), fitted, strict=True):
        if run.ep < plan.ep:
            cells.append("")
            continue
        mine = [finding for finding in findings if finding.mesh == run.name]
        cells.append(_result(mine))
        for note in dict.fromkeys(finding.note for finding in mine if finding.note):
            columns.setdefault(note, []).append(column)
    notes = {" and ".join(where): note for note, where in columns.items()}
    without = fitted[0][1]  # of fsdp, which lacks at most recomputation
    return cells, notes | ({"recomputation": without} if without else {})


def published_to_vllm(text: str) -> dict[str, tuple[str, str]]:
    """Read each family's result, and the remark if it did not pass, from docs/vllm.md."""
    rows = re.findall(r"^\| (`.*`) \| (pass|receipts|refused|) ?\| (.*) \|$", text, re.MULTILINE)
    return {
        family: (result, "" if result == "pass" else why)
        for families, result, why in rows
        for family in re.findall("`(.+?)`", families)
    }


def _kind(family: str) -> str:
    return OTHER_KINDS.get(family, "decoder")


def _refused_kinds(refused: Iterable[str]) -> str:
    """Say how many of the refused families are decoders, and why some of these are refused."""
    kinds = [_kind(family) for family in refused]
    return REFUSED.format(families=len(kinds), decoders=kinds.count("decoder"))


def muon_table(families: Iterable[str]) -> str:
    """Format the roles that ``optim.muon_parameters`` assigns in each family, as Markdown."""
    rows = []
    for family in families:
        cells: dict[str, dict[str, None]] = {name: {} for name in ("one", "several", "adamw")}
        try:
            roles = optim.muon_parameters(tiny_family(family)).roles
        except ValueError as error:
            rows.append(f"| `{family}` | not known: {_cell(_unknown(str(error)))} | | |")
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


def _unknown(error: str) -> str:
    """Shorten the error of an unknown role to the parameter and the reason."""
    what, _, why = error.partition(". Pass ")[0].partition(" for Muon is unknown: ")
    name = re.match(r"the role of (\S+), of shape", what)
    return f"`{_short(name[1])}`: {why}" if name else f"{what}: {why}"


def _short(name: str) -> str:
    """Return a parameter's name without the prefix of its layer."""
    name = re.sub(r"^.*?\.\d+\.", "", name).removesuffix(".weight")
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _result(findings: Sequence[Finding]) -> str:
    results = {finding.result for finding in findings}
    return next((r for r in ("FAIL", "refused", "pass") if r in results), "")


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
    known = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL, *WITH_ENCODERS}, key=str.lower)
    parser.add_argument("families", nargs="*", default=known)
    parser.add_argument("--findings", type=Path, help="file of findings to create or to continue")
    args = parser.parse_args()
    plans = list(MESHES.values())
    tasks = [Task(family=one, meshes=applicable(one, plans)[0]) for one in args.families]
    args.page.write_text(page(compare(tasks, world=2, findings=args.findings)), encoding="utf-8")


if __name__ == "__main__":
    main()
