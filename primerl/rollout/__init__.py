"""Rollouts: engines that sample, environments that play tasks, and workers that run both.

Gateways and ``TransformersEngine``, the only part that depends on torch, are loaded on first use,
because a process that only collects rollouts needs neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

from primerl.rollout.agents.context import drop_tool_results, summarise
from primerl.rollout.agents.limits import AgentLimits
from primerl.rollout.agents.loop import AgentRun, run_agent, tool_agent
from primerl.rollout.agents.tools import Tool, editor, shell
from primerl.rollout.collection.buffer import Buffer
from primerl.rollout.collection.concurrency import AdaptiveConcurrency
from primerl.rollout.collection.evaluation import evaluate_tasks
from primerl.rollout.collection.groups import run_group
from primerl.rollout.collection.recording import load_groups, save_groups
from primerl.rollout.conversations.calls import EngineCall, stitch
from primerl.rollout.conversations.conversation import Conversation, single_turn
from primerl.rollout.conversations.history import History
from primerl.rollout.engines.contract import BadCompletion
from primerl.rollout.engines.protocol import Engine, RouteStore
from primerl.rollout.environments.environment import Environment, RewardError, combine_environments
from primerl.rollout.environments.isolation import isolated
from primerl.rollout.environments.verifiers_adapter import verifiers
from primerl.rollout.evaluations import Evaluation
from primerl.rollout.ray_actors.environment import on_ray
from primerl.rollout.renderers.loading import load_renderer
from primerl.rollout.scoring import NoScores, score_samples, with_scores
from primerl.rollout.tasks.difficulty_pools import DifficultyPools
from primerl.rollout.tasks.mixtures import Mixture
from primerl.rollout.tasks.streams import InOrder, Shuffled, TaskStream
from primerl.rollout.workers import Worker, worker

if TYPE_CHECKING:
    from primerl.rollout.engines.chat_endpoint import ChatEndpoint
    from primerl.rollout.engines.transformers.engine import TransformersEngine
    from primerl.rollout.environments.verifiers_adapter.tool_harness import ToolHarness
    from primerl.rollout.gateways.commands import CommandAgent, CommandRun, command_agent
    from primerl.rollout.gateways.server import Gateway, gateway

__all__ = [
    "AdaptiveConcurrency",
    "AgentLimits",
    "AgentRun",
    "BadCompletion",
    "Buffer",
    "EngineCall",
    "ChatEndpoint",
    "CommandAgent",
    "CommandRun",
    "Conversation",
    "DifficultyPools",
    "Engine",
    "Environment",
    "Evaluation",
    "Gateway",
    "History",
    "InOrder",
    "Mixture",
    "NoScores",
    "RewardError",
    "RouteStore",
    "Shuffled",
    "TaskStream",
    "Tool",
    "ToolHarness",
    "TransformersEngine",
    "Worker",
    "command_agent",
    "drop_tool_results",
    "editor",
    "gateway",
    "isolated",
    "load_groups",
    "load_renderer",
    "on_ray",
    "evaluate_tasks",
    "combine_environments",
    "run_agent",
    "run_group",
    "save_groups",
    "score_samples",
    "shell",
    "single_turn",
    "stitch",
    "summarise",
    "tool_agent",
    "verifiers",
    "with_scores",
    "worker",
]

_LAZY = {
    "ChatEndpoint": "engines.chat_endpoint",
    "TransformersEngine": "engines.transformers.engine",
    "CommandAgent": "gateways.commands",
    "CommandRun": "gateways.commands",
    "Gateway": "gateways.server",
    "ToolHarness": "environments.verifiers_adapter.tool_harness",
    "command_agent": "gateways.commands",
    "gateway": "gateways.server",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'primerl.rollout' has no attribute {name!r}")
    return getattr(importlib.import_module(f"primerl.rollout.{_LAZY[name]}"), name)
