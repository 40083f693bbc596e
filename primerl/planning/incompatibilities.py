"""Pairs of capabilities that can't be combined, found by trying each pair on a tiny model.

There is no list of rules here: a pair is refused if the code that a run would call refuses it.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from primerl import fp8, optim, parallel, replay
from primerl.planning.virtual_ranks import imagined_ranks
from primerl.rollout.collection.staleness import check_schedule
from primerl.serving.server.refusals import refuse_arguments
from primerl.serving.worker.reload_refusals import reload_refusal
from primerl.testing.families import tiny_family

Pair = tuple[str, str]


@attrs.frozen
class Incompatibility:
    """Two capabilities that can't be used together."""

    pair: Pair
    reason: str
    """Message of the error that the refusing code raised."""


def refused_pairs(also: Mapping[Pair, Callable[[], Any]] | None = None) -> list[Incompatibility]:
    """Return the pairs of capabilities that the library refuses, and why.

    Args:
        also: a recipe's own pairs, each with a function that its run would call; a ``ValueError``
            or ``RuntimeError`` is a refusal.
    """
    refusals = []
    for pair, attempt in {**_ATTEMPTS, **(also or {})}.items():
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            refusals.append(Incompatibility(pair, str(error)))
    return refusals


def _sharded(family: str, *, cp: int = 1, ep: int = 1, **options: Any) -> None:
    with imagined_ranks(4):
        model = tiny_family(family).to("meta")
        parallel.shard(model, parallel.mesh(cp=cp, ep=ep), **options)


def _serve(*, routes: bool = False, **arguments: Any) -> None:
    refuse_arguments(arguments, (), routes=routes)


def _reload_with_adapters() -> None:
    why = reload_refusal(parallel_config=SimpleNamespace(enable_eplb=False), most_rank=8)
    if why:
        raise ValueError(why)


def _publish_mxfp8() -> None:
    model = tiny_family("qwen3")
    fp8.convert_linears(model, form=fp8.MXFP8)
    fp8.CheckpointQuantizer(model)


def _publish_transposed_experts() -> None:
    model = tiny_family("gpt_oss")
    fp8.convert_linears(model)
    fp8.CheckpointQuantizer(model, experts=fp8.GroupedMatmul())


def _replay_compiled() -> None:
    model = tiny_family("qwen3_moe")
    model.compile(backend="eager")
    shape = replay.shape(model)
    with replay.forced(model, torch.zeros(1, len(shape.layers), shape.k, dtype=torch.int64)):
        pass


def _recompute_sharded() -> None:
    with imagined_ranks(2):
        model = tiny_family("qwen3").to("meta")
        parallel.recompute(parallel.shard(model, parallel.mesh()))


def _convert_sharded() -> None:
    with imagined_ranks(2):
        model = tiny_family("qwen3").to("meta")
        fp8.convert_linears(parallel.shard(model, parallel.mesh()))


def _muon_in_groups_of_vectors() -> None:
    optim.Muon([torch.zeros(4)], lr=0.1)


_ATTEMPTS: dict[Pair, Callable[[], Any]] = {
    ("weight updates", "expert load balancing (enable_eplb)"): lambda: _serve(enable_eplb=True),
    ("weight updates", "adapters (enable_lora)"): _reload_with_adapters,
    ("training", "quantization by the server"): lambda: _serve(quantization="fp8"),
    ("training", "raw logprobs"): lambda: _serve(logprobs_mode="raw_logprobs"),
    ("sparse attention", "context parallel by ulysses"): lambda: _sharded(
        "glm_moe_dsa", cp=2, context="ulysses"
    ),
    ("a dense model", "expert parallel"): lambda: _sharded("qwen3", ep=2),
    ("MXFP8 training", "FP8 publications"): _publish_mxfp8,
    ("transposed experts", "FP8 publications"): _publish_transposed_experts,
    ("router replay", "a compiled model"): _replay_compiled,
    ("router replay", "prefill and decode by NixlConnector"): lambda: _serve(
        routes=True, kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    ),
    ("router replay", "pipeline parallel servers"): lambda: _serve(
        routes=True, pipeline_parallel_size=2
    ),
    ("recomputation", "a model that is already sharded"): _recompute_sharded,
    ("FP8 linears", "a model that is already sharded"): _convert_sharded,
    ("Muon", "parameters that are not matrices"): _muon_in_groups_of_vectors,
    ("max_staleness=0", "publishing every second step"): lambda: check_schedule(
        publish_every=2, max_staleness=0, groups_per_step=1
    ),
}
