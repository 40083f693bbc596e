"""Engines that take weights, and receipts: whether each of them holds what the trainer sent."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from primerl._common.ranks import is_first_rank, on_first_rank

_IGNORED = (
    "the trainer has tensors that the server's model has not, such as a head of its own where the "
    "server's is tied to the embedding; start the server from a folder with the trainer's config"
)


@runtime_checkable
class Fetcher(Protocol):
    """An engine whose replicas fetch new weights themselves, from where they are told."""

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


@runtime_checkable
class Transport(Protocol):
    """Publishes the trainer's weights."""

    def publish(self, version: int) -> "Receipt":
        """Put the weights of ``version`` into every engine; returns when all serve them."""
        ...


@attrs.frozen(kw_only=True)
class Receipt:
    """What one ``publish`` did: the same on all ranks, except for ``replicas``."""

    version: int
    kind: str = "full"
    """``"full"``, ``"delta"`` or ``"adapter"``."""
    digest: str | None = None
    """Of all tensors as they were sent; None where they went to engines in memory alone."""
    tensors: int = 0
    """Number of tensors sent; 0 where engines copied from the trainer's memory."""
    bytes: int = 0
    """Written or sent; 0 where engines copied from the trainer's memory."""
    seconds: dict[str, float] = attrs.field(factory=dict)
    """By phase: ``gather``, ``encode``, ``write``, ``load`` (all replicas, checks included), and
    ``verify`` where a canary checks the engines."""
    replicas: dict[str, list[dict[str, Any]]] = attrs.field(factory=dict)
    """By replica, the receipt of each worker: version, digest of what its model was handed. Empty
    on ranks other than 0."""
    fallback: str | None = None
    """Why a delta was followed by the full version, if it was."""
    canary: dict[str, float] = attrs.field(factory=dict)
    """Metrics of the canary; empty where there is none."""

    @property
    def metrics(self) -> dict[str, float]:
        """For the run's log: ``publish_s``, ``publish_bytes``, and those of the canary.

        The canary's are ``mismatch_kl``, for steps without fresh tokens, and ``canary_difference``,
        the root mean square difference of logprobs in nats, both of the worst replica.
        """
        publish_s = sum(self.seconds.values())
        return {"publish_s": publish_s, "publish_bytes": float(self.bytes), **self.canary}


def check_engines(engines: Sequence[object], *, adapters: bool = False) -> None:
    """Engines belong to rank 0, and all of them, or none, sample under an adapter.

    Raises:
        ValueError: rank 0 has none, or another rank has one; or an engine takes what is not sent.
    """
    if is_first_rank() and not engines:
        raise ValueError("there is no engine to publish to")
    if engines and not is_first_rank():
        raise ValueError("only rank 0 publishes to engines; pass none on the other ranks")
    names = [getattr(engine, "adapter", None) for engine in engines]
    if adapters and None in names:
        raise ValueError(
            "an adapter is published to engines of servers that sample under one: "
            'serving.VLLMEngine(server, adapter="policy"); an engine in this process takes merged '
            "weights"
        )
    if not adapters and any(name is not None for name in names):
        raise ValueError(
            f"the engine samples under the adapter {names[0]!r}, and takes adapters alone: publish "
            'with weights.Adapter, or transport_to(publish="adapter")'
        )


def on_all_ranks(receipt: Receipt) -> Receipt:
    """Rank 0's receipt, on every rank; the others get no ``replicas``."""
    told = on_first_rank(lambda: attrs.asdict(attrs.evolve(receipt, replicas={})))
    return receipt if is_first_rank() else Receipt(**told)


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
        # What one rank of a sharded model does not use, another does.
        ignored = set.intersection(*(set(one.get("ignored", ())) for one in workers or [{}]))
        if ignored:
            faults.append(
                f"coverage: {a_few(ignored)} is not served by {url} as it was sent: {_IGNORED}"
            )
    if faults:
        raise RuntimeError(f"version {version} did not arrive: " + "; ".join(faults))


def a_few(names: Collection[str]) -> str:
    """A few of the names, and how many more there are."""
    shown = sorted(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _fault(receipt: Mapping[str, Any], version: int, digest: str, tensors: int) -> str | None:
    if receipt.get("version") != version:
        return f"version: still serves {receipt.get('version')}"
    if unreached := receipt.get("unreached"):
        return f"coverage: nothing reached {a_few(unreached)}"
    if receipt.get("tensors") != tensors:
        return f"coverage: {receipt.get('tensors')} tensors of {tensors} were handed over"
    if receipt.get("digest") != digest:
        return f"digest: {receipt.get('digest')} of what was handed over, not {digest}"
    return None
