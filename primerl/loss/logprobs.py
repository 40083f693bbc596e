"""Logprobs of packed documents, by unmodified Hugging Face models."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from primerl._forward_passes import attempt
from primerl.attention import attend_by_document, require_documents
from primerl.attention.admission import refuse_virtual_tokens
from primerl.loss.arguments import checked
from primerl.loss.linear_head import FLOOR, check_rows, check_values, head_logprobs
from primerl.loss.ratio import upcast

# Models that were found to scale, cap or otherwise change their logits before returning them.
_MODELS_THAT_NEED_LOGITS: WeakSet[nn.Module] = WeakSet()


def token_logprobs(
    logits: Tensor, labels: Tensor, *, temperature: float | Tensor = 1.0
) -> Float[Tensor, " t"]:
    """The processed logprob of each label: ``log softmax(logits / temperature)[labels]``.

    Computed in at least float32. ``linear_logprobs`` gives the same without the logits.

    Args:
        logits: ``[t, v]``, floating point.
        labels: ``[t]``, integers in ``0 .. v - 1``.
        temperature: of all rows, or ``[t]``, of each.

    Raises:
        ValueError: a shape or dtype does not fit the others, a label is outside the vocabulary, or
            ``temperature`` is not finite and above 0.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}; expected two "
            "dimensions and floating point"
        )
    check_rows(labels, temperature, None, like=logits, name="logits")
    check_values(labels, temperature, None, vocabulary=logits.shape[1])
    return _chosen(_log_softmax(logits, temperature), labels)


@checked()
def model_logprobs(
    model: nn.Module,
    token_ids: Int[Tensor, " t"],
    position_ids: Int[Tensor, " t"],
    labels: Int[Tensor, " t"],
    *,
    temperature: float | Tensor = 1.0,
    rows: Bool[Tensor, " t"] | None = None,
) -> Float[Tensor, " t"]:
    """The processed logprob that a causal language model gives each row's label.

    Documents lie end to end and do not see each other. One begins wherever a position does not
    follow the one before; one that begins at position n > 0 shares the first n tokens of the
    document before it, as ``packing.pack(share_prefixes=True)`` lays them out. A model that
    attends by ``sdpa`` or ``eager`` is switched, by its public ``set_attn_implementation``, to
    attention within each document, so that no t x t mask is ever built; flash attention reads the
    positions itself and is left alone. The logits are not materialized either:
    ``linear_logprobs`` replaces the model's head. Where the head is not a plain linear layer, or
    the model changes its logits afterwards (which the first call detects, and then runs the model
    again), they are computed as the model does. To recompute activations, checkpoint the layers, as
    ``gradient_checkpointing_enable`` does, not the whole model or its head.

    Args:
        model: an unmodified ``transformers`` causal language model.
        token_ids: the packed tokens.
        position_ids: each token's position in its document.
        labels: the token to score in each row (anything where ``rows`` is false).
        temperature: of the sampler, for all rows or ``[t]``, for each.
        rows: the rows to score, such as the loss mask; the others give 0 and cost nothing in the
            head. None scores all rows.

    Raises:
        ValueError: the pack does not begin with position 0, a document shares more tokens than
            there are, the model's attention is not supported (sinks, windows shorter than a
            document, unknown sparse attention, linear attention, or flash attention where documents
            share tokens), it has an adapter of prompt or prefix tuning, or an argument is refused
            as by ``linear_logprobs``.
    """
    return _score(model, token_ids, position_ids, labels, temperature, rows, False)[0]


@checked()
def model_logprobs_and_entropy(
    model: nn.Module,
    token_ids: Int[Tensor, " t"],
    position_ids: Int[Tensor, " t"],
    labels: Int[Tensor, " t"],
    *,
    temperature: float | Tensor = 1.0,
    rows: Bool[Tensor, " t"] | None = None,
) -> tuple[Float[Tensor, " t"], Float[Tensor, " t"]]:
    """``model_logprobs``, and the entropy of each row's distribution in nats, differentiable too.

    The arguments and errors are those of ``model_logprobs``.
    """
    return _score(model, token_ids, position_ids, labels, temperature, rows, True)


