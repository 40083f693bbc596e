"""The record of a run: one folder with its arguments, metrics, rollouts, outcome and report."""

import math
import operator
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import attrs
import numpy as np

from primerl._common.engine_usage import EngineUsage
from primerl.track.mismatch_gate import MismatchGate
from primerl.track.record_ends import record_ends
from primerl.track.record_writer import RecordWriter
from primerl.track.report import write_report
from primerl.track.rollout_records import RolloutRecords, require_fit
from primerl.track.run_folder import (
    FINAL,
    SUMMARY,
    RunFolder,
    fresh_folder,
    json_line,
    plain,
    require_arguments,
    write_json,
)
from primerl.track.sinks import Sink
from primerl.types import Group, Outcome, Rollout, TrainingSample

# Averaged over a run's tokens; the second without router replay, if replay is used.
MISMATCHES = ("mismatch_kl", "mismatch_kl_own_routes")
OUTCOME = ("eval_before", "eval_after", "steps", "wall_s", "staleness_max", "mismatch_kl_mean")
# RATES are totals recorded as a rate per second; SHARES, as their growth in the step.
RATES = ("rollout_tokens",)
SHARES = ("trainer_wait_s", "rollout_wait_s", "evaluation_wait_s")
GAUGES = ("loop_lag_p99_s",)
ENGINE = "engine/"  # begins the names of the engines' totals
CUT_SHORT = ("length", "context")  # stop reasons of rollouts that ran out of tokens or context


