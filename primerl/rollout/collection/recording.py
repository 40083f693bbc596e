"""Lossless encoding of groups, for recordings and the worker's state.

A recording is one MessagePack map, ``{"format", "version", "steps"}``. A per-token array in it is
``{"dtype", "data"}``: numpy's name of a little-endian dtype, and the raw bytes.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np

from primerl._common.files import whole_or_nothing
from primerl.types import Group, Rollout, Sample

FORMAT, VERSION = "primerl-groups", 1
DTYPES = {
    "token_ids": "<i4",
    "loss_mask": "|b1",
    "behavior_logprobs": "<f4",
    "versions": "<i4",
    "observation_mask": "|b1",
}


class _Array(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    data: bytes


class _SampleRecord(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: _Array
    loss_mask: _Array
    behavior_logprobs: _Array
    versions: _Array
    temperature: float
    routes: list[str] | None  # None in recordings of early versions
    observation_mask: _Array | None = None


class _RolloutRecord(msgspec.Struct, forbid_unknown_fields=True):
    samples: list[_SampleRecord]
    reward: float
    metrics: dict[str, bool | int | float]
    stop: str
    agent: str
    episode_id: str
    conversation: dict[str, Any] | None = None


class _GroupRecord(msgspec.Struct, forbid_unknown_fields=True):
    task_id: str
    rollouts: list[_RolloutRecord]
    environment: str


class _Header(msgspec.Struct):
    format: str
    version: int


class _RecordingFile(_Header):
    steps: list[list[_GroupRecord]]


def save_groups(path: str | os.PathLike[str], steps: Sequence[Sequence[Group]]) -> None:
    """Record groups in a new file, atomically; ``steps[i]`` holds the groups of policy step i.

    Raises:
        ValueError: a group cannot be recorded exactly, or the file exists.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already; record in a new file, or remove it")
    file = {
        "format": FORMAT,
        "version": VERSION,
        "steps": [[encode_group(group) for group in groups] for groups in steps],
    }
    with whole_or_nothing(target) as opened:
        opened.write(msgspec.msgpack.encode(file))


def load_groups(path: str | os.PathLike[str]) -> list[list[Group]]:
    """Load the groups of each policy step, as ``save_groups`` recorded them.

    Raises:
        ValueError: the file is not a recording, has another format version, or is damaged.
        OSError: the file cannot be read.
    """
    content = Path(path).read_bytes()
    try:
        header = msgspec.msgpack.decode(content, type=_Header)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is not a complete recording of groups by rollout.save_groups: {error}"
        ) from error
    if header.format != FORMAT or header.version != VERSION:
        raise ValueError(
            f"{path} has format {header.format!r}, version {header.version}; this version of "
            f"primerl reads {FORMAT!r}, version {VERSION}"
        )
    try:
        steps = msgspec.msgpack.decode(content, type=_RecordingFile).steps
        return [[_group(group) for group in groups] for groups in steps]
    except ValueError as error:  # msgspec's errors are ValueErrors, too
        raise ValueError(f"{path} is damaged: {error}") from error


def encode_group(group: Group) -> dict[str, Any]:
    """Return a group as a dict of built-in types, which MessagePack encodes losslessly.

    Raises:
        ValueError: a sample has a subclass of ``Sample``, whose additional fields would be lost.
    """
    for sample in group.samples:
        if type(sample) is not Sample:
            raise ValueError(
                f"a {type(sample).__name__} cannot be recorded; record groups as they were sampled"
            )
    return attrs.asdict(group, value_serializer=_plain)


def decode_group(encoded: dict[str, Any]) -> Group:
    """Return the group that ``encode_group`` encoded.

    Raises:
        ValueError: an entry is missing, unknown or malformed; the message names it.
    """
    try:
        return _group(msgspec.convert(encoded, type=_GroupRecord))
    except ValueError as error:
        raise ValueError(f"the content is not an encoded group: {error}") from error


def _plain(_: Any, field: Any, value: Any) -> Any:
    """Convert a value to built-in types; ``field`` is None for an entry of a list or mapping."""
    if isinstance(value, np.ndarray):
        dtype = DTYPES[field.name]
        return {"dtype": dtype, "data": value.astype(dtype).tobytes()}
    return float(value) if field is not None and field.name == "temperature" else value


def _group(encoded: _GroupRecord) -> Group:
    return Group(
        task_id=encoded.task_id,
        rollouts=[
            Rollout(
                samples=map(_sample, rollout.samples),
                reward=rollout.reward,
                metrics=rollout.metrics,
                stop=rollout.stop,
                agent=rollout.agent,
                episode_id=rollout.episode_id,
                conversation=rollout.conversation,
            )
            for rollout in encoded.rollouts
        ],
        environment=encoded.environment,
    )


def _sample(encoded: _SampleRecord) -> Sample:
    arrays: dict[str, Any] = {name: _array(name, getattr(encoded, name)) for name in DTYPES}
    return Sample(**arrays, temperature=encoded.temperature, routes=encoded.routes or ())


def _array(name: str, encoded: _Array | None) -> np.ndarray | None:
    if encoded is None:
        return None
    if encoded.dtype != DTYPES[name]:
        raise ValueError(f"{name} has dtype {encoded.dtype!r}, expected {DTYPES[name]!r}")
    if len(encoded.data) % np.dtype(encoded.dtype).itemsize:
        raise ValueError(
            f"{name} has {len(encoded.data)} bytes, not a whole number of {encoded.dtype}"
        )
    return np.frombuffer(encoded.data, encoded.dtype)
