"""What a publication did, and whether every engine holds what the trainer sent."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs


@runtime_checkable
class Fetcher(Protocol):
    """An engine whose replicas fetch new weights by themselves, told where."""

    def load_weights(
        self,
        update: Mapping[str, Any],
        *,
        version: int,
        timeout_s: float = ...,
        send: Callable[[], None] | None = ...,
    ) -> dict[str, list[dict[str, Any]]]:
        """Serve an update in every live replica; the receipt of each worker, by replica.

        ``send`` runs in the calling thread while the replicas wait for the tensors.

        Raises:
            RuntimeError: a replica did not take it.
        """
        ...


@attrs.frozen(kw_only=True)
class Receipt:
    """What one ``publish`` did."""

    version: int
    kind: str
    """``"full"`` or ``"delta"``."""
    digest: str | None
    """Of all tensors as they were sent; None where they went to engines in memory alone."""
    tensors: int
    bytes: int
    """That were written or sent; 0 where engines copied from the trainer's memory."""
    seconds: dict[str, float]
    """By phase: ``gather``, ``encode``, ``write``, ``load`` (all replicas, checks included)."""
    replicas: dict[str, list[dict[str, Any]]]
    """By replica, the receipt of each worker: version, digest of what its model was handed."""
    fallback: str | None = None
    """Why a delta was sent again whole, if it was."""


def check_receipts(
    replicas: Mapping[str, list[dict[str, Any]]], *, version: int, digest: str, tensors: int
) -> None:
    """Compare what every worker was handed with what the trainer holds.

    Raises:
        RuntimeError: they differ; the message says which layer caught it (``version``,
            ``coverage``, ``digest``) and where.
    """
    faults = [] if replicas else ["coverage: no replica took the weights"]
    for url, workers in replicas.items():
        if not workers:
            faults.append(f"coverage: no worker of {url} answered")
        for index, receipt in enumerate(workers):
            fault = _fault(receipt, version, digest, tensors)
            if fault:
                faults.append(f"{fault} on {url} worker {index}")
    if faults:
        raise RuntimeError(f"version {version} did not arrive: " + "; ".join(faults))


def _fault(receipt: Mapping[str, Any], version: int, digest: str, tensors: int) -> str | None:
    if receipt.get("version") != version:
        return f"version: still serves {receipt.get('version')}"
    if unreached := receipt.get("unreached"):
        return f"coverage: nothing reached {', '.join(unreached[:3])}"
    if receipt.get("tensors") != tensors:
        return f"coverage: {receipt.get('tensors')} tensors of {tensors} were handed over"
    if receipt.get("digest") != digest:
        return f"digest: {receipt.get('digest')} of what was handed over, not {digest}"
    return None
