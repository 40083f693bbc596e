"""Linear attention, state-space layers and convolutions, run document by document.

Such a mixer carries a state from each token to the next, so in a pack it would carry it from one
document into the next. Here, the documents of a pack become the rows of a batch, padded at their
ends, where nothing reads the state. Documents of similar lengths share a call of the mixer. A
document that shares tokens with an earlier one is computed from its first token on.
"""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from primerl.attention.admission import named_mixers
from primerl.attention.documents import concatenated, once_per_tensor
from primerl.attention.packed import is_packed, not_passed_on

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
            ValueError: the batch is packed, but the documents did not arrive.
        """
        mix: Any = super().forward
        # The name of the first argument differs by family.
        hidden = options.pop(next(iter(options))) if hidden is None else hidden
        assert hidden is not None
        documents = options.pop("documents", None)
        documents = self.handed_over if documents is None else documents
        if self.is_whole(documents):
            return mix(hidden, *args, **options)
        of_pack = dict(options)
        options |= dict.fromkeys(_OF_THE_PACK & options.keys())
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
        groups.append(torch.from_numpy(np.stack(padded)).to(device))
        for number in members:
            end, own = begin + len(rows[number]), spans[number].end - spans[number].begin
            order[number] = np.arange(end - own, end)
            begin += longest
    return RowGroups(groups=tuple(groups), order=torch.from_numpy(np.concatenate(order)).to(device))


def _rounded(length: int) -> int:
    if length <= SHORT:
        return SHORT
    quarter = 1 << max((length - 1).bit_length() - 3, 0)
    return -(-length // quarter) * quarter


def mix_by_document(model: nn.Module, base: Any = DocumentMixer) -> None:
    """Replace a model's mixers by modules of class ``base``; names of parameters stay the same."""
    for name, mixer in named_mixers(model):
        if isinstance(mixer, DocumentMixer):
            continue
        replaced = combined_module(base, mixer, handed_over=None)
        model.set_submodule(name, replaced)
        layer = model.get_submodule(name.rpartition(".")[0])
        layer.register_forward_pre_hook(_Handover(replaced), with_kwargs=True)


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

    mixer: DocumentMixer

    def __call__(self, _layer: nn.Module, _args: Any, options: dict[str, Any]) -> None:
        self.mixer.handed_over = options.get("documents")
