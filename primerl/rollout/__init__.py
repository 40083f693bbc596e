"""Rollouts: engines that sample, environments that play, and the worker that runs both.

The only package that is asynchronous. Its one torch-dependent part, ``TransformersEngine``, loads
on first use, so a process that only collects rollouts never imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from primerl.rollout.buffer import Buffer
from primerl.rollout.contract import BadCompletion, BadSample
from primerl.rollout.conversation import Conversation
from primerl.rollout.difficulty_pools import DifficultyPools
from primerl.rollout.engine import Engine
from primerl.rollout.environment import Environment, RewardError, single_turn
from primerl.rollout.environment_workers import isolated
from primerl.rollout.groups import run_group
from primerl.rollout.mixtures import Mixture, route
from primerl.rollout.recording import load_groups, save_groups
from primerl.rollout.staleness import (
    check_schedule,
    may_start,
    oldest_version,
    token_staleness,
)
from primerl.rollout.task_streams import InOrder, Shuffled, TaskStream
from primerl.rollout.workers import Evaluation, Worker, worker

if TYPE_CHECKING:
    from primerl.rollout.transformers_engine import TransformersEngine
    from primerl.rollout.verifiers_adapter import verifiers
    from primerl.rollout.vllm_child import VLLMServer
    from primerl.rollout.vllm_engine import VLLMEngine
    from primerl.rollout.vllm_server import serve_vllm

__all__ = [
    "BadCompletion",
    "BadSample",
    "Buffer",
    "Conversation",
    "DifficultyPools",
    "Engine",
    "Environment",
    "Evaluation",
    "InOrder",
    "Mixture",
    "RewardError",
    "Shuffled",
    "TaskStream",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServer",
    "Worker",
    "check_schedule",
    "isolated",
    "load_groups",
    "may_start",
    "oldest_version",
    "route",
    "run_group",
    "save_groups",
    "serve_vllm",
    "single_turn",
    "token_staleness",
    "verifiers",
    "worker",
]


_LAZY = {
    "TransformersEngine": "transformers_engine",
    "VLLMEngine": "vllm_engine",
    "VLLMServer": "vllm_child",
    "serve_vllm": "vllm_server",
    "verifiers": "verifiers_adapter",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'primerl.rollout' has no attribute {name!r}")
    return getattr(importlib.import_module(f"primerl.rollout.{_LAZY[name]}"), name)
