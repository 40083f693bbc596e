"""Command that runs a vLLM server in the foreground.

python -m primerl.serving.server MODEL [--host H] [--port N] [vLLM's own flags]

The API key is read from the environment variable ``PRIMERL_API_KEY``.
"""

import argparse
import os
import signal
import sys

from primerl.serving.names import FOLDER_BACKEND
from primerl.serving.server.child import VLLMServer
from primerl.serving.server.kv_folder import ROLES, kv_folder
from primerl.serving.server.middleware import KEY_VARIABLE


def main(words: list[str] | None = None) -> int:
    """Serve in the foreground until the server exits or is stopped; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m primerl.serving.server",
        description="Run a vLLM server for training in the foreground. All other flags are vLLM's.",
        epilog=f"The API key is read from the environment variable {KEY_VARIABLE}.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a folder, or an id on the Hugging Face hub")
    parser.add_argument("--host", default="127.0.0.1", help="the interface to listen on")
    parser.add_argument("--port", type=int, help="any free port by default")
    parser.add_argument("--weight-transfer", default=FOLDER_BACKEND, help="the backend, or 'none'")
    parser.add_argument(
        "--start-timeout-s", type=float, default=600.0, help="how long starting may take"
    )
    parser.add_argument(
        "--kv-folder", help="the folder by which servers share keys and values: serving.kv_folder"
    )
    parser.add_argument(
        "--kv-role", choices=ROLES, default="both", help="prefill stores them, decode loads them"
    )
    ours, flags = parser.parse_known_args(words)
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        parser.error(f"set {KEY_VARIABLE} to the key that clients will send")
    arguments = {}
    if ours.kv_folder is not None:
        try:
            arguments["kv_transfer_config"] = kv_folder(ours.kv_folder, role=ours.kv_role)
        except ValueError as error:
            parser.error(f"--kv-folder: {error}")
    transfer = None if ours.weight_transfer == "none" else ours.weight_transfer
    # Stop on SIGTERM too: a shell script's background jobs ignore SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = VLLMServer(
        ours.model,
        arguments,
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
            print(server.url, flush=True)  # noqa: T201  the output of this command
            server.wait()
    except KeyboardInterrupt:
        pass
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
