"""A run: one folder with everything that is worth keeping."""

import itertools
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import numpy as np

from primerl.track.json_files import cut, open_lines, write_json, write_line
from primerl.track.sinks import Sink
from primerl.types import Group, TrainingSample

SUMMARY = ("eval_before", "eval_after", "steps", "wall_s", "staleness_max", "mismatch_kl_mean")
# Totals that become a rate per second, and those that become the step's own share.
RATES = ("rollout_tokens",)
SHARES = ("trainer_wait_s", "rollout_wait_s")
GAUGES = ("loop_lag_p99_s",)


class Run:
    """Records a run in ``folder``; use it as a context manager.

        with track.Run(folder, args=args, decode=tokenizer.decode) as run:
            for step in range(steps):
                ...
                run.log(step, groups=groups, samples=samples, totals=rollouts.stats(),
                        metrics={"loss": loss})
            run.finish(save=save, eval_before=0.4, eval_after=0.8)

    - ``args.json``: what the run was asked to do.
    - ``metrics.jsonl``: a line for each step.
    - ``rollouts.jsonl``: every trained sequence with its text, reward and per-token arrays.
    - ``summary.json``: the outcome, also of a run that failed; null where a figure does not apply.
      What is put into ``summary`` before appears there, too.
    - ``final/``: what ``save`` writes.

    Args:
        folder: is made; must not hold another run, unless ``state`` is given. By
            default the next free ``runs/SCRIPT-NNN``, named for the running script.
        args: an attrs value or a mapping.
        decode: token ids to text.
        sinks: functions ``(step, metrics) -> None``.
        state: what ``Run.state`` returned, to go on from there in the same folder: lines of later
            steps are removed. ``{}`` begins again, in a folder that may hold a run.

    Raises:
        ValueError: the folder holds a run, or less of it than ``state`` says.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        args: Any = None,
        decode: Callable[[list[int]], str] | None = None,
        sinks: Sequence[Sink] = (),
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = _fresh_folder() if folder is None else Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics, rollouts = (self.folder / f"{name}.jsonl" for name in ("metrics", "rollouts"))
        if state is None and metrics.exists():
            raise ValueError(f"{self.folder} holds a run already; choose another folder")
        known = state or {}
        self.staleness: Counter[int] = Counter(dict(known.get("staleness", ())))
        """Trained tokens by staleness, over the run."""
        self.summary: dict[str, Any] = dict.fromkeys(SUMMARY) | known.get("summary", {})
        self._decode = decode
        self._sinks = tuple(sinks)
        self._steps: int = known.get("steps", 0)
        for path in (metrics, rollouts):
            cut(path, self._steps)
        self._metrics_file, self._rollouts_file = open_lines(metrics), open_lines(rollouts)
        self._earlier_s: float = known.get("wall_s", 0.0)
        self._began = self._step_began = time.perf_counter()
        self._totals: dict[str, float] = dict(known.get("totals", {}))
        self._mismatch: list[float] = list(known.get("mismatch", (0.0, 0)))
        values = attrs.asdict(args) if attrs.has(type(args)) else dict(args or {})
        write_json(self.folder / "args.json", values)

    def __enter__(self) -> "Run":
        self._began = self._step_began = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.summary["wall_s"] = self._wall_s
        if error is not None:
            self.summary["error"] = f"{type(error).__name__}: {error}"
        write_json(self.folder / "summary.json", self.summary)
        self._metrics_file.close()
        self._rollouts_file.close()
        for sink in self._sinks:
            close = getattr(sink, "close", None)
            if close is not None:
                close()

    @property
    def _wall_s(self) -> float:
        return self._earlier_s + time.perf_counter() - self._began

    def state(self) -> dict[str, Any]:
        """What another run needs to go on from here: ``Run(folder, state=)``; in JSON's types."""
        return {
            "steps": self._steps,
            "summary": dict(self.summary),
            "staleness": [[stale, count] for stale, count in sorted(self.staleness.items())],
            "mismatch": list(self._mismatch),
            "totals": dict(self._totals),
            "wall_s": self._wall_s,
        }

    def log(
        self,
        step: int,
        *,
        groups: Sequence[Group],
        samples: Sequence[TrainingSample],
        totals: Mapping[str, Any] | None = None,
        mismatch: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Record one policy step, and return its metrics.

        Args:
            step: the version of the weights that the batch was applied to.
            groups: that were trained.
            samples: what ``advantage.assign`` made of them.
            totals: running totals, as ``Worker.stats`` gives them; their growth since the last
                step is recorded, that of groups dropped as ``dropped/REASON``.
            mismatch: the sum and count that ``loss.mismatch_kl`` returned, added over the step.
            metrics: further numbers, under their own names.
        """
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        line = {"step": step, **_batch_metrics(step, groups, samples)}
        growth = self._growth(totals or {})
        line["step_s"] = seconds
        line["train_tokens_per_s"] = line["tokens"] / max(
            seconds - growth.get("trainer_wait_s", 0.0), 1e-9
        )
        line |= {f"{name}_per_s": growth[name] / seconds for name in RATES if name in growth}
        line |= {name: growth[name] for name in SHARES if name in growth}
        line |= {name: count for name, count in growth.items() if name.startswith("dropped/")}
        line |= {name: totals[name] for name in GAUGES if totals and name in totals}
        line["mismatch_kl"] = self._add_mismatch(mismatch)
        line |= {name: _plain(value) for name, value in (metrics or {}).items()}
        for sample in samples:
            stale = step - sample.versions[sample.loss_mask]
            self.staleness.update(stale.tolist())
        self._write_rollouts(step, groups, samples)
        write_line(self._metrics_file, line)
        self.summary["steps"] = self._steps = step + 1
        self.summary["staleness_max"] = max(self.staleness, default=None)
        for sink in self._sinks:
            sink(step, line)
        return line

    def finish(self, *, save: Callable[[Path], None] | None = None, **summary: Any) -> None:
        """Record the outcome, and write ``final/`` by calling ``save`` with its path."""
        self.summary |= {name: _plain(value) for name, value in summary.items()}
        if save is not None:
            save(self.folder / "final")

    def report(self) -> str:
        """The outcome in a few lines: evaluation, staleness, mismatch, folder."""
        rows = [("evaluation", _arrow(self.summary["eval_before"], self.summary["eval_after"]))]
        tokens = sum(self.staleness.values())
        for stale, count in sorted(self.staleness.items()):
            rows.append((f"staleness {stale}", f"{count / tokens:7.2%} of {tokens:,} tokens"))
        mismatch = self.summary["mismatch_kl_mean"]
        rows.append(("mismatch_kl", "-" if mismatch is None else f"{mismatch:.1e}"))
        rows.append(("run folder", str(self.folder)))
        return "\n".join(f"{name:<12}  {value}" for name, value in rows)

    def _growth(self, totals: Mapping[str, Any]) -> dict[str, float]:
        counted = {name: totals[name] for name in (*RATES, *SHARES) if name in totals}
        reasons = totals.get("dropped_by", {})
        counted |= {f"dropped/{reason}": count for reason, count in reasons.items()}
        grown = {name: count - self._totals.get(name, 0) for name, count in counted.items()}
        self._totals = counted
        return grown

    def _add_mismatch(self, mismatch: Any) -> float | None:
        total, count = (0.0, 0.0) if mismatch is None else (float(x) for x in mismatch)
        if not math.isfinite(total):
            return None  # of a step that was skipped
        self._mismatch = [self._mismatch[0] + total, self._mismatch[1] + count]
        if self._mismatch[1]:
            self.summary["mismatch_kl_mean"] = self._mismatch[0] / self._mismatch[1]
        return total / count if count else None

    def _write_rollouts(
        self, step: int, groups: Sequence[Group], samples: Sequence[TrainingSample]
    ) -> None:
        trained = iter(samples)
        for group in groups:
            for rollout in group.rollouts:
                for sample in rollout.samples:
                    if not sample.loss_mask.any():
                        continue
                    one = next(trained)
                    record = {
                        "step": step,
                        "task_id": group.task_id,
                        "environment": group.environment,
                        "reward": rollout.reward,
                        "stop": rollout.stop,
                        "metrics": {name: _plain(x) for name, x in rollout.metrics.items()},
                        "text": self._decode(one.token_ids.tolist()) if self._decode else None,
                        "temperature": one.temperature,
                        "token_ids": one.token_ids.tolist(),
                        "loss_mask": one.loss_mask.astype(int).tolist(),
                        "behavior_logprobs": one.behavior_logprobs.tolist(),
                        "versions": one.versions.tolist(),
                        "advantages": one.advantages.tolist(),
                    }
                    write_line(self._rollouts_file, record)


def _batch_metrics(
    step: int, groups: Sequence[Group], samples: Sequence[TrainingSample]
) -> dict[str, Any]:
    rewards = np.concatenate([group.rewards for group in groups]) if groups else np.zeros(0)
    stale = [step - sample.versions[sample.loss_mask] for sample in samples]
    staleness = np.concatenate(stale) if stale else np.zeros(0, np.int64)
    named = {group.environment for group in groups} - {""}
    return {
        "reward": float(rewards.mean()) if len(rewards) else None,
        **{f"reward/{name}": _mean_reward(groups, name) for name in sorted(named)},
        "tokens": sum(len(sample.token_ids) for sample in samples),
        "trained_tokens": len(staleness),
        "staleness_max": int(staleness.max()) if len(staleness) else None,
        "staleness_mean": float(staleness.mean()) if len(staleness) else None,
    }


def _mean_reward(groups: Sequence[Group], environment: str) -> float:
    mine = [group.rewards for group in groups if group.environment == environment]
    return float(np.concatenate(mine).mean())


def _arrow(before: float | None, after: float | None) -> str:
    return " -> ".join("-" if score is None else f"{score:.4f}" for score in (before, after))


def _fresh_folder() -> Path:
    parent, name = Path("runs"), Path(sys.argv[0]).stem or "run"
    parent.mkdir(exist_ok=True)
    for number in itertools.count(1):
        folder = parent / f"{name}-{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def _plain(value: Any) -> Any:
    """A tensor or numpy number as Python's own; a number that JSON lacks as null."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
