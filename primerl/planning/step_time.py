"""The time of a step by phases, from FLOPs, bytes and stated speeds."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import numpy as np

from primerl import flops
from primerl.planning.hardware import Hardware
from primerl.planning.server_memory import ServerPlan
from primerl.planning.traffic import Traffic
from primerl.planning.trainer_memory import RankMemory, TrainerPlan

NEWTON_SCHULZ = 5
"""Iterations of Muon's orthogonalization."""


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
class PlannedStep:
    """The rollouts of a step, and their servers: assumptions, none of which a plan can know."""

    rollouts: int
    """Number of trained rollouts of a step."""
    tokens: int
    """Mean number of tokens of a rollout."""
    sampled: float = 0.25
    """Share of these that the model sampled; the others are prompts and results of tools."""
    servers: int = 1
    """Number of servers, each of them like the plan's first one."""
    evaluated: int = 0
    """Number of rollouts of an evaluation."""
    steps_in_flight: int = 1
    """Number of steps whose rollouts are played at once: ``max_staleness + 1``."""
    max_num_seqs: int = 64
    """Number of concurrent rollouts per GPU of a server."""


@attrs.frozen(kw_only=True)
class StepTime:
    """The time of a step, by phases."""

    phases: tuple[PlannedPhase, ...]
    """Phases of each step."""
    others: tuple[PlannedPhase, ...]
    """Phases of some steps: checkpoints, resuming and evaluation."""
    micro_batches: int
    """Number of micro-batches of each rank."""

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
    def longest(self) -> str:
        """What the step waits for: ``training``, or the phase beside it that takes longest."""
        beside = {one.name: one.seconds for one in self.phases if one.beside == "the step"}
        every = {"training": self.training} | beside
        return max(every, key=every.__getitem__)

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase of each step."""
        return sum(one.seconds for one in self.phases if one.name == name)


PASSES = ("forward", "recomputation", "backward")


def plan_step(
    config: Any,
    trainer: TrainerPlan,
    server: ServerPlan,
    traffic: Traffic,
    *,
    workload: PlannedStep,
    pack_tokens: int,
    fp8: bool,
    checkpoint_bytes: int = 0,
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
        checkpoint_bytes: bytes of a checkpoint; 0 if none is written.
        hardware: the speeds of the machines; None: an H200.
    """
    speeds = hardware or Hardware()
    layout, memory = trainer.layout, trainer.ranks[0]
    batches = layout.ranks // layout.cp
    micro_batches = -(-workload.rollouts * workload.tokens // (batches * pack_tokens))
    forward, backward = compute_seconds(config, workload.tokens, speeds, fp8=fp8)
    each = workload.rollouts / layout.ranks
    again = {name: seconds for name, seconds in forward.items() if name != "head"}
    compared = traffic.weights / layout.ranks
    link, named = (speeds.network, "network") if layout.nodes > 1 else (speeds.nvlink, "NVLink")
    every = f"FLOPs as coded, {workload.rollouts} rollouts of {workload.tokens:,} tokens"
    phases = [
        PlannedPhase(name="forward", seconds=each * sum(forward.values()), source=every),
        PlannedPhase(
            name="recomputation",
            seconds=each * sum(again.values()),
            source="forward, without the head",
        ),
        PlannedPhase(name="backward", seconds=each * sum(backward.values()), source=every),
        PlannedPhase(
            name="experts' dispatch",
            seconds=_dispatched(config, workload, layout.ep) / layout.ranks / speeds.nvlink,
            source="tokens to their experts and back, three passes, NVLink",
        ),
        PlannedPhase(
            name="FSDP's traffic",
            seconds=micro_batches * _gathered(memory) / link,
            source=(
                f"{micro_batches} micro-batches: parameters twice, gradients in float32; {named}"
            ),
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
            + _orthogonalized(memory) / (speeds.bf16 * speeds.products),
            source="states from host memory and back; PCIe; Newton-Schulz products",
        ),
        PlannedPhase(
            name="publication, start",
            seconds=compared / link + compared / speeds.pcie,
            source=f"a rank's layers gathered and copied to host memory; {named} and PCIe",
        ),
        PlannedPhase(
            name="publication",
            seconds=compared / speeds.encoding
            + traffic.weights_delta / layout.nodes / speeds.disk
            + traffic.weights_delta / speeds.disk
            + server.weights / speeds.pcie,
            source="delta encoded, written by all nodes, read by each server's node, loaded",
            beside="the step",
        ),
        PlannedPhase(
            name="rollouts",
            seconds=_rollout_seconds(config, server, workload, workload.rollouts, speeds, fp8=fp8),
            source=(
                f"{workload.servers * server.gpus} GPUs serve; prefill by FLOPs, decoding by bytes"
            ),
            beside="the step",
        ),
    ]
    return StepTime(
        phases=tuple(phases),
        others=tuple(_others(config, trainer, server, workload, checkpoint_bytes, speeds, fp8)),
        micro_batches=micro_batches,
    )


def compute_seconds(
    config: Any, tokens: int, speeds: Hardware, *, fp8: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of one GPU for a document, forward and backward, by part of the model."""
    text = config.get_text_config()
    parts = attrs.asdict(flops.breakdown(text, tokens), recurse=False)
    own = {name: float(np.asarray(value)) for name, value in parts.items()}
    sparse = own["indexer"] > 0
    products = speeds.fp8_products if fp8 else speeds.products
    attention = speeds.sparse_attention if sparse else speeds.attention
    fractions = {
        "attention_projections": products,
        "mlp": products,
        "experts": products * speeds.grouped,
        "indexer": speeds.indexer,
        "head": speeds.head,
    }
    # The backward pass has two products for each one forward, and computes scores again.
    again = float(np.asarray(flops.backward(text, tokens)))
    again -= 2 * (sum(own.values()) - own["indexer"])
    forward = fractions | {"attention_scores": attention}
    backward = fractions | {
        "attention_scores": speeds.sparse_attention if sparse else speeds.attention_backward
    }
    twice = {name: 2 * size for name, size in own.items() if name != "indexer"}
    twice["attention_scores"] += again
    return (
        {name: size / (speeds.bf16 * forward[name]) for name, size in own.items()},
        {name: size / (speeds.bf16 * backward[name]) for name, size in twice.items()},
    )


def _gathered(memory: RankMemory) -> int:
    """Bytes that a rank receives for a micro-batch.

    Parameters are gathered in each pass, in 16 bits. Gradients are reduced in 32 bits.
    """
    gathered, reduced = 2 * memory.unsharded, 2 * memory.unsharded
    return gathered + reduced


def _dispatched(config: Any, workload: PlannedStep, ep: int) -> float:
    """Bytes of tokens that all ranks send to other ranks' experts, in 16 bits."""
    text = config.get_text_config()
    k = getattr(text, "num_experts_per_tok", 0) or 0
    if ep == 1 or not k:
        return 0.0
    dense = getattr(text, "first_k_dense_replace", 0) or 0
    layers = text.num_hidden_layers - dense
    there_and_back, passes = 2, 3
    rows: float = workload.rollouts * workload.tokens * k * (ep - 1) / ep
    sent: float = rows * text.hidden_size * 2 * layers * there_and_back * passes
    return sent


def _orthogonalized(memory: RankMemory) -> float:
    """FLOPs of a rank's share of Muon's Newton-Schulz iterations."""
    total = 0.0
    for part in memory.parts:
        if len(part.shape) < 2 or "embed" in part.name or "lm_head" in part.name:
            continue
        *stacked, a, b = part.shape
        short, long = min(a, b), max(a, b)
        share = math.prod(part.local_shape) / math.prod(part.shape)
        products = 4 * short**2 * long + 2 * short**3
        total += part.count * math.prod(stacked) * NEWTON_SCHULZ * products * share
    return total


def _rollout_seconds(
    config: Any,
    server: ServerPlan,
    workload: PlannedStep,
    rollouts: int,
    speeds: Hardware,
    *,
    fp8: bool,
) -> float:
    """Seconds in which the servers play rollouts; their prefixes are cached."""
    if not rollouts:
        return 0.0
    gpus = workload.servers * server.gpus
    forward, _ = compute_seconds(config, workload.tokens, speeds, fp8=fp8)
    prefill = (1 - workload.sampled) * rollouts * sum(forward.values()) / gpus
    return prefill + rollouts * workload.tokens * workload.sampled / (
        gpus * decoded_per_second(server, workload, speeds)
    )


def decoded_per_second(server: ServerPlan, workload: PlannedStep, speeds: Hardware) -> float:
    """Return the tokens that a GPU decodes per second; each one reads weights, and a half cache.

    A rollout has half of its tokens on average.
    """
    cached = workload.tokens / 2
    most = server.kv_room / (server.kv_token * cached)
    playing = workload.rollouts * workload.steps_in_flight / (workload.servers * server.gpus)
    at_once = max(1.0, min(workload.max_num_seqs, most, playing))
    read = server.weights + at_once * cached * server.kv_token
    return at_once * speeds.memory * speeds.memory_fraction / read


def _others(
    config: Any,
    trainer: TrainerPlan,
    server: ServerPlan,
    workload: PlannedStep,
    checkpoint_bytes: int,
    speeds: Hardware,
    fp8: bool,
) -> list[PlannedPhase]:
    layout, memory = trainer.layout, trainer.ranks[0]
    on_device = memory.parameters + memory.optimizer
    written = checkpoint_bytes / layout.nodes / speeds.disk
    return [
        PlannedPhase(
            name="checkpoint, start",
            seconds=on_device / speeds.pcie,
            source="copied to host memory; PCIe",
        ),
        PlannedPhase(
            name="checkpoint",
            seconds=written,
            source="written by all nodes; disk",
            beside="the step",
        ),
        PlannedPhase(
            name="resume",
            seconds=written + on_device / speeds.pcie + server.published / speeds.disk,
            source=(
                "the checkpoint read by all nodes, a full publication by each server's node; disk"
            ),
        ),
        PlannedPhase(
            name="evaluation",
            seconds=_rollout_seconds(config, server, workload, workload.evaluated, speeds, fp8=fp8),
            source=f"{workload.evaluated} rollouts, like those of a step",
        ),
    ]


def step_rows(times: Mapping[str, StepTime]) -> list[list[str]]:
    """Return the rows of a table of phases, for each layout."""
    rows = []
    for name, time in times.items():
        rows += [
            [name, one.name, f"{one.seconds:.1f}", one.beside or "", one.source]
            for one in (*time.phases, *time.others)
        ]
        rows.append(
            [name, "training", f"{time.training:.1f}", "", "phases that wait for each other"]
        )
        rows.append([name, "step", f"{time.step:.1f}", "", f"the longest: {time.longest}"])
    return rows
