"""vLLM servers, the engine that samples from them, and the worker code that receives weights.

    server    starts vLLM, as a child process or in the foreground
    client    the engine, which samples rollouts from one or more servers
    protocol  request and response formats
    worker    code that vLLM imports into its own processes: weights, adapters, expert routes

The engine implements the engine protocol of ``rollout``, and the workers read what the transports
of ``weights`` publish, so this package imports both. ``VLLMEngine`` is imported on first use.
"""

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from primerl._common.engine_usage import EngineUsage, engine_usage, usage_together
from primerl.serving.client.routing import (
    RoutedPlace,
    RoutedRequest,
    cost_aware,
    least_loaded,
    of_session,
    prefix_aware,
)
from primerl.serving.server.child import VLLMServer, serve_vllm
from primerl.serving.server.kv_folder import kv_folder

if TYPE_CHECKING:
    from primerl.serving.client.engine import VLLMEngine

__all__ = [
    "EngineUsage",
    "RoutedPlace",
    "RoutedRequest",
    "VLLMEngine",
    "VLLMServer",
    "cost_aware",
    "default_engine",
    "engine_usage",
    "kv_folder",
    "least_loaded",
    "of_session",
    "prefix_aware",
    "serve_vllm",
    "usage_together",
]


def default_engine() -> Literal["transformers", "vllm"]:
    """Return the engine that recipes use unless told otherwise.

    It is vLLM if this machine has a GPU and vLLM is installed, else the engine in this process.
    """
    import torch

    on_gpu = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None
    return "vllm" if on_gpu else "transformers"


def __getattr__(name: str) -> Any:
    if name == "VLLMEngine":
        from primerl.serving.client.engine import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module 'primerl.serving' has no attribute {name!r}")
