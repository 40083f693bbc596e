"""vLLM servers, the engine that samples from them, and the worker code that receives weights.

    server    starts vLLM, as a child process or in the foreground
    client    the engine, which samples rollouts from one or more servers
    protocol  request and response formats
    worker    code that vLLM imports into its own processes: weights, adapters, expert routes

The engine implements the engine protocol of ``rollout``, and the workers read what the transports
of ``weights`` publish, so this package imports both. ``VLLMEngine`` is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from primerl.serving.server.child import VLLMServer, serve_vllm

if TYPE_CHECKING:
    from primerl.serving.client.engine import VLLMEngine

__all__ = ["VLLMEngine", "VLLMServer", "serve_vllm"]


def __getattr__(name: str) -> Any:
    if name == "VLLMEngine":
        from primerl.serving.client.engine import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module 'primerl.serving' has no attribute {name!r}")
