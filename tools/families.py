"""Write docs/families.md: which families of models are trained correctly on several ranks.

    python tools/families.py docs/families.md [FAMILY ...] [--findings PATH]

The default is every ``model_type`` for which transformers has a causal language model, which takes
about an hour. ``--findings`` stores the findings in a file (JSON Lines), which a later run extends.
"""

import argparse
import asyncio
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call

from primerl import fp8, optim, parallel, replay, rollout
from primerl._common.checkpoint_tensors import SCALES, checkpoint_tensors, converted
from primerl._common.expert_modules import expert_modules
from primerl.packing import PackedBatch
from primerl.parity.checks import Finding, MeshPlan
from primerl.parity.command import Task, applicable, compare, versions
from primerl.parity.mesh_training import make_batches, model_documents, score
from primerl.replay.recorder import expert_layers
from primerl.testing.families import tiny_family
from primerl.types import Completion, SamplingParams

ALONE = "1 process"
CLOSE = 2e-5  # largest difference of logprobs, or relative one of gradients, by rounding
MOVED = 1e-3  # smallest change of a logprob that other experts cause in at least one token
FP8_CHANGE = 0.5  # largest mean change of logprobs by FP8, in standard deviations of logprobs
BLOCK = 16  # of FP8 in the tiny models
TABLE = "tid2eid"  # DeepSeek-V4's table of the experts of each token id
# Families with encoders, whose language model has no class of its own.
MULTIMODAL = ("glm4v_moe", "kimi_k25", "qwen3_vl", "qwen3_vl_moe")
MESHES = [
    MeshPlan(recompute=True),
    MeshPlan(ep=2, recompute=True),
    MeshPlan(cp=2, recompute=True),
    MeshPlan(share_prefixes=True, recompute=True),
]
LOOKED_UP = "layers that look up each token's experts follow only the routes of their table"
PLAIN_EXPERTS = (
    "its experts are not in FP8, because transformers does not call them through its registry of "
    "experts functions"
)
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
begin. Zamba has a block that several layers share, which cannot be sharded."""
PAGE = """# Families of models

This page says which model families `primerl` trains correctly on packed documents and on several
ranks, and why it refuses the others. Look up the `model_type` of your model's `config.json`
before you plan a run.

`python tools/families.py docs/families.md` generates the page, for every `model_type` for which
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


def sampled(family: str) -> tuple[str, str]:
    """Sample from a family's tiny model with the embedded engine, requests beside each other.

    Returns:
        ``pass``, ``FAIL`` or ``refused``, and the reason.
    """
    model = tiny_family(family).eval()
    prompts = [[5, 6, 7 + number % 3, *range(10, 10 + 3 * number)] for number in range(6)]

    async def sample(engine: rollout.TransformersEngine) -> list[Completion]:
        requests = [
            engine.generate(prompt, SamplingParams(max_tokens=12 + number))
            for number, prompt in enumerate(prompts)
        ]
        return await asyncio.wait_for(asyncio.gather(*requests), 60)

    try:
        with rollout.TransformersEngine(model) as engine:
            completions = asyncio.run(sample(engine))
    except ValueError as error:
        return "refused", str(error)
    model.set_attn_implementation("eager")  # others leave out sinks or caps
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
        with torch.no_grad():
            logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        expected = logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]
        found = torch.tensor(completion.logprobs)
        worst = max(worst, (found - expected).abs().max().item())
    return ("pass", "") if worst < CLOSE else ("FAIL", f"logprobs differ by {worst:.0e}")


@attrs.frozen(eq=False)
class _Backward:
    """The results of a forward and a backward pass."""

    logprobs: Tensor
    """Logprobs of the trained tokens."""
    gradients: dict[str, Tensor]
    """Gradients, of the parameters that have one."""

    @property
    def moved(self) -> set[str]:
        """Names of the parameters whose gradient is finite and not 0."""
        return {n for n, g in self.gradients.items() if g.isfinite().all() and g.any()}


def replayed(family: str) -> tuple[str, str]:
    """Force the routes that a family's tiny model chose, and random ones, in packed documents.

    Returns:
        ``pass``, ``FAIL``, ``refused``, or nothing if the family has no experts; and the reason.
    """
    model = tiny_family(family)
    if not _has_experts(model):
        return "", ""
    try:
        experts = replay.shape(model).experts
    except ValueError as error:
        return "refused", str(error)
    batch, draws = _two_documents(model), torch.Generator().manual_seed(0)
    tables = _fill_tables(model, draws)
    plain, own = _with_routes(model, batch, None)
    other = torch.rand(*own.shape[:2], experts, generator=draws).topk(own.shape[2]).indices
    other = torch.where(torch.tensor(tables)[:, None], own, other).sort(-1).values
    try:
        same, followed = _with_routes(model, batch, own)
        forced, reached = _with_routes(model, batch, other)
    except RuntimeError as error:
        return "refused" if "can't be forced" in str(error) else "FAIL", str(error)
    moved, by_own = _largest(forced.logprobs - plain.logprobs), _difference(same, plain)
    idle = sorted(plain.moved - forced.moved)
    faults = {
        "the model's own routes did not reach the experts": not torch.equal(followed, own),
        f"the model's own routes change its results by {by_own:.0e}": not by_own < CLOSE,
        "other routes did not reach the experts": not torch.equal(reached, other),
        f"other routes change logprobs by no more than {moved:.0e}": not moved > MOVED,
        f"with other routes, {', '.join(idle)} have no finite gradients": bool(idle),
    }
    return _verdict(faults, LOOKED_UP if any(tables) else "")


