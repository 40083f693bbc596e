"""Context-parallel linear attention, state-space layers and convolutions.

Such a mixer carries a state from each token to the next, so a rank cannot begin in the middle of a
document. Ranks exchange rows so that each computes whole documents, and return the outputs to the
ranks that hold the rows. A document is never divided: one that is longer than all others together
leaves other ranks without work in these layers, though not in the rest of the model.
"""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from primerl.attention.documents import Document, Layout, concatenated, lay_out
from primerl.attention.mixers import DocumentMixer, mix_by_document
from primerl.attention.packed import not_passed_on
from primerl.parallel.expert_parallel.dispatch import exchange


@attrs.frozen(kw_only=True, eq=False)
class DocumentExchange:
    """The exchange of rows after which each rank has whole documents, and the way back."""

    sent: Tensor
    """This rank's rows that other ranks and it itself compute, sorted by rank."""
    sent_counts: list[int]
    """Number of rows sent to each rank, including this rank itself."""
    received_counts: list[int]
    """Number of rows received from each rank, including this rank itself."""
    order: Tensor
    """Places of the documents' rows, document by document, among the received rows."""
    layout: Layout
    """The documents that this rank computes, with all their tokens."""
    results: Tensor
    """Places of the outputs to return, sorted by the rank that holds their rows."""
    result_counts: list[int]
    """Number of outputs returned to each rank."""
    returned_counts: list[int]
    """Number of outputs that each rank returns to this one."""
    inverse: Tensor
    """Places of this rank's rows among the outputs returned to it."""


def exchange_documents(
    documents: tuple[Document, ...], *, rows: int, rank: int, ranks: int, device: torch.device
) -> DocumentExchange:
    """Plan the exchange of a pack's rows, of which each rank holds ``rows``.

    A document's tokens that are stored in another document's rows are sent along.
    """
    workers = divide_documents([one.length for one in documents], ranks)
    needed = [_all_rows([documents[n] for n in own]) for own in workers]
    # The first token of a rank's part, where it computes no document: all ranks must take part in
    # the reduction of gradients, which are zeros then.
    needed = [one if len(one) else np.array([r * rows]) for r, one in enumerate(needed)]
    sources = needed[rank] // rows
    sent = [one[one // rows == rank] - rank * rows for one in needed]

    mine = [documents[n] for n in workers[rank]]
    ends = np.cumsum([one.length for one in mine], dtype=int)
    whole = [Document(int(end) - one.length, int(end)) for one, end in zip(mine, ends, strict=True)]
    counts = np.array([one.end - one.begin for one in mine], int)
    places = concatenated(ends - counts, counts)  # of rows that are stored as these documents'
    held_by = needed[rank][places] // rows
    by_holder = np.argsort(held_by, kind="stable")

    returned = [_own_rows([documents[n] for n in own]) for own in workers]
    returned = [one[one // rows == rank] for one in returned]

    def tensor(x: np.ndarray) -> Tensor:
        with torch.inference_mode(False):  # backward passes can't save inference tensors
            return torch.from_numpy(x).to(device)

    return DocumentExchange(
        sent=tensor(np.concatenate(sent)),
        sent_counts=[len(one) for one in sent],
        received_counts=np.bincount(sources, minlength=ranks).tolist(),
        order=tensor(np.argsort(np.argsort(sources, kind="stable"), kind="stable")),
        layout=lay_out(tuple(whole) or (Document(0, 1),), device),
        results=tensor(places[by_holder]),
        result_counts=np.bincount(held_by, minlength=ranks).tolist(),
        returned_counts=[len(one) for one in returned],
        inverse=tensor(np.argsort(np.concatenate(returned))),
    )


def divide_documents(lengths: list[int], ranks: int) -> list[list[int]]:
    """Return the numbers of the documents that each rank computes, with similar sums of lengths.

    The longest documents are assigned first, each to the rank with the fewest tokens so far
    (longest processing time first, doi:10.1137/0117039).
    """
    totals = [0] * ranks
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        rank = min(range(ranks), key=totals.__getitem__)
        assigned[rank].append(number)
        totals[rank] += lengths[number]
    return [sorted(one) for one in assigned]


def _all_rows(documents: list[Document]) -> np.ndarray:
    ranges = np.array([some for one in documents for some in one.keys], int).reshape(-1, 2)
    return concatenated(ranges[:, 0], ranges[:, 1] - ranges[:, 0])


def _own_rows(documents: list[Document]) -> np.ndarray:
    ranges = np.array([(one.begin, one.end) for one in documents], int).reshape(-1, 2)
    return concatenated(ranges[:, 0], ranges[:, 1] - ranges[:, 0])


class SharedDocumentMixer(DocumentMixer):
    """A mixer that runs on whole documents, whichever ranks hold their rows."""

    def is_whole(self, documents: Any) -> bool:
        """Return False, since other ranks may hold rows of each document.

        Raises:
            ValueError: the documents did not arrive.
        """
        if documents is None:
            raise ValueError(f"{not_passed_on(self)}, or was called without its model")
        return False

    def mix_documents(
        self,
        hidden: Float[Tensor, "b t h"],
        documents: Any,
        mix: Callable[[Tensor, Tensor | None], Tensor],
    ) -> Float[Tensor, "b t h"]:
        """Run ``mix`` on the documents that this rank computes, and return its own rows."""
        moved: DocumentExchange = documents.by_document()
        group: dist.ProcessGroup = documents.group
        rows = hidden.flatten(0, 1).index_select(0, moved.sent)
        rows = exchange(rows, moved.sent_counts, moved.received_counts, group)
        rows = rows.index_select(0, moved.order).unsqueeze(0)
        mixed = super().mix_documents(rows, moved.layout, lambda batch, _: mix(batch, None))
        mixed = mixed.squeeze(0)
        results = mixed.index_select(0, moved.results)
        results = exchange(results, moved.result_counts, moved.returned_counts, group)
        return results.index_select(0, moved.inverse).view(*hidden.shape[:2], -1)


def share_mixers(model: nn.Module) -> None:
    """Make a model's mixers context parallel; their forward passes need ``SharedRows``."""
    mix_by_document(model, SharedDocumentMixer)
