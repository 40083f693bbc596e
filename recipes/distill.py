"""On-policy distillation: the student samples, and teachers score each of its tokens.

    python recipes/distill.py --model STUDENT --teacher TEACHER --steps 100
    python recipes/distill.py --model STUDENT --teacher http://127.0.0.1:8000 --top-k 20
    python recipes/distill.py --model STUDENT --env reverse-words reasoning-gym:chain_sum \
        --teacher WORDS_TEACHER SUMS_TEACHER

A teacher is either a model folder or hub id, or the URL of a vLLM server. A model is sharded over
the ranks in the same way as the student. The API key of a server is in ``PRIMERL_API_KEY``. All
teachers must have the student's tokenizer. Rewards are recorded but not trained on.

To adapt the script, copy this file and edit it: ``build_environment`` defines the problem,
``backward`` the algorithm. On 8 GPUs, start it with ``torchrun --nproc-per-node 8``. Ctrl-C and
SIGTERM save a checkpoint; ``--resume RUN_DIR`` continues the run.
"""

import contextlib
import importlib.util
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import numpy as np

from primerl import track

with track.interruptible():  # on Ctrl-C, print one line instead of a traceback
    print("importing torch", flush=True)  # the import takes seconds
    import torch

    from primerl import (
        advantage,
        checkpoint,
        loss,
        models,
        packing,
        parallel,
        rollout,
        serving,
        weights,
    )

from primerl.track import number
from primerl.types import Group, SamplingParams, TrainingSample

MOST_MISSING = 0.5  # stop if more than this fraction of a teacher's samples has no scores

# A resumed run must keep these arguments: they determine the split of the tasks, or the checkpoint
# depends on them.
FIXED = (
    "model",
    "seed",
    "lr",
    "dtype",
    "groups_per_step",
    "group_size",
    "eval_tasks",
    "env",
    "top_k",
)


class TeacherFailed(RuntimeError):
    """Too few samples have scores from a teacher. The run saves its progress and ends."""


@attrs.frozen
class Args:
    """The flags of a run. To change anything else, edit this file."""

    #: student: model folder or Hugging Face hub id
    model: str
    #: model folders, hub ids or server URLs: one teacher for all environments, or one for each
    teacher: tuple[str, ...]
    #: number of the teacher's most likely tokens to learn from; 0: score only the sampled token
    top_k: int = attrs.field(default=0, validator=number(at_least=0))
    #: number of policy steps
    steps: int = attrs.field(default=20, validator=number(at_least=1))
    #: seed of the task order, of sampling in this process and of dropout
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    #: learning rate
    lr: float = attrs.field(default=2e-5, validator=number(at_least=0))
    #: tasks per policy step
    groups_per_step: int = attrs.field(default=64, validator=number(at_least=1))
    #: rollouts per task
    group_size: int = attrs.field(default=1, validator=number(at_least=1))
    #: maximum staleness of a trained token, in policy steps
    max_staleness: int = attrs.field(default=2, validator=number(at_least=0))
    #: maximum tokens per reply
    max_tokens: int = attrs.field(default=16, validator=number(at_least=1))
    #: maximum tokens per micro-batch
    pack_tokens: int = attrs.field(default=2048, validator=number(at_least=1))
    #: dtype in which trainer and engine compute, by default the fastest on this machine; the
    #: trained parameters stay float32
    dtype: Literal["float32", "bfloat16"] = attrs.field(factory=parallel.native_dtype)
    #: recompute activations in the backward pass instead of storing them
    recompute: bool = False
    #: expert parallelism: number of ranks that share the experts of each layer
    ep: int = attrs.field(default=1, validator=number(at_least=1))
    #: context parallelism: number of ranks that share the tokens of each micro-batch
    cp: int = attrs.field(default=1, validator=number(at_least=1))
    #: sample in this process, or start a vLLM server: the default on a GPU where vLLM is installed
    engine: Literal["transformers", "vllm"] = attrs.field(factory=serving.default_engine)
    #: URLs of vLLM servers that are already running
    engine_urls: tuple[str, ...] = attrs.field(default=(), validator=track.urls)
    #: arguments of the vLLM server to start, such as gpu_memory_utilization 0.4
    vllm: dict[str, bool | str] = attrs.field(factory=dict)
    #: folder for published weights that all hosts share; needed only if servers are on other hosts
    weights_folder: str | None = None
    #: environments of the verifiers library, such as reasoning-gym:chain_sum, sampled equally often
    env: tuple[str, ...] = ()
    #: number of held-out tasks per environment, which are sampled greedily
    eval_tasks: int = attrs.field(default=32, validator=number(at_least=0))
    #: policy steps between evaluations; 0: evaluate only at the end
    eval_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: policy steps between checkpoints; 0: save only at the end or when the run is stopped
    save_every: int = attrs.field(default=10, validator=number(at_least=0))
    #: project of Weights & Biases that gets the metrics, too; offline without an API key
    wandb: str | None = None
    #: folder of a new run; runs/SCRIPT-NNN by default
    run_dir: str | None = None
    #: folder of the run to resume
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))


