"""What a model scores on environments: pass@k with confidence intervals, and every conversation.

    python recipes/evaluate.py --env reverse-words --model MODEL --samples 4
    python recipes/evaluate.py --env reverse-words --endpoint http://127.0.0.1:8000/v1

The model is a folder or hub id, sampled in this process (``--engine vllm``: with its server; or
with ``--engine-urls``, servers that run already), or what any OpenAI-compatible endpoint serves.
Environments are those of the verifiers library, such as ``reasoning-gym:chain_sum``.

Prints a table; ``RUN_DIR/plays.jsonl`` has every play with its conversation, ``summary.json`` the
scores. ``--resume RUN_DIR`` plays what is missing there. ``--against OTHER_RUN_DIR`` compares two
results on the tasks of both. Copy this file and edit it: ``open_environment`` is the problem.
"""

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import attrs

from primerl import track

with track.interruptible():  # Ctrl-C ends it with one line
    print("importing torch", flush=True)  # which takes seconds
    import torch

    from primerl import evaluation, models, parallel, rollout, serving

from primerl.track import number
from primerl.types import SamplingParams

# An evaluation that is resumed keeps these.
FIXED = ("env", "model", "endpoint", "dtype", "max_tokens", "max_turns", "temperature", "seed")


def model_or_endpoint(args: "Args", _: Any, model: str | None) -> None:
    """A validator: what is evaluated must be said."""
    if model is None and args.endpoint is None:
        raise ValueError("nothing to evaluate: pass --model MODEL, or --endpoint URL")


@attrs.frozen
class Args:
    """What an evaluation may vary; whatever else is edited in this file."""

    #: environments of the verifiers library, such as reasoning-gym:chain_sum
    env: tuple[str, ...]
    #: the base URL of an OpenAI-compatible endpoint; its key is in OPENAI_API_KEY
    endpoint: str | None = None
    #: a model folder or hub id; with --endpoint, a name that it knows
    model: str | None = attrs.field(default=None, validator=model_or_endpoint)
    #: sample in this process, or start a vLLM server
    engine: Literal["transformers", "vllm"] = "transformers"
    #: vLLM's servers that run already
    engine_urls: tuple[str, ...] = ()
    #: arguments of the server that is started, such as gpu_memory_utilization 0.4
    vllm: dict[str, bool | str] = attrs.field(factory=dict)
    #: what the engine computes in, by default what this machine is fastest in
    dtype: Literal["float32", "bfloat16"] = attrs.field(factory=parallel.native_dtype)
    #: tasks of each environment: its first ones, which async_grpo.py holds out with --eval-tasks
    tasks: int = attrs.field(default=64, validator=number(at_least=1))
    #: plays of each task
    samples: int = attrs.field(default=1, validator=number(at_least=1))
    #: the most tokens of a reply
    max_tokens: int = attrs.field(default=512, validator=number(at_least=1))
    #: the most replies of a play; 0: what the environment says
    max_turns: int = attrs.field(default=0, validator=number(at_least=0))
    #: 0 is greedy
    temperature: float = attrs.field(default=1.0, validator=number(at_least=0))
    #: the least reward with which a play has passed
    passing_reward: float = attrs.field(default=1.0, validator=number(above=0))
    #: plays in flight
    concurrency: int = attrs.field(default=64, validator=number(at_least=1))
    #: how often a play that failed is played again
    retries: int = attrs.field(default=1, validator=number(at_least=0))
    #: how long a play may take
    play_timeout_s: float = attrs.field(default=1800.0, validator=number(above=0))
    #: how long the engine may fail every request, such as while its server restarts
    outage_s: float = attrs.field(default=600.0, validator=number(above=0))
    #: the seed of sampling in this process
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: the folder of another evaluation, to compare with
    against: str | None = None
    #: the folder of a new evaluation; runs/SCRIPT-NNN by default
    run_dir: str | None = None
    #: the folder of an evaluation, to play what is missing there
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))
    #: when it is resumed: play again what ended with an error
    retry_errors: bool = False


def extras(args: Args) -> list[str]:
    """The optional dependencies of a run, which are looked for before anything is loaded."""
    needed = ["verifiers"]
    if args.engine == "vllm" and not args.engine_urls and args.endpoint is None:
        needed.append("vllm")
    return needed


def open_environment(name: str, args: Args, tokenizer: Any) -> tuple[Any, list[Any]]:
    """The problem: an environment, and the tasks to play."""
    environment = rollout.verifiers(
        name,
        tokenizer=tokenizer,
        max_turns=args.max_turns or None,
        keep_conversation=True,
        timeout_s=args.play_timeout_s,
    )
    return environment, list(islice(environment.tasks, args.tasks))


@contextlib.contextmanager
def open_engine(args: Args) -> Iterator[tuple[Any, Any]]:
    """What samples, and its tokenizer, which an endpoint keeps to itself."""
    import transformers

    if args.endpoint is not None:
        with rollout.ChatEndpoint(args.endpoint, model=args.model) as engine:
            yield engine, None
    elif args.engine_urls or args.engine == "vllm":
        settings = {"dtype": args.dtype} | args.vllm
        started = contextlib.nullcontext(args.engine_urls)
        if not args.engine_urls:
            started = serving.serve_vllm(args.model, **settings)
        with started as servers, serving.VLLMEngine(servers) as engine:
            engine.adopt(0)  # the weights that the servers loaded themselves
            yield engine, transformers.AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = models.load_pretrained(args.model)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, args.dtype)
        with rollout.TransformersEngine(model, dtype=dtype, seed=args.seed) as engine:
            yield engine, tokenizer


@track.interruptible()
def main(args: Args) -> None:
    for name in args.env:  # an error in a name is found before the model loads
        rollout.verifiers(name, tokenizer=None)
    log = track.PlayLog(args.resume or args.run_dir, args=args, fixed=FIXED)
    earlier = [] if args.against is None else track.read_plays(args.against)
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
            for played in rollout.play_tasks(
                engine,
                environment,
                tasks,
                params,
                samples=args.samples,
                concurrency=args.concurrency,
                retries=args.retries,
                skip=done,
                play_timeout_s=args.play_timeout_s,
                timeout_s=args.outage_s,
            ):
                log.add(evaluation.Record.of(played, environment=name).as_line())

        records = [evaluation.Record.parse(line) for line in log.records]
        scores = evaluation.scores(records, passing_reward=args.passing_reward)
        summary = {"scores": {name: attrs.asdict(one) for name, one in scores.items()}}
        comparison = {}
        if earlier:
            others = [evaluation.Record.parse(line) for line in earlier]
            comparison = evaluation.compare_records(others, records)
            summary["against"] = args.against
            summary["comparison"] = {name: attrs.asdict(one) for name, one in comparison.items()}
        log.finish(summary)

    from rich.console import Console

    console = Console()
    console.print(evaluation.scores_table(scores))
    if comparison:
        console.print(f"rewards, compared with {args.against}:")
        console.print(evaluation.comparison_table(comparison))
    print(f"every play is in {log.folder}")


if __name__ == "__main__":
    main(track.command_line(Args, description=__doc__, extras=extras))
