"""The device mesh: the groups of ranks that share parameters, experts and documents."""

from collections.abc import Callable

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from primerl._common.ranks import identity

LAYOUT = "world = replicate * fsdp * cp, and ep divides fsdp * cp"


@attrs.frozen(kw_only=True, eq=False)
class Mesh:
    """The arrangement of the ranks, created by ``parallel.mesh``.

    Context-parallel ranks are adjacent: rank ``(replica * fsdp + i) * cp + j`` holds part j of
    its batch. Parameters are sharded over the ``fsdp * cp`` ranks of a replica. Within a replica,
    experts are divided over each block of ``ep`` consecutive ranks.
    """

    replicate: int
    """Number of model replicas (HSDP): parameters are sharded within each, gradients summed over
    all."""
    fsdp: int
    """Number of ranks per replica that train on different batches."""
    ep: int
    """Number of ranks among which the experts of a layer are divided (expert parallel)."""
    cp: int
    """Number of ranks among which each micro-batch is divided (context parallel)."""
    parameters: DeviceMesh | None = None
    """Device mesh of parameters, with dimensions ``replicate`` and ``shard``; None on one rank."""
    experts: DeviceMesh | None = None
    """Device mesh of experts, with dimensions ``replicate``, ``expert_shard`` and ``expert``;
    None on one rank."""
    documents: DeviceMesh | None = None
    """Device mesh of documents, with dimensions ``batch`` and ``context``; None on one rank."""

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.replicate * self.fsdp * self.cp

    @property
    def batches(self) -> int:
        """Number of micro-batches trained at once: the argument ``ranks`` of ``packing.pack``."""
        return self.replicate * self.fsdp

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """Process group among which experts are divided; None if every rank holds all experts."""
        return self.experts.get_group("expert") if self.experts and self.ep > 1 else None

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """Process group among which a micro-batch is divided; None without context parallelism."""
        return self.documents.get_group("context") if self.documents and self.cp > 1 else None

    @property
    def context_sum(self) -> Callable[[Tensor], Tensor]:
        """Function that sums a tensor over the ranks that share documents, without gradient.

        Pass it as ``all_sum`` to losses over whole sequences, such as ``loss.gspo``.
        """
        return identity if self.context_group is None else self._sum_in_context

    def _sum_in_context(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total, group=self.context_group)
        return total


def mesh(*, replicate: int = 1, fsdp: int = -1, ep: int = 1, cp: int = 1) -> Mesh:
    """Arrange the ranks of the current process group into a mesh.

        with parallel.process_group():
            mesh = parallel.mesh(ep=8, cp=4)
            parallel.shard(model, mesh)

    ``world = replicate * fsdp * cp``, and ``ep`` divides ``fsdp * cp``. Call it on every rank,
    after the process group is created.

    Args:
        replicate: number of model replicas (HSDP). Parameters are gathered within a replica only,
            such as one node or a few, and gradients are summed over replicas. 1 is plain FSDP.
        fsdp: number of ranks per replica that train on different batches; -1 uses all ranks that
            ``replicate`` and ``cp`` leave.
        ep: number of ranks among which the experts of each layer are divided (expert parallel).
        cp: number of ranks among which the rows of each micro-batch are divided (context
            parallel).

    Raises:
        ValueError: the sizes do not fit the number of ranks.
    """
    sizes = {"replicate": replicate, "fsdp": fsdp, "ep": ep, "cp": cp}
    world = dist.get_world_size() if dist.is_initialized() else 1
    asked = "mesh(" + ", ".join(f"{name}={size}" for name, size in sizes.items()) + ")"
    for name, size in sizes.items():
        if size < 1 and not (name == "fsdp" and size == -1):
            raise ValueError(f"{asked}: {name} is {size}, expected at least 1")
    hint = "" if dist.is_initialized() else "; no process group: under torchrun, call it within "
    hint += "" if dist.is_initialized() else "`with parallel.process_group():`"
    if fsdp == -1:
        if world % (replicate * cp):
            raise ValueError(
                f"{asked} on {world} ranks: replicate * cp is {replicate * cp}, which does not "
                f"divide {world}; {LAYOUT}{hint}"
            )
        fsdp = world // (replicate * cp)
    if replicate * fsdp * cp != world:
        raise ValueError(
            f"{asked} needs {replicate * fsdp * cp} ranks, but there are {world}; {LAYOUT}{hint}"
        )
    if (fsdp * cp) % ep:
        raise ValueError(
            f"{asked} on {world} ranks: ep does not divide fsdp * cp, which is {fsdp * cp}; "
            f"{LAYOUT}{hint}"
        )
    if world == 1:
        return Mesh(replicate=replicate, fsdp=fsdp, ep=ep, cp=cp)
    ranks, shard = torch.arange(world), fsdp * cp

    def view(**dimensions: int) -> DeviceMesh:
        shape = tuple(dimensions.values())
        return DeviceMesh(mesh_device(), ranks.view(shape), mesh_dim_names=tuple(dimensions))

    return Mesh(
        replicate=replicate,
        fsdp=fsdp,
        ep=ep,
        cp=cp,
        parameters=view(replicate=replicate, shard=shard),
        experts=view(replicate=replicate, expert_shard=shard // ep, expert=ep),
        documents=view(batch=world // cp, context=cp),
    )


def mesh_device() -> str:
    """Return the type of device that the current process group connects, as ``World.device``."""
    return "cuda" if "nccl" in dist.get_backend_config() else "cpu"
