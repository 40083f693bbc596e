"""Program of a further node of a vLLM server: runs its ranks, and ends when the first node does.

    python -m primerl.serving.server.headless [vLLM's own flags]

The build of vLLM for CPUs has no ``vllm serve``, the only command of vLLM with ``--headless``.
"""

import os
import signal
import sys
import threading

from primerl.serving.server.middleware import read_key
from primerl.serving.server.nodes import NODE_LOST, hold_link


def main() -> int:
    """Run the ranks of this node until they, or the first node, end; return the exit code."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    args.api_server_count = 0
    first_node_ended = threading.Event()

    def watch() -> None:
        hold_link(
            args.data_parallel_address,
            args.port,
            api_key=read_key(),
            ranks=args.data_parallel_size_local,
        )
        first_node_ended.set()
        os.kill(os.getpid(), signal.SIGTERM)  # vLLM then ends the ranks

    threading.Thread(target=watch, daemon=True, name="node-link").start()
    try:
        run_headless(args)
    except SystemExit:
        if not first_node_ended.is_set():
            raise
    return NODE_LOST


if __name__ == "__main__":
    sys.exit(main())
