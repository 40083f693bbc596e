"""Evaluate a model on environments: pass@k with confidence intervals, and every conversation.

    python recipes/evaluate.py --env reverse-words --model MODEL --samples 4
    python recipes/evaluate.py --env reverse-words --endpoint http://127.0.0.1:8000/v1

A local model is a folder or hub id. By default, it is sampled in this process; ``--engine vllm``
starts a vLLM server, and ``--engine-urls`` uses running ones. With ``--endpoint``, the model is
whatever an OpenAI-compatible endpoint serves. Environments come from the verifiers library, such as
``reasoning-gym:chain_sum``.

The script prints a table of scores. It writes every rollout with its conversation to
``RUN_DIR/rollouts.jsonl``, and the scores to ``RUN_DIR/summary.json``. ``--resume RUN_DIR``
continues with the missing rollouts. ``--against OTHER_RUN_DIR`` compares two evaluations on the
tasks that both have. To adapt the script, copy this file and edit ``open_environment``.
"""

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import attrs

from primerl import track

with track.interruptible():  # on Ctrl-C, print one line instead of a traceback
    print("importing torch", flush=True)  # the import takes seconds
    import torch

    from primerl import evaluation, models, parallel, rollout, serving

from primerl.track import number
from primerl.types import SamplingParams

# A resumed evaluation must keep these arguments.
FIXED = ("env", "model", "endpoint", "dtype", "max_tokens", "max_turns", "temperature", "seed")


def model_or_endpoint(args: "Args", _: Any, model: str | None) -> None:
    """Validate that the flags name something to evaluate."""
    if model is None and args.endpoint is None:
        raise ValueError("nothing to evaluate: pass --model MODEL, or --endpoint URL")


@attrs.frozen
class Args:
    """The flags of an evaluation. To change anything else, edit this file."""

    #: environments of the verifiers library, such as reasoning-gym:chain_sum
    env: tuple[str, ...]
    #: base URL of an OpenAI-compatible endpoint, whose API key is in OPENAI_API_KEY
    endpoint: str | None = None
    #: model folder or Hugging Face hub id; with --endpoint, a model name that the endpoint knows
    model: str | None = attrs.field(default=None, validator=model_or_endpoint)
    #: sample in this process, or start a vLLM server: the default on a GPU where vLLM is installed
    engine: Literal["transformers", "vllm"] = attrs.field(factory=serving.default_engine)
    #: URLs of vLLM servers that are already running
    engine_urls: tuple[str, ...] = attrs.field(default=(), validator=track.urls)
    #: arguments of the vLLM server to start, such as gpu_memory_utilization 0.4
    vllm: dict[str, bool | str] = attrs.field(factory=dict)
    #: dtype in which the engine computes, by default the fastest on this machine
    dtype: Literal["float32", "bfloat16"] = attrs.field(factory=parallel.native_dtype)
    #: number of tasks per environment: the first ones, which async_grpo.py --eval-tasks holds out
    tasks: int = attrs.field(default=64, validator=number(at_least=1))
    #: rollouts per task
    samples: int = attrs.field(default=1, validator=number(at_least=1))
    #: maximum tokens per reply
    max_tokens: int = attrs.field(default=512, validator=number(at_least=1))
    #: maximum turns per rollout; 0: the environment's own limit
    max_turns: int = attrs.field(default=0, validator=number(at_least=0))
    #: sampling temperature; 0: greedy
    temperature: float = attrs.field(default=1.0, validator=number(at_least=0))
    #: minimum reward of a rollout that passes
    passing_reward: float = attrs.field(default=1.0, validator=number(above=0))
    #: lowest and highest possible reward; 0 1 if all rewards are between 0 and 1, else unknown
    reward_bounds: tuple[float, float] | None = None
    #: number of rollouts in flight
    concurrency: int = attrs.field(default=64, validator=number(at_least=1))
    #: number of retries after a rollout fails
    retries: int = attrs.field(default=1, validator=number(at_least=0))
    #: timeout of a rollout, in seconds
    rollout_timeout_s: float = attrs.field(default=1800.0, validator=number(above=0))
    #: how many seconds the engine may fail every request, for example while its server restarts
    outage_s: float = attrs.field(default=600.0, validator=number(above=0))
    #: seed of sampling in this process
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: folder of another evaluation to compare with
    against: str | None = None
    #: folder of a new evaluation; runs/SCRIPT-NNN by default
    run_dir: str | None = None
    #: folder of the evaluation to resume; only missing rollouts are sampled
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))
    #: with --resume, repeat the rollouts that ended with an error
    retry_errors: bool = False


