"""Logprobs that unmodified Hugging Face models give the tokens of packed documents."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from primerl._common.forward_passes import attempt, is_compiled
from primerl._common.host_memory import true_rows
from primerl._common.supported_adapters import refuse_virtual_tokens
from primerl.attention import attend_by_document, require_documents
from primerl.loss.arguments import checked
from primerl.loss.linear_head import check_values, head_logprobs, head_top_k, in_place
from primerl.loss.linear_head_tiles import FLOOR, as_columns
from primerl.loss.ratio import upcast

# Models that were found to scale, cap or otherwise change their logits before returning them.
_MODELS_THAT_NEED_LOGITS: WeakSet[nn.Module] = WeakSet()


@checked()
def token_logprobs(
    logits: Float[Tensor, "t v"],
    labels: Int[Tensor, " t"],
    *,
    temperature: float | Tensor = 1.0,
) -> Float[Tensor, " t"]:
    """The processed logprob of each label: ``log softmax(logits / temperature)[labels]``.

    It is computed in at least float32. ``linear_logprobs`` computes the same without materializing
    the logits.

    Args:
        logits: the logits of each row.
        labels: integers in ``0 .. v - 1``.
        temperature: one number for all rows, or ``[t]``.

    Raises:
        ValueError: a shape or dtype does not match the others, a label is outside the vocabulary,
            or ``temperature`` is not finite and above 0.
    """
    check_values(labels, temperature, None, vocabulary=logits.shape[1])
    log_p = _log_softmax(logits, temperature)
    return log_p.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


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

    Documents lie end to end and do not see each other. A document begins wherever a position does
    not follow the position before it. If it begins at position n > 0, it shares the first n tokens
    of the document before it, as ``packing.pack(share_prefixes=True)`` lays them out.

    A model with ``sdpa`` or ``eager`` attention is switched, by its public
    ``set_attn_implementation``, to attention within each document, so that no t x t mask is ever
    built. Flash attention reads the positions itself and is not replaced. The logits are not
    materialized either: ``linear_logprobs`` replaces the model's head. If the head is not a plain
    linear layer, or the model changes its logits afterwards, the logits are computed as the model
    does; the first call detects such a change, and then runs the model again. To recompute
    activations, checkpoint the layers, as ``gradient_checkpointing_enable`` does, not the whole
    model or its head.

    Args:
        model: an unmodified ``transformers`` causal language model.
        token_ids: the packed tokens.
        position_ids: each token's position in its document.
        labels: the token to score in each row (any value where ``rows`` is false).
        temperature: the sampler's temperature: one number for all rows, or ``[t]``.
        rows: the rows to score, such as the loss mask; the others give 0 and cost nothing in the
            head. None scores all rows.

    Raises:
        ValueError: the pack does not begin with position 0, a document shares more tokens than
            the document before it has, the model's layers would let documents see each other,
            its attention has dropout beside sinks or capped scores, or does not support shared
            tokens (flash attention), it has an adapter of prompt or prefix tuning, or
            ``linear_logprobs`` would refuse an argument.
    """
    head = _LogprobHead(labels, temperature, rows, with_entropy=False)
    return _score(model, token_ids, position_ids, head)[:, 0]


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
    """``model_logprobs`` and the entropy of each row's distribution in nats, both differentiable.

    The arguments and errors are those of ``model_logprobs``.
    """
    head = _LogprobHead(labels, temperature, rows, with_entropy=True)
    logprobs, entropy = _score(model, token_ids, position_ids, head).unbind(-1)
    return logprobs, entropy


@checked()
def model_candidate_logprobs(
    model: nn.Module,
    token_ids: Int[Tensor, " t"],
    position_ids: Int[Tensor, " t"],
    candidates: Int[Tensor, "t c"],
    *,
    temperature: float | Tensor = 1.0,
    rows: Bool[Tensor, " t"] | None = None,
) -> Float[Tensor, "t c"]:
    """``model_logprobs`` of c tokens per row: ``candidates[j]`` are scored in row j.

    It serves losses between distributions, such as ``top_k_forward_kl``. It takes the memory and
    time of ``model_logprobs``, plus c numbers per row. A token may occur several times in a row.
    The other arguments and errors are those of ``model_logprobs``.
    """
    if candidates.shape[1] == 0:
        raise ValueError("candidates has shape [t, 0]; expected at least one token per row")
    head = _LogprobHead(candidates, temperature, rows, with_entropy=False)
    return _score(model, token_ids, position_ids, head)[:, :-1]