def _score(
    model: nn.Module,
    token_ids: Tensor,
    position_ids: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    rows: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Each row's logprob and entropy; the entropy is valid only ``with_entropy``."""
    if torch.is_inference_mode_enabled():  # its tensors have no version that would show a write
        with torch.inference_mode(False), torch.no_grad():
            return _score(model, token_ids, position_ids, labels, temperature, rows, with_entropy)
    refuse_virtual_tokens(model)
    config: Any = model.config
    check_rows(labels, temperature, rows, like=token_ids, name="token_ids")
    check_values(labels, temperature, rows, vocabulary=config.get_text_config().vocab_size)
    documents = attend_by_document(model, position_ids)

    def run() -> Tensor:
        with require_documents(documents, position_ids):
            return model(  # type: ignore[no-any-return]
                input_ids=token_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(0),
                use_cache=False,
                documents=documents,
            ).logits

    def score(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = head_logprobs(hidden, weight, labels, temperature, rows)
        return logprobs, entropy if with_entropy else entropy.detach()

    logits = None
    if model not in _MODELS_THAT_NEED_LOGITS:
        head = _HeadReplacement(model, len(token_ids), score)
        try:
            with attempt() as first, head:
                logits = run()
        except (IndexError, RuntimeError):
            if not head.outputs:  # otherwise the model indexed the placeholder
                raise
        if logits is not None and head.returned_as(logits):
            logprobs, entropy = logits.squeeze(0).unbind(-1)
            return logprobs, entropy
        if head.outputs:
            _MODELS_THAT_NEED_LOGITS.add(model)
            first.discarded, logits = True, None
    logits = run() if logits is None else logits
    return _score_logits(logits.squeeze(0), labels, temperature, rows, with_entropy)


class _HeadReplacement(TorchFunctionMode):
    """While a model runs on t tokens, ``score(hidden, weight)`` replaces its head's logits.

    The head's product is replaced within the model's forward pass, where a sharded weight is
    gathered, by a placeholder ``[1, t, 2]``. ``returned_as`` tells whether the model returned the
    placeholder itself as its logits, or did anything else with it.
    """

    def __init__(self, model: nn.Module, tokens: int, score: Callable[..., Any]) -> None:
        super().__init__()
        self.head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self.tokens, self.score = tokens, score
        self.outputs: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Not in a compiled graph, which would depend on this call's rows and labels.
        traced = torch.compiler.is_compiling()
        if func is F.linear and not traced and self._is_head(*args, **(kwargs or {})):
            both = self.score(args[0].squeeze(0), args[1])
            self.outputs.append(torch.stack([x.unsqueeze(0) for x in both], dim=-1))  # no view
            return self.outputs[-1]
        return func(*args, **(kwargs or {}))

    def _is_head(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        if bias is not None or x.shape[:-1] != (1, self.tokens) or isinstance(weight, DTensor):
            return False
        return isinstance(self.head, nn.Linear) and weight is self.head.weight

    def returned_as(self, logits: Tensor) -> bool:
        # The first: a model that used its head before has computed with a placeholder.
        # Version 0: nothing was written into it.
        return bool(self.outputs) and logits is self.outputs[0] and logits._version == 0


def _score_logits(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    rows: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    if rows is not None:
        rows = rows.nonzero().squeeze(1)
        logits, chosen = logits.index_select(0, rows), labels.index_select(0, rows)
        if isinstance(temperature, Tensor) and temperature.ndim:
            temperature = temperature.index_select(0, rows)
    log_p = _log_softmax(logits, temperature)
    logprobs = _chosen(log_p, labels if rows is None else chosen)
    entropy = -(log_p.exp() * log_p.clamp(min=FLOOR)).sum(-1) if with_entropy else logprobs
    if rows is None:
        return logprobs, entropy
    zeros = log_p.new_zeros(labels.shape)
    return zeros.index_copy(0, rows, logprobs), zeros.index_copy(0, rows, entropy)


def _log_softmax(logits: Tensor, temperature: float | Tensor) -> Tensor:
    logits = upcast(logits)
    if isinstance(temperature, Tensor):
        logits = logits / temperature.detach().to(logits.dtype).unsqueeze(-1)
    elif temperature != 1:
        logits = logits / temperature
    return logits.log_softmax(-1)


def _chosen(log_p: Tensor, labels: Tensor) -> Tensor:
    return log_p.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
