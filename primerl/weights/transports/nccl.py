"""``NCCL``, a transport from GPU to GPU by NCCL broadcasts."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import msgspec
import torch
import torch.distributed as dist
from torch import nn

from primerl._common.checkpoint_tensors import (
    Quantizer,
    TensorLayout,
    owned_checkpoint_tensors,
)
from primerl._common.digests import TensorDigest, digest_of, digest_of_all
from primerl._common.ranks import gloo_group, is_first_rank, on_every_rank, on_first_rank
from primerl._common.supported_adapters import refuse_unsupported_adapters
from primerl.weights.transports.broadcasts.groups import (
    BroadcastGroups,
    Communicator,
    GroupFormation,
    connect_nccl,
    new_unique_id,
)
from primerl.weights.transports.broadcasts.layers import LayerSender
from primerl.weights.transports.broadcasts.rendezvous import Membership
from primerl.weights.transports.publications.manifests import LEAST_TIMEOUT_S
from primerl.weights.transports.receipts import (
    Fetcher,
    Receipt,
    check_engines,
    check_receipts,
    on_all_ranks,
)
from primerl.weights.transports.shares import Shares, as_announced, shares_of
from primerl.weights.transports.transport import Transport

_MOST_SENDERS = 8  # by default


@runtime_checkable
class BroadcastServers(Fetcher, Protocol):
    """Protocol of engines that report their servers' numbers of workers, such as ``VLLMEngine``."""

    def workers(self) -> dict[str, int]:
        """Return the number of workers of every live server, by url."""
        ...