@checked()
def model_top_k_logprobs(
    model: nn.Module,
    token_ids: Int[Tensor, " t"],
    position_ids: Int[Tensor, " t"],
    labels: Int[Tensor, " t"],
    *,
    k: int,
    temperature: float | Tensor = 1.0,
    rows: Bool[Tensor, " t"] | None = None,
) -> tuple[Float[Tensor, " t"], Int[Tensor, "t k"], Float[Tensor, "t k"]]:
    """``model_logprobs``, and each row's k likeliest tokens with their logprobs, likeliest first.

    It serves a teacher that scores a student's tokens; no result has a gradient. The other
    arguments are those of ``model_logprobs``.

    Returns:
        The labels' logprobs ``[t]``, the top tokens ``[t, k]`` and their logprobs ``[t, k]``.

    Raises:
        ValueError: ``k`` is not between 1 and the size of the vocabulary, or ``model_logprobs``
            raises it.
    """
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k is {k}; expected 1 to {vocabulary}, the size of the vocabulary")
    with torch.no_grad():
        head = _TopKHead(labels, temperature, rows, k=k)
        scored = _score(model, token_ids, position_ids, head)
    return scored[:, 0], scored[:, 1 : 1 + k].long(), scored[:, 1 + k :]


@attrs.frozen
class _LogprobHead:
    """Replacement of a model's head that computes logprobs of labels, then the entropy.

    Labels are ``[t]`` or ``[t, c]``. The entropy is valid only ``with_entropy``.
    """

    labels: Tensor
    temperature: float | Tensor
    rows: Tensor | None
    with_entropy: bool

    def from_hidden(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logprobs and entropy ``[t, c + 1]`` from hidden states ``[t, h]``."""
        logprobs, entropy = head_logprobs(hidden, weight, self.labels, self.temperature, self.rows)
        entropy = entropy if self.with_entropy else entropy.detach()
        return torch.cat([as_columns(logprobs), as_columns(entropy)], dim=1)

    def from_logits(self, logits: Tensor) -> Tensor:
        """Logprobs and entropy ``[t, c + 1]`` from logits ``[t, v]``."""
        log_p, labels, chosen = _selected(logits, self.labels, self.temperature, self.rows)
        logprobs = log_p.gather(-1, as_columns(labels).long())
        entropy = logprobs[:, :1]
        if self.with_entropy:
            entropy = -(log_p.exp() * log_p.clamp(min=FLOOR)).sum(-1, keepdim=True)
        return in_place(torch.cat([logprobs, entropy], dim=1), self.rows, chosen)


@attrs.frozen
class _TopKHead:
    """Replacement of a model's head that computes logprobs of labels, top tokens, and theirs.

    Token ids are stored in the logprobs' dtype, which represents all integers up to 2^24 exactly.
    """

    labels: Tensor
    temperature: float | Tensor
    rows: Tensor | None
    k: int

    def from_hidden(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logprobs, top tokens and theirs, ``[t, 1 + 2 k]``, from hidden states ``[t, h]``."""
        logprobs, top_ids, top_logprobs = head_top_k(
            hidden, weight, self.labels, self.k, self.temperature, self.rows
        )
        return torch.cat([as_columns(logprobs), top_ids.to(logprobs.dtype), top_logprobs], dim=1)

    def from_logits(self, logits: Tensor) -> Tensor:
        """Logprobs, top tokens and theirs, ``[t, 1 + 2 k]``, from logits ``[t, v]``."""
        log_p, labels, chosen = _selected(logits, self.labels, self.temperature, self.rows)
        logprobs = log_p.gather(-1, as_columns(labels).long())
        top_logprobs, top_ids = log_p.topk(self.k)
        found = torch.cat([logprobs, top_ids.to(logprobs.dtype), top_logprobs], dim=1)
        return in_place(found, self.rows, chosen)


def _score(
    model: nn.Module, token_ids: Tensor, position_ids: Tensor, head: "_LogprobHead | _TopKHead"
) -> Tensor:
    """Run the model with its head replaced by ``head``, and return its output ``[t, n]``."""
    if torch.is_inference_mode_enabled():  # its tensors lack _version, see returned_as
        with torch.inference_mode(False), torch.no_grad():
            return _score(model, token_ids, position_ids, head)
    refuse_virtual_tokens(model)
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    labels, temperature, rows = head.labels, head.temperature, head.rows
    name = "candidates" if labels.ndim == 2 else "labels"
    check_values(labels, temperature, rows, vocabulary=vocabulary, name=name)
    documents = attend_by_document(model, position_ids)

    def run() -> Tensor:
        with require_documents(documents):
            return model(  # type: ignore[no-any-return]
                input_ids=token_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(0),
                use_cache=False,
                documents=documents,
            ).logits

    logits = None
    if model not in _MODELS_THAT_NEED_LOGITS:
        replaced = _HeadReplacement(model, len(token_ids), head.from_hidden)
        try:
            with attempt() as first, replaced.within_head():
                logits = run()
        except (IndexError, RuntimeError):
            if not replaced.outputs:  # otherwise the placeholder's shape caused the error
                raise
        if logits is not None and replaced.returned_as(logits):
            return logits.squeeze(0)
        if replaced.outputs:
            _MODELS_THAT_NEED_LOGITS.add(model)
            first.discarded, logits = True, None
    logits = run() if logits is None else logits
    return head.from_logits(logits.squeeze(0))


class _HeadReplacement(TorchFunctionMode):
    """Replace the logits of a model's head by ``score(hidden, weight)`` while it runs on t tokens.

    The head's product is replaced by a placeholder ``[1, t, n]`` within the head's forward pass,
    where a sharded weight is gathered. ``returned_as`` says whether the model returned the
    placeholder itself as its logits, unchanged.
    """

    def __init__(self, model: nn.Module, tokens: int, score: Callable[..., Tensor]) -> None:
        super().__init__()
        self.head: Any = model.get_output_embeddings()  # type: ignore[operator]
        # A compiled graph would depend on this call's rows and labels.
        self._in_graph = is_compiled(model) or is_compiled(self.head)
        self.tokens, self.score = tokens, score
        self.outputs: list[Tensor] = []

    @contextlib.contextmanager
    def within_head(self) -> Iterator[None]:
        """Be active whenever the head runs, but not in compiled layers, where torch can't be.

        Nothing is replaced if the model is compiled as a whole.
        """
        if self._in_graph or not isinstance(self.head, nn.Linear):
            yield
            return
        with contextlib.ExitStack() as hooks:
            for hook in (
                self.head.register_forward_pre_hook(self._begin),
                self.head.register_forward_hook(self._end, always_call=True),
            ):
                hooks.callback(hook.remove)
            yield

    def _begin(self, *_: Any) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: Any) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and self._is_head(*args, **(kwargs or {})):
            scored = self.score(args[0].squeeze(0), args[1])
            self.outputs.append(torch.stack([scored]))  # a copy, not a view
            return self.outputs[-1]
        return func(*args, **(kwargs or {}))

    def _is_head(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        if bias is not None or x.shape[:-1] != (1, self.tokens) or isinstance(weight, DTensor):
            return False
        return weight is self.head.weight

    def returned_as(self, logits: Tensor) -> bool:
        # outputs[0]: a model that used its head more than once has computed with a placeholder.
        # Version 0: nothing was written into the placeholder.
        return bool(self.outputs) and logits is self.outputs[0] and logits._version == 0


def _selected(
    logits: Tensor, labels: Tensor, temperature: float | Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logprobs ``[n, v]``, labels and indices (None for all rows) of the selected rows."""
    chosen = None
    if rows is not None:
        chosen = true_rows(rows)
        logits, labels = logits.index_select(0, chosen), labels.index_select(0, chosen)
        if isinstance(temperature, Tensor) and temperature.ndim:
            temperature = temperature.index_select(0, chosen)
    return _log_softmax(logits, temperature), labels, chosen


def _log_softmax(logits: Tensor, temperature: float | Tensor) -> Tensor:
    logits = upcast(logits)
    if isinstance(temperature, Tensor):
        logits = logits / temperature.detach().to(logits.dtype).unsqueeze(-1)
    elif temperature != 1:
        logits = logits / temperature
    return logits.log_softmax(-1)
