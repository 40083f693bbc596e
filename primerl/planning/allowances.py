"""What a GPU needs beside tensors: a table of stated numbers, which users edit."""

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Allowances:
    """Bytes of a GPU that no trace of tensors finds. None of them has been measured here."""

    context: int = 600_000_000
    """CUDA's context, and the code of kernels."""
    communicators: int = 7
    """NCCL's groups of ranks: all ranks, and the dimensions of the meshes of ``parallel.mesh``."""
    communicator: int = 400_000_000
    """Buffers of one of these: 4 MiB (``NCCL_BUFFSIZE``) for each of up to 32 channels, for three
    protocols and in both directions, at most."""
    workspace: int = 500_000_000
    """Workspace within operations: 32 MiB for each handle of cuBLAS, partial sums of attention."""
    imbalance: float = 0.2
    """Share of ``working`` that is added for ranks whose experts get more tokens than the mean, in
    their buffers of dispatched tokens and in their products."""
    fragmentation: float = 0.04
    """Share of the tensors that come and go that the allocator can't use, with
    ``expandable_segments``."""

    server: int = 6_000_000_000
    """Of a server's share of the GPU: activations of its largest batch, and CUDA graphs."""

    def of(self, memory: Any) -> dict[str, int]:
        """Return the allowances of a rank by name, from its ``RankMemory``."""
        moving = memory.gathered + memory.reduced + memory.activations + memory.working
        return {
            "allowed: CUDA's context": self.context,
            "allowed: NCCL's buffers": self.communicators * self.communicator,
            "allowed: workspace": self.workspace,
            "allowed: imbalance of experts": round(self.imbalance * memory.working),
            "allowed: fragmentation": round(self.fragmentation * moving),
        }


H200_BYTES = 150_100_000_000
"""Bytes of an H200 that torch can allocate: 139.8 GiB, as ``torch.cuda.mem_get_info`` says."""
