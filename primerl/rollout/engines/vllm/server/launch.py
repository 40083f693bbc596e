"""``serve_vllm``: vLLM's own server in a child process that never outlives its parent."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl._vllm_names import FOLDER_BACKEND
from primerl.rollout.engines.vllm.server.child import VLLMServer


def serve_vllm(
    model: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    api_key: str | None = None,
    weight_transfer: str | None = FOLDER_BACKEND,
    log_path: str | os.PathLike[str] | None = None,
    start_timeout_s: float = 600.0,
    env: Mapping[str, str] | None = None,
    **engine_args: Any,
) -> VLLMServer:
    """A vLLM server of ``model``, started by ``with`` or ``start()``.

        with rollout.serve_vllm("Qwen/Qwen3-0.6B", max_model_len=4096) as server:
            engine = rollout.VLLMEngine([server])

    It ends with this process, however that ends. Every route but ``/health`` and ``/ping``
    requires the key, administrative routes included.

    Args:
        model: a folder, or an id on the Hugging Face hub.
        host: the interface to listen on. Beyond this machine the key travels unencrypted.
        port: any free port by default.
        api_key: random by default.
        weight_transfer: the backend of vLLM's weight transfer: ``"primerl"`` or
            ``"primerl_nccl"`` (the transports of ``primerl.weights``), one of vLLM's own, such as
            ``"nccl"``, or None.
        log_path: the server's output is appended to this file. By default a private temporary
            file, which ``close()`` removes unless the server failed.
        start_timeout_s: how long starting may take.
        env: environment variables of the server, in addition to this process's.
        engine_args: vLLM's arguments by their own names: ``max_model_len=4096``,
            ``enable_prefix_caching=True`` (``False`` becomes ``--no-...``),
            ``tensor_parallel_size``, ``kv_transfer_config={...}`` (JSON),
            ``lora_modules=[...]`` (several values).

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: vLLM's version is not supported. ``start()``: the server exited or was not
            ready in time; the message has the end of its log.
        ValueError: an argument is refused or malformed.
    """
    return VLLMServer(
        os.fspath(model),
        engine_args,
        host=host,
        port=port,
        api_key=api_key,
        weight_transfer=weight_transfer,
        log_path=Path(log_path) if log_path is not None else None,
        start_timeout_s=start_timeout_s,
        env=env,
    )