def check(args: Args) -> None:
    """Refuse models and folders that the run can't use, before anything is loaded."""
    track.require_model(args.model, flag="--model")
    for teacher in args.teacher:
        if "://" not in teacher:
            track.require_model(teacher, flag="--teacher")
    if args.weights_folder is not None:
        track.require_shared_folder(args.weights_folder, flag="--weights-folder")


def extras(args: Args) -> list[str]:
    """List the optional dependencies of a run; they are checked before anything is loaded."""
    needed = []
    if args.env:
        needed.append("verifiers")
    if args.engine == "vllm" and not args.engine_urls:
        needed.append("vllm")
    if args.wandb:
        needed.append("wandb")
    return needed


def build_tasks(seed: int) -> list[dict[str, Any]]:
    """Return tasks that ask for the larger of two two-digit numbers, in random order."""
    generator = random.Random(seed)
    pairs = list(itertools.combinations(range(10, 100), 2))
    generator.shuffle(pairs)
    question = "Which is larger, {} or {}? Reply with the number only."
    return [
        {"prompt": question.format(*generator.sample(pair, 2)), "answer": str(max(pair))}
        for pair in pairs
    ]


def reward(task: Any, reply: str) -> float:
    """Return 1/n if the right number is among the n words of the reply, else 0."""
    words = reply.replace(".", " ").split()
    return 1.0 / len(words) if task["answer"] in words else 0.0


def environment_names(args: Args) -> list[str]:
    """Return the environment names for tasks and metrics, where a slash would end the name."""
    return [env.replace("/", ":") for env in args.env] or ["larger"]


def build_environment(args: Args, tokenizer: Any) -> tuple[Any, Any, Any]:
    """Return the problem: a routed environment, its training tasks and its held-out tasks."""
    environments: dict[str, Any] = {}
    train_tasks: dict[str, Any] = {}
    held_out: dict[str, list[Any]] = {}
    if args.env:
        for name, env in zip(environment_names(args), args.env, strict=True):
            environments[name] = rollout.verifiers(env, tokenizer=tokenizer, keep_conversation=True)
            held_out[name], train_tasks[name] = environments[name].tasks.split(args.eval_tasks)
    else:
        tasks = build_tasks(args.seed)
        if args.eval_tasks >= len(tasks):
            raise ValueError(f"--eval-tasks is {args.eval_tasks}; expected less than {len(tasks)}")
        environments["larger"] = rollout.single_turn(tokenizer, reward=reward)
        held_out["larger"] = tasks[: args.eval_tasks]
        train_tasks["larger"] = tasks[args.eval_tasks :]
    eval_tasks = [{**task, "environment": name} for name in held_out for task in held_out[name]]
    return rollout.combine_environments(environments), rollout.Mixture(train_tasks), eval_tasks


def choose_teachers(args: Args) -> dict[str, str]:
    """Return the teacher of each environment, by environment name."""
    names = environment_names(args)
    if len(set(names)) < len(names):
        raise ValueError(f"--env has an environment twice: {' '.join(args.env)}")
    if len(args.teacher) not in (1, len(names)):
        raise ValueError(
            f"--teacher has {len(args.teacher)} teachers for {len(names)} environments; expected "
            "one teacher for all, or one per environment in the order of --env"
        )
    teachers = args.teacher if len(args.teacher) > 1 else args.teacher * len(names)
    return dict(zip(names, teachers, strict=True))


