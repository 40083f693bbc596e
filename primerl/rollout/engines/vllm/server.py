"""vLLM's own server as a child process that never outlives its parent.

    python -m primerl.rollout.engines.vllm.server MODEL [--host H] [--port N] [vLLM's own flags]

runs the same server in the foreground, with the key of the environment's ``PRIMERL_API_KEY``.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl._vllm_names import FOLDER_BACKEND
from primerl.rollout.engines.vllm.child import VLLMServer
from primerl.rollout.engines.vllm.middleware import KEY_VARIABLE


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

    It ends with this process, however that ends. All its routes but ``/health`` and ``/ping``
    need the key, the administrative ones included.

    Args:
        model: a folder, or an id on the Hugging Face hub.
        host: what it listens on. Beyond this computer only if you say so here: the key then
            travels unencrypted.
        port: any free one by default.
        api_key: drawn at random by default.
        weight_transfer: the backend of vLLM's weight transfer: ``"primerl"`` (the transports of
            ``primerl.weights``), one of vLLM's own, such as ``"nccl"``, or None for none.
        log_path: of the server's output, which is appended. By default a private temporary file,
            which ``close()`` removes unless the server failed.
        start_timeout_s: how long it may take until it answers.
        env: environment variables of the server, beside this process's.
        engine_args: vLLM's arguments by their own names: ``max_model_len=4096``,
            ``enable_prefix_caching=True`` (``False`` becomes ``--no-...``),
            ``tensor_parallel_size``, ``kv_transfer_config={...}`` (JSON),
            ``lora_modules=[...]`` (several values).

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: its version is not supported. ``start()``: it ended, or did not answer in
            time; the message holds the end of its log.
        ValueError: an argument that no vLLM server could be started with.
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


def main(words: list[str] | None = None) -> int:
    """Serve in the foreground until the server ends, or a signal ends it; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m primerl.rollout.engines.vllm.server",
        description="A vLLM server for training, in the foreground. All other flags are vLLM's.",
        epilog=f"The key comes from the environment: {KEY_VARIABLE}.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a folder, or an id on the Hugging Face hub")
    parser.add_argument("--host", default="127.0.0.1", help="beyond this computer only if given")
    parser.add_argument("--port", type=int, help="any free one by default")
    parser.add_argument("--weight-transfer", default=FOLDER_BACKEND, help="its backend, or 'none'")
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    ours, flags = parser.parse_known_args(words)
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        parser.error(f"set {KEY_VARIABLE} to the key that clients will send")
    transfer = None if ours.weight_transfer == "none" else ours.weight_transfer
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    server = VLLMServer(
        ours.model,
        {},
        flags=tuple(flags),
        in_foreground=True,
        host=ours.host,
        port=ours.port,
        api_key=key,
        weight_transfer=transfer,
        start_timeout_s=ours.start_timeout_s,
    )
    try:
        with server:
            print(server.url, flush=True)  # noqa: T201 (what this program is asked for)
            server.wait()
    except KeyboardInterrupt:
        pass
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