class Run:
    """Records a run in ``folder``; use it as a context manager.

        with track.Run(folder, args=args, decode=tokenizer.decode) as run:
            for step in range(steps):
                ...
                run.log(step, groups, samples, totals=rollouts.stats(), metrics={"loss": loss})
            run.finish()

    - ``args.json``: the arguments.
    - ``metrics.jsonl``: one line per step, with the ``alarm`` of ``gate``, if it has one.
    - ``evaluations.jsonl``: one line per evaluation.
    - ``rollouts.jsonl``: one line per trained sequence with its text and reward, and the
      conversation of its rollout, if it has one; ``rollouts.bin``: its per-token arrays
      (``read_rollouts`` reads both); ``tokens.jsonl``: the text of each token.
    - ``summary.json``: the outcome; null where a metric does not apply. A run that failed or was
      killed also has one: it has an ``error`` and is not ``finished``. Entries that are put into
      the attribute ``summary`` during the run appear there, too.
    - ``report.html``: curves and rollouts, for a browser. ``python -m primerl.track FOLDER`` writes
      it for a run that is still running or was killed.
    - ``final/``: the trained model; see ``final_folder``.

    Creating a ``Run`` only checks; entering it claims the folder for this process. With ``state``,
    a run is resumed: nothing in its folder changes before the first ``log``, so that a checkpoint
    can be loaded in between, on all ranks. Then records that the state doesn't cover (lines of
    later steps, and the earlier ``args.json`` and ``summary.json``) move to
    ``before-resume-NNN/``.

    Metrics and rollouts are written beside training. If the disk is full or slow, training
    continues: ``alarm`` in a step's metrics names the file, ``records_lost`` counts the rollouts
    that are not recorded, and metrics are written when there is space again.

    Args:
        folder: the run's folder, which is created. It must not hold another run, unless ``state``
            is given. By default the next free ``runs/NAME-NNN``.
        args: the arguments, an attrs value or a mapping.
        decode: converts token ids to text.
        record_rollouts: the share of groups whose rollouts are recorded; 0 for none.
        record_tokens: the most tokens of a step that are recorded; of a larger step, whole groups
            are left out at even intervals.
        sinks: functions ``(step, metrics) -> None``. If ``decode`` is given, a sink with a method
            ``show_reply(prompt, completion, reward)`` gets one reply of each step before its
            metrics.
        gate: watches ``mismatch_kl``.
        state: what ``Run.state`` returned, to resume that run in its folder.
        steps: the number of planned steps, which tells whether a resumed run is finished.
        fixed: names of the ``args`` that a resumed run must keep.
        name: the script's name, by default that of the running script. Only the script that began
            a run can resume it.

    Raises:
        ValueError: the folder holds a run; or, with ``state``, it is not that run's folder, or the
            run is finished or was started with other arguments. On entering: another process writes
            there.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        args: Any = None,
        decode: Callable[[list[int]], str] | None = None,
        record_rollouts: float = 1.0,
        record_tokens: int = 1 << 22,
        sinks: Sequence[Sink] = (),
        gate: MismatchGate | None = None,
        state: Mapping[str, Any] | None = None,
        steps: int | None = None,
        fixed: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        self._name = name or Path(sys.argv[0]).stem or "run"
        self._args = attrs.asdict(args) if attrs.has(type(args)) else dict(args or {})
        self._named = folder is not None and state is None
        self.folder = fresh_folder(Path("runs") / self._name) if folder is None else Path(folder)
        if state is not None:
            self._require_same_script(state)
        ends = None if state is None else record_ends(self.folder, state)
        self._files = RunFolder(self.folder, ends=ends)
        if state is not None:
            require_arguments(self.folder, self._args, fixed)
            if steps is not None:
                self._files.require_steps_left(state["steps"], steps)
        known = state or {}
        self.staleness: Counter[int] = Counter(dict(known.get("staleness", ())))
        """Number of trained tokens by staleness, over the run."""
        self.summary: dict[str, Any] = dict.fromkeys(OUTCOME) | known.get("summary", {})
        self.summary["finished"] = False
        self._rollouts = RolloutRecords(
            self._files, decode=decode, share=record_rollouts, tokens=record_tokens
        )
        self._writer = RecordWriter(self._files, self._rollouts)
        self._lost = 0
        self._sinks = tuple(sinks)
        self._steps: int = known.get("steps", 0)
        self._writes = state is None
        self._earlier_s: float = known.get("wall_s", 0.0)
        self._began = self._step_began = time.perf_counter()
        self._totals: dict[str, float] = dict(known.get("totals", {}))
        self._mismatch: dict[str, list[float]] = dict(known.get("mismatch", {}))
        self._gate = MismatchGate(**known["gate"]) if "gate" in known else gate or MismatchGate()
        self._stops: set[str] = set(known.get("stops", ()))
        self._supervised = False

    @property
    def final_folder(self) -> Path | None:
        """The folder for the trained model; None on ranks other than 0."""
        return self.folder / FINAL

    def _require_same_script(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state.get("steps"), int):
            raise ValueError("state has no steps; expected the value that Run.state returned")
        if state.get("name") != self._name:
            raise ValueError(
                f"{self.folder} is a run of the script {state.get('name')}, but this script is "
                f"{self._name}; resume the run with the script that started it"
            )

    def __enter__(self) -> "Run":
        self._files.claim(self._args)
        if self._writes:
            write_json(self.folder / SUMMARY, self._unended())
        self._began = self._step_began = time.perf_counter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.summary["wall_s"] = self._wall_s
        if error is not None:
            self.summary["error"] = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt) and not hasattr(error, "__notes__") and self._named:
            error.add_note(f"to start again, pass another folder than {self.folder}")
        problem = self._writer.close()
        if self._writes:
            self._write_outcome()
        self._files.close()
        for sink in self._sinks:
            close = getattr(sink, "close", None)
            if close is None:
                continue
            try:
                close()
            except Exception as failure:  # a user's code; the others are still closed
                sys.stderr.write(f"a sink could not be closed: {failure!r}\n")
                problem = problem or failure
        if problem is not None and error is None:
            raise problem

    def _count_lost(self) -> int:
        """Return how many rollouts were newly dropped from the records, and add them to the sum."""
        lost, self._lost = self._writer.lost - self._lost, self._writer.lost
        if lost:
            self.summary["records_lost"] = self.summary.get("records_lost", 0) + lost
        return lost

    def _write_outcome(self) -> None:
        self._count_lost()
        try:
            write_json(self.folder / SUMMARY, plain(self.summary))
            write_report([self.folder])
        except Exception as problem:  # raising would hide the run's error
            reason = problem if isinstance(problem, OSError | ValueError) else repr(problem)
            sys.stderr.write(f"{self.folder} has no report: {reason}\n")

    def _begin_writing(self) -> None:
        if not self._writes:
            unended = self._unended()

            def resume() -> None:
                self._files.resume(self._args)
                write_json(self.folder / SUMMARY, unended)

            self._writer.begin_with(resume)
            self._writes = True

    def _unended(self) -> dict[str, Any]:
        """Return the summary that remains if this process is killed."""
        error = "the run has not ended, or its process was killed"
        return {**plain(self.summary), "error": error}

    @property
    def _wall_s(self) -> float:
        return self._earlier_s + time.perf_counter() - self._began

    def state(self) -> dict[str, Any]:
        """Return the state from which ``Run(folder, state=)`` resumes, in JSON's types.

        The records are synced to disk first, so that after a power failure no checkpoint with this
        state is ahead of its records. If that takes longer than a minute, such as on a disk that
        does not answer, the state knows only of the records that are written.
        """
        return {
            "ends": self._writer.drain(),
            "name": self._name,
            "steps": self._steps,
            "summary": plain(self.summary),
            "staleness": [[stale, count] for stale, count in sorted(self.staleness.items())],
            "mismatch": {name: list(sums) for name, sums in self._mismatch.items()},
            "gate": self._gate.state(),
            "totals": dict(self._totals),
            "stops": sorted(self._stops),
            "wall_s": self._wall_s,
        }

    def log(
        self,
        step: int,
        groups: Sequence[Group] | None = None,
        samples: Sequence[TrainingSample] = (),
        *,
        metrics: Mapping[str, Any] | None = None,
        totals: Mapping[str, Any] | None = None,
        per_token: Sequence[Mapping[str, np.ndarray]] = (),
    ) -> dict[str, Any]:
        """Record one policy step, and return its metrics.

        Args:
            step: the version of the weights that the batch was applied to.
            groups: the trained groups; None in supervised training, which has no groups.
            samples: the training samples that ``advantage.assign`` returned for the groups.
            metrics: further numbers, recorded under their own names; NaN and infinity, which JSON
                lacks, become null. ``mismatch_kl`` is watched for
                an alarm, and averaged over the run, weighted by ``mismatch_tokens``
                (``loss.Statistics``). ``mismatch_kl_own_routes``, its value without router replay,
                is averaged, too. Without groups, throughput is computed from ``tokens``.
            totals: running totals, as ``Worker.stats`` returns them. Their growth since the last
                step is recorded; that of dropped groups as ``dropped/REASON``.
            per_token: further arrays ``[t]`` by name for each sample, recorded with it; if there
                are several passes over the samples, those of the first pass. The report shows
                ``logprobs`` (the trainer's) and ``entropy``.

        Raises:
            ValueError: ``per_token`` does not fit the samples. Nothing is recorded.
        """
        step = operator.index(step)  # a numpy integer is not JSON
        require_fit(samples, per_token)
        self._begin_writing()
        now = time.perf_counter()
        stale = [step - sample.versions[sample.loss_mask] for sample in samples]
        staleness = np.concatenate([np.zeros(0, np.int64), *stale])
        line: dict[str, Any] = {"step": step, "time": time.time()}
        self._supervised = groups is None
        groups = groups or ()
        if not self._supervised:
            line |= _batch_metrics(groups, samples, staleness)
            line |= self._rollout_metrics(groups)
        numbers = plain(metrics or {})
        growth = self._growth(totals or {})
        evaluation_s = growth.pop("evaluation_wait_s", 0.0)
        elapsed, self._step_began = now - self._step_began, now
        line["step_s"] = step_s = max(0.0, elapsed - evaluation_s)
        if evaluation_s:
            line["evaluation_s"] = evaluation_s
        tokens = line.get("tokens", numbers.get("tokens"))
        if tokens is not None:
            busy_s = max(step_s - growth.get("trainer_wait_s", 0.0), 1e-9)
            line["train_tokens_per_s"] = tokens / busy_s
        line |= {f"{name}_per_s": growth[name] / elapsed for name in RATES if name in growth}
        line |= {name: growth[name] for name in SHARES if name in growth}
        line |= {name: count for name, count in growth.items() if name.startswith("dropped/")}
        line |= {name: totals[name] for name in GAUGES if totals and name in totals}
        line |= _engine_metrics(growth)
        line |= {"mismatch_kl": None} | numbers
        if lost := self._count_lost():
            line["records_lost"] = lost
        alarms = (self._watch_mismatch(metrics or {}), self._writer.alarm)
        line["alarm"] = "; ".join(alarm for alarm in alarms if alarm) or None
        values, counts = np.unique(staleness, return_counts=True)
        self.staleness.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        chosen = self._rollouts.chosen(step, groups, samples, per_token)
        self._writer.write(json_line(line), chosen)
        self.summary["steps"] = self._steps = step + 1
        self.summary["staleness_max"] = max(self.staleness, default=None)
        for sink in self._sinks:
            show_reply = getattr(sink, "show_reply", None)
            if show_reply is not None and (reply := self._rollouts.reply(groups)) is not None:
                show_reply(*reply)
            sink(step, line)
        return line

    def log_evaluation(self, step: int, rollouts: Sequence[Rollout | Outcome]) -> None:
        """Record the mean reward of evaluation rollouts; without rollouts, record nothing.

        It is a line of ``evaluations.jsonl``, and sinks get it, at its own step: also if later
        steps were logged before. The summary has the mean of the lowest step as ``eval_before``,
        and that of the highest as ``eval_after``; ``eval_steps`` has both steps.

        Args:
            step: the version of the weights that sampled, the first one if there were several.
            rollouts: what ``Worker.evaluate`` or ``Evaluation.outcomes`` returned. A rollout that
                failed counts as a reward of 0.

        Raises:
            TypeError: ``step`` is not an integer, such as the ``version`` of an ``Evaluation`` that
                was started without one.
        """
        if not rollouts:
            return
        step = operator.index(step)
        self._begin_writing()
        line = {"step": step, "time": time.time()} | _evaluation_metrics(rollouts)
        self._writer.write_evaluation(json_line(line))
        means = [self.summary["eval_before"], self.summary["eval_after"]]
        known = dict(zip(self.summary.get("eval_steps", []), means, strict=False))
        known[step] = line["evaluation"]
        first, last = min(known), max(known)
        self.summary["eval_before"] = known[first]
        self.summary["eval_after"] = known[last] if last > first else None
        self.summary["eval_steps"] = sorted({first, last})
        for sink in self._sinks:
            sink(step, line)

    def finish(self, **summary: Any) -> None:
        """Record that all steps were taken, together with further entries of the summary."""
        self._begin_writing()
        self.summary |= plain(summary)
        self.summary["finished"] = True

    def report(self) -> str:
        """Return the outcome in a few lines: evaluation, staleness, mismatch, folder."""
        rows = []
        if not self._supervised or self.summary["eval_before"] is not None:
            outcome = _arrow(self.summary["eval_before"], self.summary["eval_after"])
            rows.append(("evaluation", outcome))
        if not self._supervised:
            tokens = sum(self.staleness.values())
            for stale, count in sorted(self.staleness.items()):
                rows.append((f"staleness {stale}", f"{count / tokens:7.2%} of {tokens:,} tokens"))
            mismatch = self.summary["mismatch_kl_mean"]
            rows.append(("mismatch_kl", "-" if mismatch is None else f"{mismatch:.1e}"))
            if "mismatch_kl_own_routes_mean" in self.summary:
                own = self.summary["mismatch_kl_own_routes_mean"]
                rows.append(("without replay", f"{own:.1e}"))
        rows.append(("run folder", str(self.folder)))
        width = max(12, *(len(name) for name, _ in rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _rollout_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the share of rollouts for each stop reason, and the mean of each rollout metric.

        Once a reason has occurred in a step, every later step has its share, which may be 0.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return {}
        stops = Counter(one.stop for one in rollouts)
        self._stops.update(stops)
        values: dict[str, list[float]] = defaultdict(list)
        for rollout in rollouts:
            for name, value in rollout.metrics.items():
                if math.isfinite(value):
                    values[name].append(value)
        return {
            **{f"stop/{reason}": stops[reason] / len(rollouts) for reason in sorted(self._stops)},
            **{f"rollout/{name}": _mean(values[name]) for name in sorted(values)},
        }

    def _growth(self, totals: Mapping[str, Any]) -> dict[str, float]:
        counted = {name: totals[name] for name in (*RATES, *SHARES) if name in totals}
        reasons = totals.get("dropped_by", {})
        counted |= {f"dropped/{reason}": count for reason, count in reasons.items()}
        counted |= {f"{ENGINE}{name}": value for name, value in totals.get("engine", {}).items()}
        grown = {name: count - self._totals.get(name, 0) for name, count in counted.items()}
        self._totals = counted
        return grown

    def _watch_mismatch(self, metrics: Mapping[str, Any]) -> str | None:
        """Add a step to the run's means; return the alarm, if there is one."""
        self._gate = self._gate.after(metrics.get("mismatch_kl"))
        tokens = metrics.get("mismatch_tokens", 0)
        for name in MISMATCHES:
            mismatch_kl = metrics.get(name)
            if mismatch_kl is not None and math.isfinite(mismatch_kl) and tokens:
                total, count = self._mismatch.get(name, (0.0, 0))
                self._mismatch[name] = [total + mismatch_kl * tokens, count + tokens]
                self.summary[f"{name}_mean"] = self._mismatch[name][0] / self._mismatch[name][1]
        return self._gate.alarm


class IdleRun:
    """The run on ranks other than 0: does nothing, so a training loop need not test its rank."""

    folder = None
    final_folder = None

    def __enter__(self) -> "IdleRun":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def state(self) -> None:
        """Return None; only rank 0 saves a state."""

    def log(self, step: int, groups: object = None, samples: object = (), **more: object) -> None:
        """Record nothing."""

    def log_evaluation(self, step: int, rollouts: object) -> None:
        """Record nothing."""

    def finish(self, **summary: object) -> None:
        """Record nothing."""

    def report(self) -> str:
        """Return no text."""
        return ""


def _batch_metrics(
    groups: Sequence[Group], samples: Sequence[TrainingSample], staleness: np.ndarray
) -> dict[str, Any]:
    by_name: dict[str, list[Group]] = {}
    for group in groups:
        by_name.setdefault(group.environment, []).append(group)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [sum(int(sample.loss_mask.sum()) for sample in one.samples) for one in rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    return {
        "reward": _mean_reward(groups),
        "reward_std": pstdev(rewards) if rewards else None,
        **{f"reward/{name}": _mean_reward(by_name[name]) for name in sorted(by_name) if name},
        "completion_tokens_mean": fmean(lengths) if lengths else None,
        "completion_tokens_max": max(lengths, default=None),
        "truncated": fmean(one.stop in CUT_SHORT for one in rollouts) if rollouts else None,
        "tokens": sum(len(sample.token_ids) for sample in samples),
        "trained_tokens": len(staleness),
        "staleness_max": int(staleness.max()) if len(staleness) else None,
        "staleness_mean": float(staleness.mean()) if len(staleness) else None,
    }


def _engine_metrics(growth: Mapping[str, float]) -> dict[str, float]:
    """Return the rates of the engines in the step; none if they were not read meanwhile."""
    counted = {
        name.removeprefix(ENGINE): value
        for name, value in growth.items()
        if name.startswith(ENGINE)
    }
    rates = EngineUsage(**counted).rates()
    return {f"engine_{name}": value for name, value in rates.items()}


def _evaluation_metrics(rollouts: Sequence[Rollout | Outcome]) -> dict[str, Any]:
    played = [one.rollout if isinstance(one, Outcome) else one for one in rollouts]
    versions = [
        sample.versions[sample.loss_mask]
        for rollout in played
        if rollout is not None
        for sample in rollout.samples
    ]
    bounds = [int(bound) for one in versions if len(one) for bound in (one.min(), one.max())]
    return {
        "evaluation": fmean(0.0 if one is None else one.reward for one in played),
        "evaluation_rollouts": len(played),
        "evaluation_failed": sum(one is None for one in played),
        "evaluation_first_version": min(bounds, default=None),
        "evaluation_last_version": max(bounds, default=None),
    }


def _mean(values: Sequence[float]) -> float:
    try:
        return fmean(values)
    except OverflowError:  # the sum is too large, but the mean is not
        return math.fsum(value / len(values) for value in values)


def _mean_reward(groups: Sequence[Group]) -> float | None:
    rewards = np.concatenate([np.zeros(0), *(group.rewards for group in groups)])
    return float(rewards.mean()) if len(rewards) else None


def _arrow(before: float | None, after: float | None) -> str:
    return " -> ".join("-" if score is None else f"{score:.4f}" for score in (before, after))
