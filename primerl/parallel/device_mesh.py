"""The device mesh: which ranks share parameters, experts and documents."""

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

LAYOUT = "world = replicate * fsdp * cp, and ep divides fsdp * cp"


@attrs.frozen(kw_only=True, eq=False)
class Mesh:
    """The arrangement of the ranks, made by ``mesh``.

    Context-parallel ranks are neighbours: rank ``(replica * fsdp + i) * cp + j`` holds part j of
    its batch. Parameters are sharded over the ``fsdp * cp`` ranks of a replica, and experts over
    every ``ep`` successive ones of these.
    """

    replicate: int
    """Copies of the model (HSDP): parameters are sharded within each, gradients summed over all."""
    fsdp: int
    """Ranks of a replica with different batches."""
    ep: int
    """Ranks among which the experts of a layer are divided."""
    cp: int
    """Ranks among which each micro-batch is divided."""
    parameters: DeviceMesh | None = None
    """Of dimensions ``replicate`` and ``shard``; None in a world of one, as are the others."""
    experts: DeviceMesh | None = None
    """Of dimensions ``replicate``, ``expert_shard`` and ``expert``."""
    documents: DeviceMesh | None = None
    """Of dimensions ``batch`` and ``context``."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.replicate * self.fsdp * self.cp

    @property
    def batches(self) -> int:
        """Number of micro-batches trained at once, which ``packing.pack`` takes as ``ranks``."""
        return self.replicate * self.fsdp

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """The ranks among which experts are divided; None if each holds all."""
        return self.experts.get_group("expert") if self.experts and self.ep > 1 else None

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """The ranks among which a micro-batch is divided; None if each has a whole one."""
        return self.documents.get_group("context") if self.documents and self.cp > 1 else None

    def context_sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the ranks that share documents, without gradient.

        What losses over whole sequences, such as ``loss.gspo``, take as ``all_sum``.
        """
        if self.context_group is None:
            return x
        total = x.detach().clone()
        dist.all_reduce(total, group=self.context_group)
        return total


def mesh(*, replicate: int = 1, fsdp: int = -1, ep: int = 1, cp: int = 1) -> Mesh:
    """Arrange the ranks of the running process group.

        with parallel.process_group():
            mesh = parallel.mesh(ep=8, cp=4)
            parallel.shard(model, mesh)

    ``world = replicate * fsdp * cp``, and ``ep`` divides ``fsdp * cp``. Every rank calls it, after
    the process group is made.

    Args:
        replicate: copies of the model (HSDP): parameters are gathered within a replica only, such
            as a node or a few, and gradients summed over replicas. 1: one copy (FSDP).
        fsdp: ranks of a replica with different batches; -1: as many as there are.
        ep: ranks among which the experts of each layer are divided (expert parallel).
        cp: ranks among which the rows of each micro-batch are divided (context parallel).

    Raises:
        ValueError: the sizes do not fit the world.
    """
    sizes = {"replicate": replicate, "fsdp": fsdp, "ep": ep, "cp": cp}
    world = dist.get_world_size() if dist.is_initialized() else 1
    asked = "mesh(" + ", ".join(f"{name}={size}" for name, size in sizes.items()) + ")"
    for name, size in sizes.items():
        if size < 1 and not (name == "fsdp" and size == -1):
            raise ValueError(f"{asked}: {name} is {size}, expected at least 1")
    hint = "" if dist.is_initialized() else "; a world of one: under torchrun, call it within "
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
            f"{asked} takes {replicate * fsdp * cp} ranks, but there are {world}; {LAYOUT}{hint}"
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
        device = "cuda" if torch.cuda.is_available() else "cpu"  # as in process_group
        shape = tuple(dimensions.values())
        return DeviceMesh(device, ranks.view(shape), mesh_dim_names=tuple(dimensions))

    return Mesh(
        replicate=replicate,
        fsdp=fsdp,
        ep=ep,
        cp=cp,
        parameters=view(replicate=replicate, shard=shard),
        experts=view(replicate=replicate, expert_shard=shard // ep, expert=ep),
        documents=view(batch=world // cp, context=cp),
    )