def _fill_tables(model: nn.Module, draws: torch.Generator) -> list[bool]:
    """Draw each token id's experts where layers look them up; return which layers with experts do.

    The tables of a model without a checkpoint are zeros.
    """
    found = []
    for layer in expert_layers(model):
        tables = [b for name, b in layer.block.named_buffers() if name.endswith(TABLE)]
        for table in tables:
            scores = torch.rand(len(table), layer.count, generator=draws)
            table.copy_(scores.topk(table.shape[1]).indices)
        found.append(bool(tables))
    return found


def quantized(family: str) -> tuple[str, str]:
    """Train a family's tiny model in FP8 on packed documents, and compare what it would publish.

    Returns:
        ``pass``, ``FAIL`` or ``refused``, and the reason.
    """
    exact, model = tiny_family(family), tiny_family(family)
    batch, form = _two_documents(model), fp8.Format.of_blocks(BLOCK)
    matmul = fp8.GroupedMatmul(form=form) if expert_modules(model) else None
    try:
        fp8.convert_linears(model, form=form)
        if matmul is not None:
            parallel.divide_experts(model, matmul=matmul)
    except ValueError as error:
        return "refused", str(error)
    plain, ours = _backward(exact, batch), _backward(model, batch)
    operands = _operands(model, matmul)
    changes = (ours.logprobs - plain.logprobs).abs() / plain.logprobs.std()
    trained = {name for name in operands if model.get_parameter(name).requires_grad}
    idle = sorted((plain.moved | trained) - ours.moved)
    mean = changes.mean().item()
    faults = {
        f"{', '.join(idle)} have no finite gradients": bool(idle),
        f"logprobs change by {mean:.2f} standard deviations": not mean < FP8_CHANGE,
        "logprobs don't change": not changes.max() > CLOSE,
    }
    if any(faults.values()):
        return _verdict(faults, "")
    try:
        quantize = fp8.CheckpointQuantizer(model, experts=matmul)
    except ValueError as error:
        return "refused", f"it can be trained, but not published: {error}"
    faults = _faults_of_publishing(model, quantize, operands)
    plain_experts = matmul is None and _has_experts(model)
    return _verdict(faults, PLAIN_EXPERTS if plain_experts else "")


def _faults_of_publishing(
    model: nn.Module, quantize: fp8.CheckpointQuantizer, operands: dict[str, Tensor]
) -> dict[str, bool]:
    """Compare the published values with those by which the layers multiply."""
    sent = dict(checkpoint_tensors(model, quantize=quantize))
    published = {
        name: fp8.dequantize(q, sent[name + SCALES], block=BLOCK)
        for name, q in sent.items()
        if name + SCALES in sent
    }
    expected = converted(model, operands)
    wrong = [n for n, w in expected.items() if n in published and not torch.equal(published[n], w)]
    missing = sorted(expected.keys() ^ published.keys())
    return {
        f"other tensors are published than are multiplied by: {missing[:3]}": bool(missing),
        f"{', '.join(wrong)} differ from the operands of their products": bool(wrong),
    }


def _has_experts(model: nn.Module) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())


def _two_documents(model: Any) -> PackedBatch:
    """Pack documents of 16 and 31 tokens into one row."""
    ((batch,),) = make_batches(model_documents(model)[2:4])
    return batch


def _with_routes(
    model: nn.Module, batch: PackedBatch, rows: Tensor | None
) -> tuple[_Backward, Tensor]:
    """Train with these routes, or without; return the routes that reached the experts, too."""
    with replay.forced(model, rows), replay.capture(model) as reached:
        found = _backward(model, batch)
    return found, reached.rows.long().sort(-1).values  # their order has no meaning


def _backward(model: nn.Module, batch: PackedBatch) -> _Backward:
    model.zero_grad()
    logprobs, _ = score(model, batch, entropy=False)
    (-logprobs[batch.loss_mask].mean()).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return _Backward(logprobs.detach()[batch.loss_mask], gradients)


def _operands(model: nn.Module, matmul: fp8.GroupedMatmul | None) -> dict[str, Tensor]:
    """Return the weights by which FP8 layers multiply, as their products with identity matrices."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, fp8.Fp8Linear):
            without = {} if layer.bias is None else {"bias": torch.zeros_like(layer.bias)}
            identity = torch.eye(layer.in_features)
            found[f"{name}.weight"] = functional_call(layer, without, identity).detach().T
    for name, experts in expert_modules(model).items():
        for own, parameter in experts.named_parameters():
            if matmul is not None and parameter.ndim == 3:
                count, _, inputs = parameter.shape
                rows = torch.eye(inputs).repeat(count, 1)
                ends = inputs * torch.arange(1, count + 1, dtype=torch.int32)
                products = matmul(rows, parameter.detach().transpose(1, 2), ends)
                found[f"{name}.{own}"] = products.view(count, inputs, -1).transpose(1, 2)
    return found


def _difference(one: _Backward, other: _Backward) -> float:
    """Return the largest difference of logprobs, or of gradients relative to the largest one."""
    if one.gradients.keys() != other.gradients.keys():
        return float("inf")
    scale = max(_largest(g) for g in other.gradients.values())
    found = [_largest(one.gradients[n] - g) / scale for n, g in other.gradients.items()]
    found.append(_largest(one.logprobs - other.logprobs))
    return torch.tensor(found).max().item()  # NaN if one is, unlike Python's max


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def _verdict(faults: dict[str, bool], reason: str) -> tuple[str, str]:
    fault = next((text for text, so in faults.items() if so), "")
    return ("FAIL", fault) if fault else ("pass", reason)


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
