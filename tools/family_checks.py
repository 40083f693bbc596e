"""Checks of a family's tiny model in one process: sampling, router replay and FP8.

They are columns of docs/families.md, which tools/families.py writes.
"""

import asyncio
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call

from primerl import fp8, parallel, replay, rollout
from primerl._common.checkpoint_tensors import SCALES, checkpoint_tensors, converted
from primerl._common.expert_modules import expert_modules
from primerl.packing import PackedBatch
from primerl.parity.command import has_experts
from primerl.parity.mesh_training import make_batches, model_documents, score
from primerl.replay.recorder import expert_layers
from primerl.rollout.engines.transformers import snapshots
from primerl.testing.families import tiny_family
from primerl.types import Completion, SamplingParams

CLOSE = 2e-5  # largest difference of logprobs, or relative one of gradients, by rounding
MOVED = 1e-3  # smallest change of a logprob that other experts cause in at least one token
FP8_CHANGE = 0.5  # largest mean change of logprobs by FP8, in standard deviations of logprobs
BLOCK = 16  # of FP8 in the tiny models
LONGEST_S = 300.0  # of sampling, on a busy machine
SEGMENT = 8  # tokens; the longest prompt has 18, so that states continue twice within it
TABLE = "tid2eid"  # DeepSeek-V4's table of the experts of each token id
LOOKED_UP = "layers that look up each token's experts follow only the routes of their table"
PLAIN_EXPERTS = (
    "its experts are not in FP8, because transformers does not call them through its registry of "
    "experts functions"
)


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
        return await asyncio.wait_for(asyncio.gather(*requests), LONGEST_S)

    try:
        with (
            mock.patch.object(snapshots, "SEGMENT_TOKENS", SEGMENT),
            rollout.TransformersEngine(model) as engine,
        ):
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
    if not has_experts(model):
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
    plain_experts = matmul is None and has_experts(model)
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