@contextlib.contextmanager
def open_teachers(args: Args, tokenizer: Any, world: parallel.World) -> Iterator[dict[str, Any]]:
    """Open the teachers, by name: models in this process, or clients of servers.

    Only rank 0 has clients; on the other ranks, the teacher of a server is None.
    """
    teachers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(args.teacher):
            if "://" not in name:
                teacher, other = models.load_pretrained(name, dtype=getattr(torch, args.dtype))
                models.refuse_other_tokenizer(tokenizer, other, name=name)
                teachers[name] = teacher.to(world.device).requires_grad_(False)
            elif world.is_first:
                teachers[name] = stack.enter_context(serving.VLLMEngine(name, run="teacher"))
                teachers[name].adopt(0)  # the server's own weights are the teacher
                teachers[name].refuse_other_tokenizer(tokenizer)
            else:
                teachers[name] = None
        yield teachers


@contextlib.contextmanager
def open_engine(args: Args, model: Any) -> Iterator[Any]:
    """Open the sampling engine: a copy of the model in this process, or vLLM servers."""
    if args.engine_urls:
        with serving.VLLMEngine(args.engine_urls) as engine:
            yield engine
    elif args.engine == "vllm":
        settings: dict[str, Any] = {"dtype": args.dtype}
        if torch.cuda.device_count() == 1:
            settings["gpu_memory_utilization"] = 0.4  # the trainer needs the rest
        print("sampling with vLLM; --engine transformers would sample in this process")
        server = serving.serve_vllm(args.model, **(settings | args.vllm))
        with server, serving.VLLMEngine(server) as engine:
            yield engine
    else:
        if importlib.util.find_spec("vllm"):
            print(
                "sampling in this process; --engine vllm would sample with vLLM, and "
                f"`python -m primerl.rollout speed {args.model}` compares their speed"
            )
        dtype = getattr(torch, args.dtype)
        with rollout.TransformersEngine(model, dtype=dtype, seed=args.seed) as engine:
            yield engine


@torch.no_grad()
def score_batch(teacher: Any, batch: packing.PackedBatch, *, top_k: int) -> dict[str, torch.Tensor]:
    """Compute the logprobs of a micro-batch under a teacher in this process."""
    if not top_k:
        logprobs = loss.model_logprobs(
            teacher, batch.token_ids, batch.position_ids, batch.labels, rows=batch.loss_mask
        )
        return {"ref_logprobs": logprobs}
    logprobs, top_ids, top_logprobs = loss.model_top_k_logprobs(
        teacher,
        batch.token_ids,
        batch.position_ids,
        batch.labels,
        k=top_k,
        rows=batch.loss_mask,
    )
    return {
        "ref_logprobs": logprobs,
        "ref_top_ids": top_ids,
        "ref_top_logprobs": top_logprobs,
    }


def score(
    teacher: Any, samples: list[TrainingSample], mesh: parallel.Mesh, device: Any, args: Args
) -> tuple[list[TrainingSample], list[rollout.NoScores]]:
    """Return the samples with the teacher's logprobs, and the reasons why others have none.

    Samples without scores are not trained on. Call this on all ranks, since they compute a teacher
    in this process together. Only rank 0 has samples.
    """
    if isinstance(teacher, torch.nn.Module):
        packed = packing.pack(
            samples,
            max_tokens=args.pack_tokens,
            ranks=mesh.batches,
            cost=packing.document_cost(teacher.config),
            share_prefixes=True,
        )
        batches = parallel.scatter(packed, packing.PackedBatch, mesh, device=device)
        scored = [score_batch(teacher, batch, top_k=args.top_k) for batch in batches]
        scores = packing.unpack(packed, parallel.gather(scored, mesh), samples)
    else:
        scores = rollout.score_samples(teacher, samples, top_k=args.top_k)
    return rollout.with_scores(samples, scores, top_k=args.top_k)


