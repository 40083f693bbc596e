"""Quantized weights of a converted model, for checkpoint files and engines.

The format is that of fine-grained FP8 checkpoints (DeepSeek-V3's, which transformers and vLLM
load). Each matrix has two tensors: ``NAME``, its FP8 values, and ``NAME_scale_inv``, the scales by
which the values are multiplied.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from primerl._common.adapters import has_adapters
from primerl._common.checkpoint_tensors import SCALES, converted
from primerl._common.expert_modules import expert_modules
from primerl.fp8.format import Format
from primerl.fp8.grouped import GroupedMatmul
from primerl.fp8.linear import Fp8Linear
from primerl.fp8.quantization import quantize_weight


class CheckpointQuantizer:
    """Quantizer that gives checkpoint tensors the same FP8 values as in the trainer.

        quantize = fp8.CheckpointQuantizer(model)
        models.save_pretrained(model, folder, tokenizer=tokenizer, quantize=quantize)
        transport = weights.transport_to(model, engine, quantize=quantize)

    The weights of ``Fp8Linear`` layers, and of experts if given, become FP8 values and scales
    (``NAME_scale_inv``). All other tensors stay unchanged.

    Args:
        model: a model converted by ``convert_linears``, sharded or not.
        experts: the ``GroupedMatmul`` of the model's experts; None if they are not in FP8.
        dtype: the dtype that the trainer computes in, as passed to ``shard(dtype=...)``. Weights
            are cast to it before they are quantized. None is the dtype of the parameters.

    Raises:
        ValueError: the model has nothing in FP8, several formats, blocks that are not square, low-
            rank adapters, or experts with blocks that a checkpoint would split.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        experts: GroupedMatmul | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layers = {
            name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)
        }
        forms = {module.form for module in layers.values()}
        forms |= {experts.form} if experts is not None else set()
        self.form = _one_square_form(forms)
        if has_adapters(model):
            raise ValueError(
                "the model has low-rank adapters: quantizing the merged weights would give values "
                "that differ from the quantized base weights of the trainer; publish only the "
                'adapter, with publish="adapter"'
            )
        stacked = expert_modules(model)
        names = {f"{name}.weight" for name in layers}
        if experts is not None:
            _refuse_cut_blocks(stacked, self.form)
            names |= {
                f"{name}.{own}"
                for name, module in stacked.items()
                for own, parameter in module.named_parameters()
                if parameter.ndim == 3
            }
        self.dtype = dtype
        self.parameters = frozenset(names)
        """Names of the model's parameters that are multiplied in FP8."""
        self._sent = _checkpoint_names(model, self.parameters)
        kept = _others(model, layers) + ([] if experts is not None else list(stacked))
        self.config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.form.block, self.form.block],
            "modules_to_not_convert": kept,
        }
        """The ``quantization_config`` entry for the checkpoint's ``config.json``."""
        if self.form.scale == "ue8m0":
            self.config["scale_fmt"] = "ue8m0"

    def __call__(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors to store for ``name``: itself, or its FP8 values and scales."""
        if name not in self._sent:
            return {name: tensor}
        q, scales = quantize_weight(tensor, block=self.form.block, scale=self.form.scale)
        return {name: q, f"{name}{SCALES}": scales}


def _one_square_form(forms: set[Format]) -> Format:
    if len(forms) != 1:
        raise ValueError(
            "the model has nothing in FP8; call fp8.convert_linears first"
            if not forms
            else f"the model has several FP8 formats, {forms}; a checkpoint can have only one"
        )
    (form,) = forms
    if form.weight_rows != form.block:
        raise ValueError(
            f"weights are in blocks of {form.weight_rows} x {form.block}, but fine-grained FP8 "
            "checkpoints have square blocks; train in BLOCK_FP8 or BLOCK_FP8_UE8M0"
        )
    return form


def _refuse_cut_blocks(stacked: dict[str, nn.Module], form: Format) -> None:
    if not stacked:
        raise ValueError("the model has no stacked experts; pass experts=None")
    for name, found in stacked.items():
        module: Any = found
        if module.is_transposed:
            raise ValueError(
                f"{name} stores its matrices transposed, which no fine-grained FP8 checkpoint does"
            )
        rows = module.gate_up_proj.shape[1] // 2 if module.has_gate else 0
        if rows % form.block:
            raise ValueError(
                f"{name} fuses two matrices of {rows} rows, which checkpoints store separately; a "
                f"block of {form.block} rows would span both, so the scales would differ"
            )


def _checkpoint_names(model: nn.Module, parameters: frozenset[str]) -> frozenset[str]:
    """Return the names of these parameters, or of their parts, in the checkpoint."""
    shapes = {
        name: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        for name, parameter in model.named_parameters()
        if name in parameters
    }
    return frozenset(converted(model, shapes))


def _others(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of modules whose weight matrix is not in FP8, except embeddings."""
    found = []
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        matrix = isinstance(weight, Tensor) and weight.ndim == 2
        if matrix and name not in layers and not isinstance(module, nn.Embedding):
            found.append(name)
    return found
