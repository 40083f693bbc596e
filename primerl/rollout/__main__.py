"""``python -m primerl.rollout speed MODEL``: tokens per second of the engines on this machine."""

import argparse

from primerl.rollout.engines.transformers.speed import ENGINES, measure_speed


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


parser = argparse.ArgumentParser(prog="python -m primerl.rollout", description=__doc__)
commands = parser.add_subparsers(dest="command", required=True)
speed = commands.add_parser(
    "speed",
    help="compare the embedded engine with generate, and with vLLM where it is installed",
    description="Sample from a model with each engine; print sampled tokens per second. Requests "
    "come in groups of one prompt, as in reinforcement learning.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
)
speed.add_argument("model", help="model folder or Hugging Face hub id")
speed.add_argument(
    "--dtype",
    default="bfloat16",
    choices=["float32", "bfloat16"],
    help="dtype of weights and KV cache",
)
speed.add_argument(
    "--requests", type=_positive, nargs="+", default=[1, 8, 64], help="how many are sent at a time"
)
speed.add_argument(
    "--prompts", type=_positive, nargs="+", default=[50, 500, 2000], help="their tokens"
)
speed.add_argument("--tokens", type=_positive, default=32, help="sampled in each request")
speed.add_argument("--group", type=_positive, default=8, help="requests that have the same prompt")
speed.add_argument(
    "--engines",
    nargs="+",
    default=list(ENGINES),
    choices=list(ENGINES),
    help="the engines to measure, in this order: vLLM in a separate process, the embedded "
    "engine, and the generate method of transformers",
)
args = parser.parse_args()
try:
    measure_speed(
        args.model,
        dtype=args.dtype,
        requests=args.requests,
        prompts=args.prompts,
        new_tokens=args.tokens,
        group=args.group,
        engines=args.engines,
    )
except ValueError as error:
    parser.exit(status=2, message=f"{error}\n")
