"""Records of the rollouts that a run trains."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from primerl.track.conversation_records import recorded_conversation
from primerl.track.run_folder import RunFolder, plain, write_line
from primerl.types import Group, Rollout, Sample, TrainingSample

Decode = Callable[[list[int]], str]


class RolloutRecords:
    """Writes one line per trained sequence, and one line per distinct token of all sequences.

    The first line of a rollout has its conversation, if the environment kept it.

    Args:
        files: the files of the run.
        decode: converts token ids to text; without it, no text is recorded.
        share: the share of groups that are recorded, evenly over the run; 0 records none.

    Raises:
        ValueError: ``share`` is not between 0 and 1.
    """

    def __init__(self, files: RunFolder, *, decode: Decode | None, share: float) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"record_rollouts is {share}; expected a share from 0 to 1")
        self._files = files
        self._decode = decode
        self._share = share
        self._due = 0.0
        self._tokens: set[int] = set()

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        samples: Sequence[TrainingSample],
        per_token: Sequence[Mapping[str, np.ndarray]] = (),
    ) -> None:
        """Record the groups of a step with the samples that ``advantage.assign`` returned for them.

        ``per_token`` has further arrays for each sample, or is empty; later passes are left out.
        """
        arrays_of = per_token or [{} for _ in samples]
        trained = zip(samples, arrays_of, strict=False)
        for group in groups:
            before, self._due = int(self._due), self._due + self._share
            recorded = int(self._due + 1e-9) > before
            for number, rollout in enumerate(group.rollouts):
                conversation = _conversation(rollout) if recorded else {}
                for index, sample in enumerate(rollout.samples):
                    if not sample.loss_mask.any():
                        continue
                    one, arrays = next(trained)
                    if recorded:
                        place = {"rollout": number, "sample": index}
                        self._write(step, group, rollout, place | conversation, one, arrays)
                        conversation = {}  # in the rollout's first line only

    def reply(self, groups: Sequence[Group]) -> tuple[str, str, float] | None:
        """Return prompt, completion and reward of one trained rollout; None if there is none."""
        if self._decode is None:
            return None
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            for sample in rollout.samples:
                if sample.loss_mask.any():
                    return *self._texts(self._decode, sample), rollout.reward
        return None

    def _texts(self, decode: Decode, sample: Sample | TrainingSample) -> tuple[str, str]:
        ids: list[int] = sample.token_ids.tolist()
        begin = int(sample.loss_mask.argmax())
        return decode(ids[:begin]), decode(ids[begin:])

    def _write(
        self,
        step: int,
        group: Group,
        rollout: Rollout,
        parts: Mapping[str, Any],
        one: TrainingSample,
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        ids: list[int] = one.token_ids.tolist()
        texts = (None, None) if self._decode is None else self._texts(self._decode, one)
        record: dict[str, Any] = {
            "step": step,
            "task_id": group.task_id,
            "environment": group.environment,
            **parts,
            "reward": rollout.reward,
            "stop": rollout.stop,
            "metrics": {name: plain(value) for name, value in rollout.metrics.items()},
            "prompt": texts[0],
            "completion": texts[1],
            "temperature": one.temperature,
            "token_ids": ids,
            "loss_mask": one.loss_mask.astype(int).tolist(),
            "behavior_logprobs": one.behavior_logprobs.tolist(),
            "versions": one.versions.tolist(),
            "advantages": one.advantages.tolist(),
        }
        record |= {name: rounded(array) for name, array in arrays.items()}
        write_line(self._files.rollouts, record)
        if self._decode is not None:
            for token in sorted(set(ids) - self._tokens):
                write_line(self._files.tokens, [token, text_of(token, self._decode)])
            self._tokens.update(ids)


def _conversation(rollout: Rollout) -> dict[str, Any]:
    if rollout.conversation is None:
        return {}
    recorded = recorded_conversation(
        rollout.conversation, agent=rollout.agent, samples=len(rollout.samples)
    )
    return {"conversation": recorded}


def require_fit(
    samples: Sequence[TrainingSample], per_token: Sequence[Mapping[str, np.ndarray]]
) -> None:
    """Check that ``per_token`` has arrays for each sample, in one or more passes.

    Raises:
        ValueError: the number of samples or a shape differs.
    """
    if per_token and (not samples or len(per_token) % len(samples)):
        raise ValueError(f"per_token is for {len(per_token)} samples; expected {len(samples)}")
    for sample, arrays in zip(itertools.cycle(samples), per_token, strict=False):
        for name, array in arrays.items():
            if np.shape(array) != sample.token_ids.shape:
                raise ValueError(
                    f"per_token has {name} of shape {np.shape(array)} for a sample of shape "
                    f"{sample.token_ids.shape}; expected an entry for each token"
                )


def rounded(array: np.ndarray) -> list[float | None]:
    """Round the numbers to 6 digits; replace NaN and infinity by None, as JSON has neither."""
    numbers = np.round(np.asarray(array, np.float64), 6).tolist()
    return [number if math.isfinite(number) else None for number in numbers]


def text_of(token: int, decode: Decode) -> str:
    """Return a token's text, with the leading space that many tokenizers drop at the beginning."""
    alone = decode([token])
    twice = decode([token, token])
    return twice[len(alone) :] if twice.startswith(alone) else alone