class NCCL(Transport):
    """A transport that publishes a model's weights to engines on GPUs, from memory to memory.

        with serving.serve_vllm(model, weight_transfer="primerl_nccl") as server:
            transport = weights.NCCL(model, serving.VLLMEngine(server))
            receipt = transport.publish(version=1)

    Tensors are broadcast layer by layer through vLLM's NCCL communicator while the servers are
    paused. New groups are formed when servers join or leave. A server that joins late gets its
    weights with the next publication; use ``Disk`` if it must not wait for that.

    All ranks of a sharded trainer create a transport and call ``publish``; only rank 0 has the
    engine. Some of the ranks are senders. Each sender owns some of the layers: only it receives
    them whole, and it broadcasts them to all workers, in a group of its own. The senders take
    turns, so that each converts and hashes its layer while workers receive the layers of others.
    Rank 0 has only the names and digests of the other senders' tensors.

    Args:
        model: the trainer's model.
        engines: one engine with all servers on rank 0, and none on the other ranks.
        dtype: the dtype in which parameters are sent, usually the engine's own; None keeps the
            trainer's.
        quantize: ``fp8.CheckpointQuantizer``, for an engine of a quantized checkpoint.
        senders: the number of ranks that send, the same on all ranks; at most 8 by default. Rank 0
            is one of them, and they are spread evenly over the ranks.
        address: this host's address, as the servers' workers reach it; by default, the address of
            the interface through which this host reaches the first server's host.
        timeout_s: the timeout of a publication.
        connect: joins a group; by NCCL by default.
        unique_id: creates the id of a new group; NCCL's by default.

    Raises:
        ValueError: rank 0 has no engine or several, another rank has one, there are not that many
            ranks, or the model has adapters other than plain LoRA.
    """

    def __init__(
        self,
        model: nn.Module,
        *engines: BroadcastServers,
        dtype: torch.dtype | None = None,
        quantize: Quantizer | None = None,
        senders: int | None = None,
        address: str | None = None,
        timeout_s: float = 600.0,
        connect: Callable[[Membership, torch.device], Communicator] = connect_nccl,
        unique_id: Callable[[], bytes] = new_unique_id,
    ) -> None:
        check_engines(engines)
        refuse_unsupported_adapters(model)
        if len(engines) > 1:
            raise ValueError(f"got {len(engines)} engines; pass one engine that has all servers")
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        senders = min(_MOST_SENDERS, ranks) if senders is None else senders
        if not 1 <= senders <= ranks:
            raise ValueError(f"senders={senders}; expected 1 to {ranks}, the number of ranks")
        self._model = model
        self._engines = engines
        self._dtype = dtype
        self._quantize = quantize
        self._senders = [index * ranks // senders for index in range(senders)]
        self._address = address
        self._timeout_s = timeout_s
        self._connect = connect
        self._unique_id = unique_id
        # Found with the first publication:
        self._group: dist.ProcessGroup | None = None  # a gloo group of all ranks
        self._shares: Shares | None = None
        self._formation: GroupFormation | None = None

    def _publish(self, version: int) -> Receipt:
        started = time.perf_counter()
        shares, formation = self._divided()
        sending = _Sending()
        try:
            groups = formation.of(lambda: self._engines[0].workers())
            servers = self._load(version, shares, groups, sending)
        except BaseException:
            formation.leave()  # the workers may have reached different tensors
            raise
        loaded_s = time.perf_counter() - started - sending.seconds
        receipt = Receipt(
            version=version,
            kind="full",
            digest=digest_of_all(sending.digests),
            tensors=len(sending.digests),
            bytes=sum(layout.nbytes for _, _, layout in shares),
            seconds={"write": sending.seconds, "load": loaded_s},
            servers=servers,
        )
        return on_all_ranks(receipt, self._group)

    def _divided(self) -> tuple[Shares, GroupFormation]:
        """Return the senders' shares of the layers, and the formation of their groups.

        They are found with the first publication, and again when the model's tensors are others.
        """
        if self._shares is not None and self._formation is not None:
            if self._shares.still_fit(self._model, self._agreeing()):
                return self._shares, self._formation
            self._formation.leave()
        else:
            # Ranks wait for each other while rank 0's servers prepare or load a version.
            self._group = gloo_group(timeout_s=self._timeout_s + LEAST_TIMEOUT_S)
        shares = shares_of(
            self._model,
            self._senders,
            dtype=self._dtype,
            quantize=self._quantize,
            ranks=self._group,
        )
        device = next(self._model.parameters()).device
        formation = GroupFormation(
            ranks=self._group,
            sends=shares.rank in shares.owners,
            address=self._address,
            timeout_s=self._timeout_s,
            connect=lambda place: self._connect(place, device),
            unique_id=self._unique_id,
        )
        self._shares, self._formation = shares, formation
        return shares, formation

    def _load(
        self, version: int, shares: Shares, groups: BroadcastGroups, sending: "_Sending"
    ) -> dict[str, list[dict[str, Any]]]:
        """Send a version and have the servers load it; return their receipts on rank 0."""
        servers: dict[str, list[dict[str, Any]]] = {}
        failure: Exception | None = None

        def send() -> None:
            # The other ranks wait here until rank 0's servers are ready to receive, or have failed.
            on_first_rank(lambda: None, self._group)
            self._send(shares, groups, sending)

        try:
            if is_first_rank():
                engine = self._engines[0]
                update = _update(version, shares, groups, timeout_s=self._timeout_s)
                servers = engine.load_weights(
                    update, version=version, timeout_s=self._timeout_s, send=send
                )
            else:
                send()
        except Exception as error:  # every kind: the other ranks wait for the outcome
            if sending.failed or not is_first_rank():
                raise  # all ranks know
            failure = error

        def outcome() -> None:
            if failure is not None:
                raise failure
            check_receipts(
                servers,
                version=version,
                digest=digest_of_all(sending.digests),
                tensors=len(sending.digests),
            )

        on_first_rank(outcome, self._group)
        return servers

    def _send(self, shares: Shares, groups: BroadcastGroups, sending: "_Sending") -> None:
        """Broadcast this rank's layers, turn by turn with the other ranks.

        In a turn, the ranks gather one layer of each sender, in an all-to-all of all ranks, and
        then each sender broadcasts its layer and hashes it while the workers receive.
        """
        # Nothing waits in a circle: a worker receives the layers of a turn in the order of the
        # senders, so a broadcast waits for those of earlier senders and of earlier turns, and a
        # turn's all-to-all waits only for broadcasts of earlier turns. It begins when these have
        # ended on all ranks: overlapping them would save its time, but GPUs that run the kernels of
        # two NCCL communicators in different orders can deadlock.
        began = time.perf_counter()
        sending.failed = True
        device = next(self._model.parameters()).device
        sender = LayerSender(groups.connecting, device, timeout_s=self._timeout_s)
        on_every_rank(sender.connect, self._group)
        layers = owned_checkpoint_tensors(
            self._model, shares.owned, dtype=self._dtype, quantize=self._quantize
        )

        def send(layout: Mapping[str, TensorLayout]) -> dict[str, Any]:
            layer = as_announced(next(layers), layout)
            sender.send([tensor.to(device) for tensor in layer.values()])
            sent: dict[str, Any] = msgspec.to_builtins({n: digest_of(t) for n, t in layer.items()})
            return sent

        for turn in shares.turns:
            told = on_every_rank(functools.partial(send, turn[shares.rank]), self._group)
            for part in msgspec.convert(told, list[dict[str, TensorDigest]]):
                sending.digests |= part
            on_every_rank(sender.wait, self._group)
        sending.failed = False
        sending.seconds = time.perf_counter() - began


@attrs.define(eq=False)
class _Sending:
    """What this rank knows of the sending of a version."""

    digests: dict[str, TensorDigest] = attrs.field(factory=dict)
    """Of the tensors of all senders."""
    seconds: float = 0.0
    failed: bool = False
    """Whether sending began and did not end; then all ranks have raised the same error."""


def _update(
    version: int, shares: Shares, groups: BroadcastGroups, *, timeout_s: float
) -> dict[str, Any]:
    """Return the message to the servers' workers."""
    tensors = list(shares)
    return {
        "version": version,
        "key": groups.key,
        "stores": groups.stores,
        "names": [name for _, name, _ in tensors],
        "dtypes": [str(one.dtype).removeprefix("torch.") for _, _, one in tensors],
        "shapes": [list(one.shape) for _, _, one in tensors],
        "groups": [sender for sender, _, _ in tensors],
        "timeout_s": timeout_s,
    }
