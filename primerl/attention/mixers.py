"""Linear attention, state-space layers and convolutions, run document by document.

Such a mixer carries a state from each token to the next, so in a pack it would carry it from one
document into the next. Here, the documents of a pack become the rows of a batch, padded at their
ends, where nothing reads the state. Documents of similar lengths share a call of the mixer. A
document that shares tokens with an earlier one is computed from its first token on.

A cache would carry a state from one call of a mixer into the next, so packed documents have none.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from primerl._common.host_memory import to_device
from primerl.attention.admission import (
    MASKED_BY_DOCUMENT,
    PACKED_ATTENTION,
    language_model,
    named_mixers,
)
from primerl.attention.documents import Layout, batch_layout, concatenated, once_per_tensor
from primerl.attention.packed import SWITCH_BACK, is_packed, not_passed_on

# Documents of at most this many tokens share a call. Longer ones share it if their lengths, rounded
# up to a quarter of a power of 2, are equal: at most a quarter of the rows is padding.
SHORT = 64


@attrs.frozen(kw_only=True, eq=False)
class RowGroups:
    """How the rows of a pack are divided into calls of a mixer."""

    groups: tuple[Tensor, ...]
    """Rows of each call, ``[documents, longest]``; padding repeats a document's last row."""
    order: Tensor
    """For each query of the pack, its place in the outputs of all calls, end to end."""