def ask_teachers(
    teachers: dict[str, Any],
    teacher_of: dict[str, str],
    groups: list[Group],
    mesh: parallel.Mesh,
    device: Any,
    args: Args,
) -> tuple[list[Group], list[TrainingSample], Counter[str]]:
    """Score the samples of the groups with the teachers of their environments.

    Returns the groups in the order of their samples, the samples with scores, and the number of
    samples without scores by reason.

    Raises:
        TeacherFailed: too few samples of a teacher have scores. All ranks raise it.
    """
    ordered: list[Group] = []
    samples: list[TrainingSample] = []
    missing: Counter[str] = Counter()
    for name, teacher in teachers.items():
        own = [group for group in groups if teacher_of[group.environment] == name]
        drawn = advantage.assign(own, advantage.of_rewards(np.zeros_like))
        scored, unscored = score(teacher, drawn, mesh, device, args)
        if parallel.all_sum(len(unscored)) > MOST_MISSING * parallel.all_sum(len(drawn)):
            last = unscored[-1].error if unscored else "see rank 0"
            raise TeacherFailed(
                f"the teacher {name} has no scores for {len(unscored)} of {len(drawn)} samples; "
                f"the last error: {last}"
            )
        ordered += own
        samples += scored
        missing.update(one.reason for one in unscored)
    return ordered, samples, missing


def backward(
    model: Any,
    batches: list[packing.PackedBatch],
    *,
    tokens: Any,
    statistics: loss.Statistics,
) -> Any:
    """Accumulate the gradients of a step, and return this rank's part of the loss.

    This is the algorithm. ``tokens`` is the number of trained tokens, over all ranks.
    """
    total = 0.0
    for batch in batches:
        if batch.ref_top_ids is None:  # reverse KL, estimated from the sampled token
            logprobs = loss.model_logprobs(
                model, batch.token_ids, batch.position_ids, batch.labels, rows=batch.loss_mask
            )
            per_token, aux = loss.distill(logprobs, batch.behavior_logprobs, batch.ref_logprobs)
        else:  # forward KL, over the teacher's top tokens
            candidates = torch.cat([batch.labels.unsqueeze(1), batch.ref_top_ids], dim=1)
            scored = loss.model_candidate_logprobs(
                model, batch.token_ids, batch.position_ids, candidates, rows=batch.loss_mask
            )
            logprobs = scored[:, 0].detach()
            per_token, aux = loss.top_k_forward_kl(scored[:, 1:], batch.ref_top_logprobs)
            aux["ref_kl"] = loss.k1(logprobs, batch.ref_logprobs)
        objective = loss.token_mean(per_token, batch.loss_mask, denom=tokens)
        objective.backward()
        statistics.add(
            logprobs,
            batch.behavior_logprobs,
            batch.loss_mask,
            batch.versions,
            loss=objective,
            aux=aux,
        )
        total += objective.detach()
    return total


