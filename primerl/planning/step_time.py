"""The time of a step by phases, from FLOPs, bytes and stated speeds."""

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import torch

from primerl import flops
from primerl.planning.compute_time import compute_seconds, orthogonalized
from primerl.planning.hardware import Hardware
from primerl.planning.publication_time import PublicationTime, publication_times
from primerl.planning.rollout_time import PlannedStep, rollout_seconds, stored_bytes
from primerl.planning.server_memory import ServerPlan
from primerl.planning.traffic import Traffic
from primerl.planning.trainer_memory import TrainerLayout, TrainerPlan


@attrs.frozen(kw_only=True)
class PlannedPhase:
    """Seconds of a phase."""

    name: str
    seconds: float
    source: str
    """What the time was computed from."""
    beside: Literal["passes", "the step"] | None = None
    """The phases at whose side this one runs; None: the step waits for it."""


@attrs.frozen(kw_only=True)
class StepTime:
    """The time of a step, by phases."""

    phases: tuple[PlannedPhase, ...]
    """Phases of each step."""
    others: tuple[PlannedPhase, ...]
    """Phases of some steps: checkpoints, resuming and evaluation."""
    micro_batches: int
    """Number of micro-batches of each rank."""
    publications: dict[str, PublicationTime] = attrs.field(factory=dict)
    """The phases of publishing a ``full`` version, and a ``delta``."""
    unknown: dict[str, str] = attrs.field(factory=dict)
    """Phases that have no time, and why."""

    @property
    def training(self) -> float:
        """Seconds of the phases that follow each other, or of longer ones beside them."""
        waited = sum(one.seconds for one in self.phases if one.beside is None)
        passes = sum(self.seconds(name) for name in PASSES)
        beside = [one.seconds for one in self.phases if one.beside == "passes"]
        return waited - passes + max(passes, *beside, 0.0)

    @property
    def step(self) -> float:
        """Seconds of a step: of training, or of what runs beside it if that takes longer."""
        beside = [one.seconds for one in self.phases if one.beside == "the step"]
        return max(self.training, *beside, 0.0)

    @property
    def full_version_step(self) -> float:
        """Seconds of a step beside which a full version is published.

        The optimizer waits for the publication that its step began with.
        """
        return max(self.step, *(one.seconds for one in self.others if one.name == FULL_VERSION))

    @property
    def longest(self) -> str:
        """What the step waits for: ``training``, or the phase beside it that takes longest."""
        beside = {one.name: one.seconds for one in self.phases if one.beside == "the step"}
        every = {"training": self.training} | beside
        return max(every, key=every.__getitem__)

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase of each step."""
        return sum(one.seconds for one in self.phases if one.name == name)


PASSES = ("forward", "recomputation", "backward")
FULL_VERSION = "publication, full version"


def plan_step(
    config: Any,
    trainer: TrainerPlan,
    server: ServerPlan,
    traffic: Traffic,
    *,
    workload: PlannedStep,
    pack_tokens: int,
    fp8: bool,
    gathered: Sequence[int],
    published: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    checkpoint_bytes: int = 0,
    snapshot_every: int = 16,
    hardware: Hardware | None = None,
) -> StepTime:
    """Estimate the time of a step.

    Args:
        config: the model's config.
        trainer: the trainer's plan, with the memory of its first rank.
        server: the plan of a server.
        traffic: the traffic of a step.
        workload: the rollouts of a step.
        pack_tokens: the number of tokens of a micro-batch.
        fp8: whether products of the trainer are in FP8.
        gathered: the bytes of each layer in 16 bits, as its owner receives it to publish it.
        published: the bytes of each layer as it is published, as
            ``checkpoint_tensors.layers_of`` divides the model.
        dtype: dtype that the trainer's layers compute in.
        checkpoint_bytes: bytes of a checkpoint; 0 if none is written.
        snapshot_every: every so many versions, one is published in full, as in ``weights.Disk``.
        hardware: the speeds of the machines; None: an H200.
    """
    speeds = hardware or Hardware()
    layout, memory = trainer.layout, trainer.ranks[0]
    batches = layout.ranks // layout.cp
    micro_batches = -(-workload.rollouts * workload.tokens // (batches * pack_tokens))
    forward, backward = compute_seconds(config, workload.tokens, speeds, fp8=fp8)
    each = workload.rollouts / layout.ranks
    again = {name: seconds for name, seconds in forward.items() if name != "head"}
    all_servers = workload.servers + workload.prefill_servers
    publications = publication_times(
        layout,
        server,
        traffic,
        gathered=gathered,
        published=published,
        serving_nodes=all_servers * -(-server.gpus // layout.gpus_per_node),
        speeds=speeds,
    )
    full_version = sum(publications["full"].beside.values())

    link, named = (speeds.network, "network") if layout.nodes > 1 else (speeds.nvlink, "NVLink")
    every = f"FLOPs as coded, {workload.rollouts} rollouts of {workload.tokens:,} tokens"
    rollouts, evaluation, unknown = _played(
        config, server, workload, speeds, gpus_per_node=layout.gpus_per_node, fp8=fp8
    )
    if rollouts and workload.prefill_servers:
        rollouts.append(_stored(config, server, workload, layout.gpus_per_node, speeds))
    phases = [
        PlannedPhase(name="forward", seconds=each * sum(forward.values()), source=every),
        PlannedPhase(
            name="recomputation",
            seconds=each * sum(again.values()),
            source="forward, without the head",
        ),
        PlannedPhase(name="backward", seconds=each * sum(backward.values()), source=every),
        _dispatch(config, workload, layout, dtype, speeds),
        PlannedPhase(
            name="FSDP's traffic",
            seconds=micro_batches * (2 * memory.unsharded + memory.unreduced) / link,
            source=f"{micro_batches} micro-batches: parameters twice, gradients once; {named}",
            beside="passes",
        ),
        PlannedPhase(
            name="offloaded activations",
            seconds=2 * micro_batches * memory.activations_on_host / speeds.pcie,
            source="to host memory and back; PCIe",
            beside="passes",
        ),
        PlannedPhase(
            name="optimizer",
            seconds=2 * memory.host / speeds.pcie
            + orthogonalized(memory) / (speeds.bf16 * speeds.products),
            source="states from host memory and back; PCIe; Newton-Schulz products",
        ),
        PlannedPhase(
            name="publication, start",
            seconds=sum(publications["delta"].start.values()),
            source=f"layers gathered, converted and copied to host memory; {named}, PCIe",
        ),
        PlannedPhase(
            name="publication",
            seconds=sum(publications["delta"].beside.values()),
            source=f"a delta of {traffic.weights_delta / 1e9:.1f} GB: see the table of its phases",
            beside="the step",
        ),
        *rollouts,
    ]
    return StepTime(
        phases=tuple(phases),
        others=(
            PlannedPhase(
                name=FULL_VERSION,
                seconds=full_version,
                source=f"{traffic.weights / 1e9:.1f} GB, every {snapshot_every}th version",
                beside="the step",
            ),
            *_saving(trainer, checkpoint_bytes, speeds),
            *_starting(
                trainer,
                server,
                gathered=sum(gathered),
                checkpoint_bytes=checkpoint_bytes,
                publication=sum(publications["full"].phases.values()),
                speeds=speeds,
            ),
            *evaluation,
        ),
        micro_batches=micro_batches,
        publications=publications,
        unknown=unknown,
    )


def _played(
    config: Any,
    server: ServerPlan,
    workload: PlannedStep,
    speeds: Hardware,
    *,
    gpus_per_node: int,
    fp8: bool,
) -> tuple[list[PlannedPhase], list[PlannedPhase], dict[str, str]]:
    """Return the phases of rollouts and of an evaluation, or why they have no times."""
    if server.refusal:
        reason = f"the server is refused: {server.refusal}"
        return [], [], {"rollouts": reason, "evaluation": reason}

    def seconds(rollouts: int, *, updates: int) -> float:
        return rollout_seconds(
            config,
            server,
            workload,
            speeds,
            rollouts=rollouts,
            updates=updates,
            gpus_per_node=gpus_per_node,
            fp8=fp8,
        )

    steps = workload.steps_in_flight
    serving = f"{workload.servers * server.gpus} GPUs"
    if workload.prefill_servers:
        serving += f" decode and {workload.prefill_servers * server.gpus} prefill"
    else:
        serving += " serve"
    trained = PlannedPhase(
        name="rollouts",
        seconds=seconds(workload.rollouts * steps, updates=steps) / steps,
        source=(
            f"{serving} {steps} steps at once; prefill by FLOPs, again after each update; decoding "
            "by bytes"
        ),
        beside="the step",
    )
    evaluated = PlannedPhase(
        name="evaluation",
        seconds=seconds(workload.evaluated, updates=0),
        source=f"{workload.evaluated} rollouts like those of a step, on otherwise idle servers",
    )
    return [trained], [evaluated], {}


def _stored(
    config: Any, server: ServerPlan, workload: PlannedStep, gpus_per_node: int, speeds: Hardware
) -> PlannedPhase:
    """The phase in which prefill servers store keys and values, and the others load them."""
    stored = stored_bytes(config, server, workload)
    nodes = server.gpus / gpus_per_node * min(workload.servers, workload.prefill_servers)
    return PlannedPhase(
        name="keys and values",
        seconds=stored / (speeds.disk * nodes),
        source=f"{stored / 1e9:.0f} GB from prefill servers to files, and from there; disk",
        beside="the step",
    )


def _dispatched(config: Any, workload: PlannedStep, dtype: torch.dtype) -> int:
    """Bytes of tokens that all ranks send to their chosen experts, and back, in three passes."""
    chosen = sum(flops.chosen_experts(config))
    there_and_back, passes = 2, 3
    row: int = config.get_text_config().hidden_size * dtype.itemsize
    return workload.rollouts * workload.tokens * chosen * row * there_and_back * passes


def _dispatch(
    config: Any, workload: PlannedStep, layout: TrainerLayout, dtype: torch.dtype, speeds: Hardware
) -> PlannedPhase:
    """The phase of experts' dispatch.

    Tokens are spread evenly over the ``ep`` ranks of a group, which are consecutive. Rows for
    other nodes take the network. The group whose ranks are on most nodes determines the time.
    """
    sent = _dispatched(config, workload, dtype) / layout.ranks
    far = max(_far_ranks(layout, rank) for rank in range(layout.ranks))
    near = layout.ep - 1 - far
    source = "tokens to their experts and back, three passes"
    if far:
        links = f"{far / layout.ep:.0%} of them by network, {near / layout.ep:.0%} by NVLink"
    else:
        links = "NVLink"
    return PlannedPhase(
        name="experts' dispatch",
        seconds=sent / layout.ep * (near / speeds.nvlink + far / speeds.network),
        source=f"{source}; {links}",
    )


def _far_ranks(layout: TrainerLayout, rank: int) -> int:
    """Return how many ranks of a rank's expert-parallel group are on other nodes."""
    first = rank - rank % layout.ep
    group = range(first, first + layout.ep)
    return sum(one // layout.gpus_per_node != rank // layout.gpus_per_node for one in group)


def _saving(trainer: TrainerPlan, checkpoint_bytes: int, speeds: Hardware) -> list[PlannedPhase]:
    memory = trainer.ranks[0]
    return [
        PlannedPhase(
            name="checkpoint, start",
            seconds=(memory.parameters + memory.optimizer) / speeds.pcie,
            source="copied to host memory; PCIe",
        ),
        PlannedPhase(
            name="checkpoint",
            seconds=checkpoint_bytes / trainer.layout.nodes / speeds.disk,
            source="written by all nodes; disk",
            beside="the step",
        ),
    ]


def _starting(
    trainer: TrainerPlan,
    server: ServerPlan,
    *,
    gathered: int,
    checkpoint_bytes: int,
    publication: float,
    speeds: Hardware,
) -> list[PlannedPhase]:
    memory, nodes = trainer.ranks[0], trainer.layout.nodes
    read = (gathered + checkpoint_bytes) / nodes / speeds.disk
    return [
        PlannedPhase(
            name="start of servers",
            seconds=server.published / speeds.disk,
            source="their checkpoint, read by each node; disk; without vLLM's own start",
        ),
        PlannedPhase(
            name="resume",
            seconds=read + (memory.parameters + memory.optimizer) / speeds.pcie + publication,
            source="model and checkpoint, read by all nodes; a full version is published",
        ),
    ]
