"""The storage plan of a run: what it keeps on the shared volume, and in the memory of hosts."""

from collections.abc import Mapping, Sequence

import attrs

from primerl._common.owned_layers import owner_of_each
from primerl.planning.traffic import Traffic
from primerl.planning.trainer_memory import TrainerLayout, TrainerPlan

MARGIN = 0.2
"""The fraction that ``asked`` adds to what is counted."""

RECORD_TOKENS = 1 << 22
"""Most tokens that a step records: the default of ``track.Run(record_tokens=...)``."""

RECORD_BYTES = 16
"""Bytes of a recorded token, text included: measured for sequences of 200 tokens, which take more
than long ones (``docs/verified.md``)."""


@attrs.frozen(kw_only=True)
class StoragePlan:
    """Bytes that a run stores, by content, in each place."""

    run_folder: dict[str, int]
    shared_folder: dict[str, int]
    """Expert routes, and keys and values in transit. On one host, this folder is in its
    ``/dev/shm``, and also has the weights in transit."""
    models: dict[str, int]
    """The checkpoints from which the trainer and the servers start."""
    training_node: dict[str, int]
    """Host memory of the training node that needs most. With several nodes, the weights in transit
    are in its ``/dev/shm``."""
    checkpoint: int
    """Bytes of one checkpoint."""
    serving_node: dict[str, int]
    """Shared memory (``/dev/shm``) of a serving node."""

    @property
    def volume(self) -> dict[str, int]:
        """The contents of a volume that has the run folder, the shared folder and the models."""
        folders = {
            "run folder": self.run_folder,
            "shared folder": self.shared_folder,
            "models": self.models,
        }
        return {
            f"{folder}: {content}": size
            for folder, contents in folders.items()
            for content, size in contents.items()
        }

    @property
    def places(self) -> dict[str, dict[str, int]]:
        """The contents of the volume and of both kinds of nodes, by name; each has its own size."""
        return {
            "shared volume": self.volume,
            "memory of a training node": self.training_node,
            "/dev/shm of a serving node": self.serving_node,
        }


def asked(contents: Mapping[str, int]) -> int:
    """Return the bytes to ask for: what is counted, and ``MARGIN`` more."""
    return round(sum(contents.values()) * (1 + MARGIN))


def plan_storage(
    trainer: TrainerPlan,
    traffic: Traffic,
    *,
    published: Sequence[int],
    final_model: int,
    models: Mapping[str, int],
    step_tokens: int,
    steps: int,
    max_staleness: int,
    served: int,
    keys_and_values: int = 0,
    checkpoints: int = 2,
    snapshot_every: int = 16,
) -> StoragePlan:
    """Add up what a run stores, at the moment when it stores most.

    Args:
        trainer: the trainer's plan, with the memory of its first rank.
        traffic: the traffic of a step.
        published: the published bytes of each layer, as ``checkpoint_tensors.layers_of`` divides
            the model.
        final_model: bytes of the trained model, as it is saved.
        models: bytes of the checkpoints from which trainer and servers start, by name.
        step_tokens: the number of tokens of all rollouts of a step.
        steps: the number of policy steps.
        max_staleness: the maximum staleness of trained tokens: routes of so many further steps are
            in transit.
        served: published bytes that the workers of a serving node need together.
        keys_and_values: bytes that prefill servers store in a step (``serving.kv_folder``).
        checkpoints: the number of checkpoints that are kept, as in ``checkpoint.Checkpoints``.
        snapshot_every: every so many versions, one is published in full, as in ``weights.Disk``.
    """
    state = _state_bytes(trainer)
    share = _largest_share(published, trainer.layout)
    deltas = snapshot_every - 1
    in_transit = {
        "weights: 2 full versions, 1 of them being written": 2 * traffic.weights,
        f"weights: {deltas} deltas": deltas * traffic.weights_delta,
    }
    one_host = trainer.layout.nodes == 1
    of_node = (
        {}
        if one_host
        else {
            f"/dev/shm: {name}": size * share // traffic.weights
            for name, size in in_transit.items()
        }
    )
    stored = {"keys and values under 2 versions": 2 * keys_and_values} if keys_and_values else {}
    return StoragePlan(
        checkpoint=state,
        run_folder={
            f"checkpoints: {checkpoints} kept, 1 being written": (checkpoints + 1) * state,
            "final model": final_model,
            f"records of {steps} steps": min(step_tokens, RECORD_TOKENS) * RECORD_BYTES * steps,
        },
        shared_folder=(in_transit if one_host else {})
        | {f"routes of {max_staleness + 1} steps": (max_staleness + 1) * traffic.routes}
        | stored,
        models=dict(models),
        training_node={
            "optimizer states": trainer.host_per_node,
            "offloaded activations": trainer.activations_per_node,
            "copy of the checkpoint that is being written": (
                trainer.layout.gpus_per_node * _rank_state_bytes(trainer)
            ),
            "2 versions of the weights of owned layers": 2 * share,
        }
        | of_node,
        serving_node={"2 full versions of the weights that its workers need": 2 * served},
    )


def _rank_state_bytes(trainer: TrainerPlan) -> int:
    first = trainer.ranks[0]
    return first.parameters + first.optimizer + first.host


def _state_bytes(trainer: TrainerPlan) -> int:
    """Return the bytes of a checkpoint; ranks that replicate others write nothing."""
    return _rank_state_bytes(trainer) * trainer.layout.ranks // trainer.layout.replicate


def _largest_share(published: Sequence[int], layout: TrainerLayout) -> int:
    """Return the published bytes of the layers that the ranks of a node own, at most."""
    by_node = [0] * layout.nodes
    owners = owner_of_each(published, range(layout.ranks))
    for size, owner in zip(published, owners, strict=True):
        by_node[owner // layout.gpus_per_node] += size
    return max(by_node)