class DocumentMixer(nn.Module):
    """A base of a model's mixer that runs it on each document of a pack.

    ``mix_by_document`` makes a class of it and of the model's own, and an object with the
    attributes, parameters and hooks of the model's mixer.
    """

    handed_over: Any
    """The documents, if the layer does not pass them on to its mixer."""

    def forward(
        self, hidden: Float[Tensor, "b t h"] | None = None, *args: Any, **options: Any
    ) -> Any:
        """Run the model's mixer on the documents of its layer, or on ``hidden`` if there is none.

        Raises:
            ValueError: the batch is packed, but the documents did not arrive, or there is a cache.
        """
        mix: Any = super().forward
        # The name of the first argument differs by family.
        hidden = options.pop(next(iter(options))) if hidden is None else hidden
        assert hidden is not None
        documents = options.pop("documents", None)
        documents = self.handed_over if documents is None else documents
        if self.is_whole(documents):
            return mix(hidden, *args, **options)
        if any(options.get(name) is not None for name in _CACHES):
            raise ValueError(
                f"{type(self).__name__} got a cache of keys or states; packed attention has none, "
                f"so call the model without past_key_values. {SWITCH_BACK}"
            )
        of_pack = dict(options)
        options |= dict.fromkeys(_OF_THE_PACK & options.keys())
        if "use_cache" in options:  # RecurrentGemma's blocks keep their states themselves
            options["use_cache"] = False
        kinds: set[bool] = set()

        def mix_rows(rows: Tensor, places: Tensor | None) -> Tensor:
            if "position_ids" in options:
                options["position_ids"] = torch.arange(rows.shape[1], device=rows.device)[None]
            mixed = mix(rows, *args, **(options | self.options_of_rows(of_pack, rows, places)))
            kinds.add(isinstance(mixed, tuple))
            return mixed[0] if isinstance(mixed, tuple) else mixed  # type: ignore[no-any-return]

        found = self.mix_documents(hidden, documents, mix_rows)
        return (found, None) if True in kinds else found

    def is_whole(self, documents: Any) -> bool:
        """Return whether the mixer's input is one document, or a batch of documents.

        Raises:
            ValueError: the batch is packed, but the documents did not arrive.
        """
        if documents is None and is_packed():
            raise ValueError(not_passed_on(self))
        return documents is None or (len(documents.spans) == 1 and documents.gathered is None)

    def options_of_rows(
        self,
        options: dict[str, Any],  # noqa: ARG002
        rows: Float[Tensor, "b t h"],  # noqa: ARG002
        places: Tensor | None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return arguments for some rows of the pack, whose arguments are ``options``."""
        return {}

    def mix_documents(
        self,
        hidden: Float[Tensor, "b t h"],
        documents: Any,
        mix: Callable[[Tensor, Tensor | None], Tensor],
    ) -> Float[Tensor, "b t h"]:
        """Run ``mix`` on each document of a pack, and on the places of its rows in the pack."""
        rows = _divide(documents.plan, documents.spans, hidden.device)
        flat, parts = hidden.flatten(0, 1), []
        for group in rows.groups:
            batch = flat.index_select(0, group.flatten()).view(*group.shape, -1)
            parts.append(mix(batch, group).flatten(0, 1))
        return torch.cat(parts).index_select(0, rows.order).view(*hidden.shape[:2], -1)


# Arguments that describe all tokens of a pack; a mixer needs none of them for a document alone.
_OF_THE_PACK = frozenset(
    {"attention_mask", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "position_embeddings"}
)
# Names of mixers' arguments for a cache of keys or states, by family and version of transformers.
_CACHES = ("cache_params", "past_key_values", "cache")


@torch.compiler.disable  # type: ignore[untyped-decorator]
@once_per_tensor  # all layers have the same documents
def _divide(
    plan: Tensor,  # noqa: ARG001  for whose lifetime the result is cached
    spans: tuple[Any, ...],
    device: torch.device,
) -> RowGroups:
    """Divide documents into groups of similar lengths."""
    ranges = [np.array(one.keys, int).reshape(-1, 2) for one in spans]
    rows = [concatenated(one[:, 0], one[:, 1] - one[:, 0]) for one in ranges]
    sizes = np.array([_rounded(len(one)) for one in rows])
    groups, order, begin = [], [np.empty(0, int)] * len(spans), 0
    for size in np.unique(sizes):
        members = np.flatnonzero(sizes == size).tolist()
        longest = max(len(rows[number]) for number in members)
        padded = [np.pad(rows[n], (0, longest - len(rows[n])), mode="edge") for n in members]
        groups.append(to_device(torch.from_numpy(np.stack(padded)), device))
        for number in members:
            end, own = begin + len(rows[number]), spans[number].end - spans[number].begin
            order[number] = np.arange(end - own, end)
            begin += longest
    in_order = torch.from_numpy(np.concatenate(order))
    return RowGroups(groups=tuple(groups), order=to_device(in_order, device))


def _rounded(length: int) -> int:
    if length <= SHORT:
        return SHORT
    quarter = 1 << max((length - 1).bit_length() - 3, 0)
    return -(-length // quarter) * quarter


def mix_by_document(model: nn.Module, base: Any = DocumentMixer) -> None:
    """Replace a model's mixers by modules of class ``base``; names of parameters stay the same.

    A mixer that was replaced before is replaced again, unless it has all of ``base``'s methods.
    """
    mixers = named_mixers(model)
    if mixers and not any(isinstance(mixer, DocumentMixer) for _, mixer in mixers):
        decoder = language_model(model)
        decoder.register_forward_pre_hook(_prepare_pack, with_kwargs=True)
    for name, mixer in mixers:
        if isinstance(mixer, base):
            continue
        model.set_submodule(name, combined_module(base, mixer, handed_over=None))
        if not isinstance(mixer, DocumentMixer):
            layer, _, own_name = name.rpartition(".")
            handover = _Handover(own_name)
            model.get_submodule(layer).register_forward_pre_hook(handover, with_kwargs=True)


def combined_module(base: Any, module: nn.Module, **attributes: Any) -> Any:
    """Make a module of class ``base`` and of a model's module, with the attributes of the latter.

    Parameters and submodules are shared; methods of ``base`` come before those of the model's.
    """
    family: Any = type(module)
    kind = _combined(base, family)
    replaced: nn.Module = kind.__new__(kind)
    vars(replaced).update(vars(module), **attributes)
    return replaced


@functools.cache
def _combined(base: Any, family: Any) -> Any:
    return type(family.__name__, (base, family), {})


@attrs.frozen(eq=False)
class _Handover:
    """A hook that hands a layer's documents over to its mixer."""

    mixer: str
    """The mixer's name in its layer."""

    def __call__(self, layer: nn.Module, _args: Any, options: dict[str, Any]) -> None:
        getattr(layer, self.mixer).handed_over = options.get("documents")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prepare_pack(
    decoder: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Prepare the arguments of a model with mixers for packed documents (a forward pre-hook).

    If only positions say where documents begin, find the documents here: mixers get no positions.
    Turn off the cache, which transformers makes by default. It is left on for one document, and
    for a batch whose rows are one document each, if attention supports it.
    """
    names = inspect.signature(decoder.forward).parameters
    options = dict(zip(names, args, strict=False)) | options
    documents = options.get("documents")
    kind = decoder.config.get_text_config()._attn_implementation
    by_document = kind in (PACKED_ATTENTION, MASKED_BY_DOCUMENT) or "flash" in kind
    if documents is None and by_document:
        documents = _documents_by_positions(options)
        if documents is not None:
            options["documents"] = documents
    alone = documents is None or (isinstance(documents, Layout) and len(documents.spans) == 1)
    if not alone or kind == MASKED_BY_DOCUMENT:
        options["use_cache"] = False
    return (), options


def _documents_by_positions(options: dict[str, Any]) -> Layout | None:
    """Find the documents of a batch by their positions; None if each row is one document."""
    positions, mask = options.get("position_ids"), options.get("attention_mask")
    tokens = options.get("input_ids")
    tokens = options.get("inputs_embeds") if tokens is None else tokens
    if positions is None or tokens is None:
        return None
    batch, length = tokens.shape[:2]
    if positions.shape == (4, batch, length):  # in the text, in time, in height and in width
        positions = positions[0]
    padded = isinstance(mask, Tensor) and not mask.all()  # which attention refuses
    if padded or positions.shape not in ((1, length), (batch, length)):
        return None
    layout = batch_layout(positions, batch, tokens.device)
    return layout if len(layout.spans) > batch else None
