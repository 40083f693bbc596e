"""Receipts of publications, checks that engines hold what was sent, and protocols of both sides."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch.distributed as dist

from primerl._common.ranks import is_first_rank, on_first_rank, require_group

_IGNORED = (
    "the trainer has tensors that the server's model does not have, such as an untied head where "
    "the server's is tied to the embedding; start the server from a folder with the trainer's "
    "config"
)


@runtime_checkable
class Fetcher(Protocol):
    """Protocol of engines whose servers fetch new weights themselves, from a given location."""

    def load_weights(
        self,
        update: Mapping[str, Any],
        *,
        version: int,
        timeout_s: float = ...,
        send: Callable[[], None] | None = ...,
    ) -> dict[str, list[dict[str, Any]]]:
        """Load an update into every live server; return the workers' receipts, by server.

        ``send`` runs in the calling thread while the servers wait for the tensors.

        Raises:
            RuntimeError: a server did not load the update.
        """
        ...


@attrs.frozen(kw_only=True)
class Receipt:
    """The result of one publication; the same on all ranks, except ``servers`` and ``waited_s``."""

    version: int
    kind: str = "full"
    """``"full"``, ``"delta"`` or ``"adapter"``."""
    digest: str | None = None
    """The digest of all tensors as sent; None if engines copied them in the trainer's process."""
    tensors: int = 0
    """The number of tensors sent; 0 if engines copied them in the trainer's process."""
    bytes: int = 0
    """The number of bytes written or sent; 0 if engines copied them in the trainer's process."""
    seconds: dict[str, float] = attrs.field(factory=dict)
    """Seconds by phase: ``gather``, ``encode``, ``write``, ``load`` (all servers, checks included),
    and ``verify`` if a canary checks the engines."""
    servers: dict[str, list[dict[str, Any]]] = attrs.field(factory=dict)
    """The receipts of each server's workers, by server: among others, the version and the digest of
    the tensors that its model was given. Empty on ranks other than 0."""
    fallback: str | None = None
    """Why the full version was published after a delta; None if it was not."""
    canary: dict[str, float] = attrs.field(factory=dict)
    """Metrics of the canary; empty without one."""
    waited_s: float | None = None
    """The seconds for which this rank waited in ``start`` and ``wait``; None after ``publish``."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics for the run's log: ``publish_s``, ``publish_bytes``, and those of the canary.

        ``publish_s`` adds up the seconds of all phases. After ``start``, ``publish_wait_s`` has
        those for which training waited. The canary's metrics are ``mismatch_kl``, for steps without
        fresh tokens, and ``canary_difference``, the root mean square difference of logprobs in
        nats. Both are those of the worst server.
        """
        found = {"publish_s": sum(self.seconds.values()), "publish_bytes": float(self.bytes)}
        if self.waited_s is not None:
            found["publish_wait_s"] = self.waited_s
        return found | self.canary


def check_engines(engines: Sequence[object], *, adapters: bool = False) -> None:
    """Check that rank 0 alone has engines, and that they take what the transport sends.

    With ``adapters``, all engines must sample under an adapter, otherwise none.

    Raises:
        ValueError: rank 0 has no engine, another rank has one, or an engine takes merged weights
            where adapters are sent, or the reverse.
        RuntimeError: torchrun started several ranks, but there is no process group.
    """
    require_group()
    if is_first_rank() and not engines:
        raise ValueError("there is no engine to publish to; pass at least one on rank 0")
    if engines and not is_first_rank():
        raise ValueError("only rank 0 publishes to engines; pass none on the other ranks")
    names = [getattr(engine, "adapter", None) for engine in engines]
    if adapters and None in names:
        raise ValueError(
            "adapters can be published only to engines that sample under an adapter: "
            'serving.VLLMEngine(server, adapter="policy"); an engine in this process takes merged '
            "weights"
        )
    if not adapters and any(name is not None for name in names):
        raise ValueError(
            f"the engine samples under the adapter {names[0]!r}, so it takes only adapters: "
            'publish with weights.Adapter, or transport_to(publish="adapter")'
        )


def on_all_ranks(receipt: Receipt, group: dist.ProcessGroup | None = None) -> Receipt:
    """Return rank 0's receipt on every rank, without ``servers`` on ranks other than 0."""
    told = on_first_rank(lambda: attrs.asdict(attrs.evolve(receipt, servers={})), group)
    return receipt if is_first_rank() else Receipt(**told)


def check_receipts(
    servers: Mapping[str, list[dict[str, Any]]], *, version: int, digest: str | None, tensors: int
) -> None:
    """Compare the receipts of all workers with the tensors that the trainer sent.

    Raises:
        RuntimeError: a receipt differs; the message says which check failed (``version``,
            ``coverage`` or ``digest``) and on which worker.
    """
    faults = [] if servers else ["coverage: no server took the weights"]
    for url, workers in servers.items():
        if not workers:
            faults.append(f"coverage: no worker of {url} answered")
        for index, receipt in enumerate(workers):
            fault = _fault(receipt, version, digest, tensors)
            if fault:
                faults.append(f"{fault} on {url} worker {index}")
        # A tensor that one rank of a sharded model ignores may be used by another rank.
        ignored = set.intersection(*(set(one.get("ignored", ())) for one in workers or [{}]))
        if ignored:
            faults.append(
                f"coverage: {a_few(ignored)} was sent to {url} but is not used there: {_IGNORED}"
            )
    if faults:
        raise RuntimeError(f"version {version} did not arrive: " + "; ".join(faults))


def a_few(names: Collection[str]) -> str:
    """Format the first three names, and the number of the others."""
    shown = sorted(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _fault(
    receipt: Mapping[str, Any], version: int, digest: str | None, tensors: int
) -> str | None:
    if receipt.get("version") != version:
        return f"version: still serves version {receipt.get('version')}"
    if unreached := receipt.get("unreached"):
        return f"coverage: no tensor was loaded into {a_few(unreached)}"
    if receipt.get("tensors") != tensors:
        return f"coverage: {receipt.get('tensors')} of {tensors} tensors were loaded"
    if receipt.get("digest") != digest:
        return f"digest: {receipt.get('digest')} of the loaded tensors, expected {digest}"
    return None
