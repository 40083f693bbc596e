"""``python -m primerl.rollout speed MODEL``: tokens per second of the engines on this machine."""

import argparse

from primerl.rollout.engines.transformers.speed import ENGINES, measure_speed

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
speed.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
speed.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64], help="at a time")
speed.add_argument("--prompts", type=int, nargs="+", default=[50, 500, 2000], help="their tokens")
speed.add_argument("--tokens", type=int, default=32, help="sampled in each request")
speed.add_argument("--group", type=int, default=8, help="requests that have the same prompt")
speed.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
args = parser.parse_args()
measure_speed(
    args.model,
    dtype=args.dtype,
    requests=args.requests,
    prompts=args.prompts,
    new_tokens=args.tokens,
    group=args.group,
    engines=args.engines,
)