@track.interruptible()
def main(args: Args) -> None:
    world = parallel.process_group(seed=args.seed)
    sinks = []
    if world.is_first:
        sinks = [
            track.LiveView("distillation", steps=args.steps),
            track.wandb_sink(args.wandb, args),
        ]
    parallel.configure_cpu()
    teacher_of = choose_teachers(args)
    for env in args.env:  # find a wrong name before the model loads
        rollout.verifiers(env, tokenizer=None)
    model, tokenizer = models.load_pretrained(args.model)
    model.to(world.device)
    environment, train_tasks, eval_tasks = build_environment(args, tokenizer)
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=1.0)
    greedy = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    saved = checkpoint.last_good(args.resume if world.is_first else None)

    # All ranks train. Rank 0 also samples and writes the run folder. On the other ranks, the engine
    # is None, and the worker and the run do nothing.
    run = track.IdleRun()
    opened_engine = contextlib.nullcontext()
    if world.is_first:
        opened_engine = open_engine(args, model)
        run = track.Run(
            args.resume or args.run_dir,
            args=args,
            decode=tokenizer.decode,
            sinks=sinks,
            state=saved.get("run"),
            steps=args.steps,
            fixed=FIXED,
        )
    with (
        open_teachers(args, tokenizer, world) as teachers,  # check the teachers before sampling
        opened_engine as engine,
        rollout.worker(
            engine,
            environment,
            train_tasks,
            params=sampling,
            group_size=args.group_size,
            groups_per_step=args.groups_per_step,
            max_staleness=args.max_staleness,
            state=saved.get("worker"),
        ) as rollouts,
        run,
        world,  # connects the ranks
    ):
        mesh = parallel.mesh(ep=args.ep, cp=args.cp)
        dtype = getattr(torch, args.dtype)
        if args.recompute:
            parallel.recompute(model.train())
        parallel.shard(model, mesh, dtype=dtype)
        for teacher in teachers.values():
            if isinstance(teacher, torch.nn.Module):
                parallel.shard(teacher, mesh, dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
        guard = parallel.UpdateGuard(on_nonfinite="skip")
        transport = weights.transport_to(
            model,
            engine,
            worker=rollouts,
            folder=args.weights_folder,
            temperature=sampling.temperature,
        )
        checkpoints = checkpoint.Checkpoints(
            run.folder, model, optimizer, every=args.save_every, last=args.steps
        )
        with checkpoints:
            first_step = checkpoints.load(saved)
            transport.publish(first_step)
            parallel.freeze_gc()  # no garbage collection of the objects built so far

            for step in range(first_step, args.steps):
                if rollouts.evaluation_due(step, every=args.eval_every):
                    rollouts.start_evaluation(eval_tasks, greedy, version=step, keep_errors=True)
                for ended in rollouts.ended_evaluations():
                    run.log_evaluation(ended.version, ended.outcomes())
                groups = rollouts.take(version=step)
                try:
                    groups, samples, missing = ask_teachers(
                        teachers, teacher_of, groups, mesh, world.device, args
                    )
                except TeacherFailed:
                    if step > first_step:
                        checkpoints.save(step, wait=True, worker=rollouts, run=run)
                    raise
                packed = packing.pack(
                    samples,
                    max_tokens=args.pack_tokens,
                    ranks=mesh.batches,
                    cost=packing.document_cost(model.config),
                    share_prefixes=True,  # computes the prompt of a group once
                )
                batches = parallel.scatter(packed, packing.PackedBatch, mesh, device=world.device)
                statistics = loss.Statistics(version=step)
                objective = backward(
                    model,
                    batches,
                    tokens=parallel.all_sum(sum(int(one.loss_mask.sum()) for one in samples)),
                    statistics=statistics,
                )
                norm = parallel.clip_gradients(model.parameters(), 1.0)
                if guard.allows(objective, norm):
                    optimizer.step()
                optimizer.zero_grad()
                rows = parallel.gather(statistics.end_minibatch(), mesh)

                receipt = transport.publish(step + 1)
                metrics = receipt.metrics | statistics.summary(parallel.all_sum)
                metrics["grad_norm"] = norm  # before clipping
                metrics["lr"] = args.lr
                metrics["skipped_updates"] = guard.skipped
                metrics["teacher_missing"] = missing.total()
                metrics |= {f"teacher_missing/{reason}": n for reason, n in missing.items()}
                run.log(
                    step,
                    groups,
                    samples,
                    metrics=metrics,
                    totals=rollouts.stats(),
                    per_token=packing.unpack(packed, rows, samples),  # the trainer's logprobs
                )
                stopping = world.should_stop()
                if stopping or checkpoints.due(step + 1):
                    checkpoints.save(step + 1, wait=stopping, worker=rollouts, run=run)
                if stopping:
                    raise checkpoint.Stopped(step + 1)

        rollouts.start_evaluation(eval_tasks, greedy, version=args.steps, keep_errors=True)
        for ended in rollouts.ended_evaluations(timeout_s=3600):
            run.log_evaluation(ended.version, ended.outcomes())
        models.save_pretrained(model, run.final_folder, tokenizer=tokenizer)
        run.finish()
        if world.is_first:
            print(run.report())


if __name__ == "__main__":
    main(track.command_line(Args, description=__doc__, extras=extras, check=check))