def check(args: Args) -> None:
    """Refuse a model that does not exist, before anything is loaded."""
    if args.endpoint is None:
        track.require_model(args.model, flag="--model")


def extras(args: Args) -> list[str]:
    """List the optional dependencies of a run; they are checked before anything is loaded."""
    needed = ["verifiers"]
    if args.engine == "vllm" and not args.engine_urls and args.endpoint is None:
        needed.append("vllm")
    return needed


def open_environment(name: str, args: Args, tokenizer: Any) -> tuple[Any, list[Any]]:
    """Return the problem: an environment and its tasks."""
    environment = rollout.verifiers(
        name,
        tokenizer=tokenizer,
        max_turns=args.max_turns or None,
        keep_conversation=True,
        timeout_s=args.rollout_timeout_s,
    )
    return environment, list(islice(environment.tasks, args.tasks))


@contextlib.contextmanager
def open_engine(args: Args) -> Iterator[tuple[Any, Any]]:
    """Open the sampling engine and its tokenizer, which is None for an endpoint."""
    import transformers

    if args.endpoint is not None:
        with rollout.ChatEndpoint(args.endpoint, model=args.model) as engine:
            yield engine, None
    elif args.engine_urls or args.engine == "vllm":
        print("sampling with vLLM")
        settings = {"dtype": args.dtype} | args.vllm
        started = contextlib.nullcontext(args.engine_urls)
        if not args.engine_urls:
            started = serving.serve_vllm(args.model, **settings)
        with started as servers, serving.VLLMEngine(servers) as engine:
            engine.adopt(0)  # evaluate the weights that the servers loaded themselves
            yield engine, transformers.AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = models.load_pretrained(args.model)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, args.dtype)
        with rollout.TransformersEngine(model, dtype=dtype, seed=args.seed) as engine:
            yield engine, tokenizer


@track.interruptible()
def main(args: Args) -> None:
    for name in args.env:  # find a wrong name before the model loads
        rollout.verifiers(name, tokenizer=None)
    log = track.EvaluationLog(args.resume or args.run_dir, args=args, fixed=FIXED)
    earlier = [] if args.against is None else track.read_evaluation(args.against)
    view = track.LiveView("evaluation", steps=0)
    parallel.configure_cpu()
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)

    with log, contextlib.closing(view), open_engine(args) as (engine, tokenizer):
        for name in args.env:
            environment, tasks = open_environment(name, args, tokenizer)
            done = {
                (line["task"], line["index"])
                for line in log.records
                if line["environment"] == name and not (args.retry_errors and line["error"])
            }
            for played in rollout.evaluate_tasks(
                engine,
                environment,
                tasks,
                params,
                samples=args.samples,
                concurrency=args.concurrency,
                retries=args.retries,
                skip=done,
                rollout_timeout_s=args.rollout_timeout_s,
                timeout_s=args.outage_s,
            ):
                log.add(evaluation.Record.of(played, environment=name).as_line())

        records = [evaluation.Record.parse(line) for line in log.records]
        scores = evaluation.scores(
            records, passing_reward=args.passing_reward, bounds=args.reward_bounds
        )
        summary = {"scores": {name: attrs.asdict(one) for name, one in scores.items()}}
        comparison = {}
        if earlier:
            others = [evaluation.Record.parse(line) for line in earlier]
            comparison = evaluation.compare_records(others, records, bounds=args.reward_bounds)
            summary["against"] = args.against
            summary["comparison"] = {name: attrs.asdict(one) for name, one in comparison.items()}
        log.finish(summary)

    from rich.console import Console

    console = Console()
    console.print(evaluation.scores_table(scores))
    if comparison:
        console.print(f"rewards, compared with {args.against}:")
        console.print(evaluation.comparison_table(comparison))
    print(f"all rollouts are in {log.folder}")


if __name__ == "__main__":
    main(track.command_line(Args, description=__doc__, extras=extras, check=check))
