"""The settings of a worker, and the encoding of its state, which is checked against them."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import msgspec

from primerl.rollout.collection.concurrency import AdaptiveConcurrency
from primerl.types import PolicyVersion, SamplingParams

STATE_FORMAT = 3


@attrs.frozen(kw_only=True)
class CollectionSettings:
    """The settings of a worker; see ``primerl.rollout.worker`` for their meaning."""

    params: SamplingParams
    group_size: int
    min_group: int
    groups_per_step: int
    max_staleness: int
    on_stale: Literal["drop", "wait", "mask_tokens"]
    retries: int
    quarantine_after: int
    max_refused: int
    group_timeout_s: float
    timeout_s: float
    await_verification: bool | None = None
    concurrency: AdaptiveConcurrency | None = None


@attrs.frozen(kw_only=True)
class EvaluationOptions:
    """How an evaluation is played; see ``Worker.start_evaluation`` for the meaning."""

    samples: int
    keep_errors: bool
    one_version: bool
    version: PolicyVersion | None


def encode_state(plan: CollectionSettings, parts: Mapping[str, Any]) -> bytes:
    """Encode the state of a worker with the settings ``plan``.

    ``parts`` has the parts of the state by name, as values of built-in types.

    Raises:
        ValueError: a task in ``parts["again"]`` holds a value that can't be stored.
    """
    for task in parts["again"]:
        _require_plain(task, f"task {task['id']!r}")
    settings = ("group_size", "min_group", "groups_per_step")
    saved = {name: getattr(plan, name) for name in settings}
    return msgspec.msgpack.encode({"format": STATE_FORMAT, "plan": saved, **parts})


def decode_state(content: bytes, plan: CollectionSettings) -> dict[str, Any]:
    """Return the parts that ``encode_state`` encoded, for a worker with the settings ``plan``.

    Raises:
        ValueError: the content is not a worker's state, has another format, or holds groups that
            this worker would not have made.
    """
    try:
        state: dict[str, Any] = msgspec.msgpack.decode(content)
        known = state["format"] == STATE_FORMAT
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"the given state is not that of a rollout worker: {error}") from error
    if not known:
        raise ValueError(
            f"the worker's state has format {state['format']}, expected {STATE_FORMAT}: it "
            "was written by another version of primerl"
        )
    _require_same_plan(state["plan"], plan)
    if state["buffer"]["verification"]["required"] and plan.await_verification is False:
        raise ValueError(
            "the state was taken with verification of versions: with await_verification=False "
            "its unverified groups would be trained; resume without await_verification=False, or "
            "without the worker's state"
        )
    return state


def _require_same_plan(saved: Mapping[str, Any], plan: CollectionSettings) -> None:
    refused = {
        "group_size": "its finished groups have that size",
        "groups_per_step": "its count of steps is valid for that size only",
    }
    if saved["min_group"] < plan.min_group:
        refused["min_group"] = "its finished groups may have fewer rollouts"
    for name, why in refused.items():
        if saved[name] != getattr(plan, name):
            raise ValueError(
                f"the state was taken with {name}={saved[name]}, not {getattr(plan, name)}: "
                f"{why}; resume with {name}={saved[name]}, or without the worker's state"
            )


def _require_plain(value: Any, where: str) -> None:
    """Check that MessagePack would store a value without changing it.

    Raises:
        ValueError: a part of ``value`` is not None, text, a number, bytes, a list or a mapping, or
            is an integer of more than 64 bits.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(f"{where} has the key {name!r}, which can't be stored; use text")
            _require_plain(item, f"{where}[{name!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{where}[{index}]")
    elif type(value) not in (type(None), bool, int, float, str, bytes):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which can't be stored in the worker's state; "
            "only text, numbers, bytes, lists and mappings can be stored"
        )
    elif type(value) is int and not -(2**63) <= value < 2**64:
        raise ValueError(f"{where} is {value}, which has more than 64 bits and can't be stored")
