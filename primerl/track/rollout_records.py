"""Records of the rollouts that a run trains."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from primerl.track.conversation_records import recorded_conversation
from primerl.track.group_index import entry
from primerl.track.run_folder import RunFolder, json_line, plain
from primerl.track.token_arrays import packed, types_of
from primerl.types import Group, Rollout, Sample, TrainingSample

Decode = Callable[[list[int]], str]

RECORDED = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "advantages")
"""The arrays of every trained sequence."""

MAX_TEXT_TOKENS = 4096
"""Most tokens of a prompt or completion whose text is recorded; the middle of more is left out."""


@attrs.frozen(eq=False)
class _TrainedSequence:
    """A trained sequence, and its place in its group."""

    rollout: int
    index: int
    sample: TrainingSample
    per_token: Mapping[str, np.ndarray]


@attrs.frozen(eq=False)
class RecordedGroup:
    """A group that is to be recorded, with its trained sequences."""

    step: int
    group: Group
    sequences: Sequence[_TrainedSequence]

    @property
    def tokens(self) -> int:
        """The number of tokens of its sequences."""
        return sum(len(one.sample.token_ids) for one in self.sequences)

    @property
    def rollouts(self) -> int:
        """The number of its rollouts that have a trained sequence."""
        return len({one.rollout for one in self.sequences})


class RolloutRecords:
    """Chooses the groups to record, and writes one line and one block of arrays per sequence.

    The first line of a rollout has its conversation, if the environment kept it. The text of each
    distinct token of all sequences is written once.

    Args:
        files: the files of the run.
        decode: converts token ids to text; without it, no text is recorded.
        share: the share of groups that are recorded, evenly over the run; 0 records none.
        tokens: the most tokens of a step that are recorded; of a larger step, groups are chosen
            evenly.

    Raises:
        ValueError: ``share`` is not between 0 and 1, or ``tokens`` is negative.
    """

    def __init__(
        self, files: RunFolder, *, decode: Decode | None, share: float, tokens: int
    ) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"record_rollouts is {share}; expected a share from 0 to 1")
        if tokens < 0:
            raise ValueError(f"record_tokens is {tokens}; expected the most tokens of a step")
        self._files = files
        self._decode = decode
        self._share = share
        self._tokens = tokens
        self._due = 0.0
        self._known: set[int] = set()

    def chosen(
        self,
        step: int,
        groups: Sequence[Group],
        samples: Sequence[TrainingSample],
        per_token: Sequence[Mapping[str, np.ndarray]] = (),
    ) -> list[RecordedGroup]:
        """Choose groups of a step to record; ``samples`` is what ``advantage.assign`` returned.

        ``per_token`` has further arrays for each sample, or is empty; later passes are left out.
        """
        tokens = sum(len(sample.token_ids) for sample in samples)
        share = self._share * min(1.0, self._tokens / max(1, tokens))
        arrays_of: Iterable[Mapping[str, np.ndarray]] = per_token or itertools.repeat({})
        trained = zip(samples, arrays_of, strict=False)
        found = []
        for group in groups:
            places = list(_trained_places(group))
            ours = list(itertools.islice(trained, len(places)))
            self._due += share
            if self._due < 1 - 1e-9:  # shares such as 0.1 do not add up exactly
                continue
            self._due -= 1
            sequences = [
                _TrainedSequence(
                    *place, sample, {name: np.array(x, "<f4") for name, x in more.items()}
                )
                for place, (sample, more) in zip(places, ours, strict=True)
            ]
            found.append(RecordedGroup(step, group, sequences))
        return found

    def write(self, recorded: RecordedGroup) -> None:
        """Record a group; if that fails, the files are as before.

        Raises:
            OSError: a file cannot be written, such as on a full disk. It names the file.
        """
        if not recorded.sequences:
            return
        if self._decode is not None:
            self._write_tokens(recorded, self._decode)
        files = self._files
        offset, begin = files.rollouts.end, files.arrays.end
        block_start = begin
        blocks, lines, told = [], [], None
        for one in recorded.sequences:
            rollout = recorded.group.rollouts[one.rollout]
            conversation = {} if one.rollout == told else _conversation(rollout)
            told = one.rollout
            arrays = _arrays(one)
            blocks.append(packed(arrays))
            place = {"offset": block_start, "bytes": len(blocks[-1]), "types": types_of(arrays)}
            lines.append(json_line(self._line(recorded, one, conversation) | {"arrays": place}))
            block_start += len(blocks[-1])
        try:
            files.arrays.append(b"".join(blocks))
            files.rollouts.append(b"".join(lines))
            length = files.rollouts.end - offset
            files.index.append(entry(offset, length, block_start - begin, recorded.rollouts))
        except OSError:
            files.rollouts.undo(offset)
            files.arrays.undo(begin)
            raise

    def reply(self, groups: Sequence[Group]) -> tuple[str, str, float] | None:
        """Return prompt, completion and reward of one trained rollout; None if there is none."""
        if self._decode is None:
            return None
        for group in groups:
            for number, index in _trained_places(group):
                rollout = group.rollouts[number]
                return *_texts(self._decode, rollout.samples[index]), rollout.reward
        return None

    def _line(
        self, recorded: RecordedGroup, one: _TrainedSequence, conversation: Mapping[str, Any]
    ) -> dict[str, Any]:
        group, rollout = recorded.group, recorded.group.rollouts[one.rollout]
        sample = one.sample
        texts = (None, None) if self._decode is None else _texts(self._decode, sample)
        return {
            "step": recorded.step,
            "task_id": group.task_id,
            "environment": group.environment,
            "rollout": one.rollout,
            "sample": one.index,
            **conversation,
            "reward": rollout.reward,
            "stop": rollout.stop,
            "metrics": plain(rollout.metrics),
            "prompt": texts[0],
            "completion": texts[1],
            "temperature": sample.temperature,
            "tokens": len(sample.token_ids),
            "trained": int(sample.loss_mask.sum()),
        }

    def _write_tokens(self, recorded: RecordedGroup, decode: Decode) -> None:
        ids = np.unique(np.concatenate([one.sample.token_ids for one in recorded.sequences]))
        fresh = sorted(set(ids.tolist()) - self._known)
        lines = [json_line([token, text_of(token, decode)]) for token in fresh]
        self._files.tokens.append(b"".join(lines))
        self._known.update(fresh)


def _trained_places(group: Group) -> Iterator[tuple[int, int]]:
    """Yield the rollout and sample number of each sequence with a token to train."""
    for number, rollout in enumerate(group.rollouts):
        for index, sample in enumerate(rollout.samples):
            if sample.loss_mask.any():
                yield number, index


def _arrays(one: _TrainedSequence) -> dict[str, np.ndarray]:
    return {name: getattr(one.sample, name) for name in RECORDED} | dict(one.per_token)


def _texts(decode: Decode, sample: Sample) -> tuple[str, str]:
    begin = int(sample.loss_mask.argmax())
    return _text(decode, sample.token_ids[:begin]), _text(decode, sample.token_ids[begin:])


def _text(decode: Decode, ids: np.ndarray) -> str:
    left_out = len(ids) - MAX_TEXT_TOKENS
    if left_out <= 0:
        return decode(ids.tolist())
    half = MAX_TEXT_TOKENS // 2
    note = f"\n[... {left_out:,} tokens are left out of the text ...]\n"
    return decode(ids[:half].tolist()) + note + decode(ids[-half:].tolist())


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
        ValueError: the number of samples or a shape differs, or an array does not hold numbers or
            has the name of one that is always recorded.
    """
    if per_token and (not samples or len(per_token) % len(samples)):
        raise ValueError(f"per_token is for {len(per_token)} samples; expected {len(samples)}")
    for sample, arrays in zip(itertools.cycle(samples), per_token, strict=False):
        for name, array in arrays.items():
            if name in RECORDED:
                raise ValueError(
                    f"per_token has {name}, which is recorded for every sample; use another name"
                )
            kind = np.asarray(array).dtype
            if kind.kind not in "biuf":
                raise ValueError(f"per_token has {name} of type {kind}; expected numbers")
            if np.shape(array) != sample.token_ids.shape:
                raise ValueError(
                    f"per_token has {name} of shape {np.shape(array)} for a sample of shape "
                    f"{sample.token_ids.shape}; expected an entry for each token"
                )


def text_of(token: int, decode: Decode) -> str:
    """Return a token's text, with the leading space that many tokenizers drop at the beginning."""
    alone = decode([token])
    twice = decode([token, token])
    return twice[len(alone) :] if twice.startswith(alone) else alone
