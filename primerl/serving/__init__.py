"""vLLM: servers, the engine that is their client, and what receives weights in their workers.

    server (a child process, or elsewhere) ── client (an engine for rollouts) ── protocol
    worker (imported by vLLM inside its processes: weights, adapters, routes)

The engine implements the protocol of ``rollout``, and the workers read what the transports of
``weights`` publish, so this package imports both. ``VLLMEngine`` loads on first use.
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
