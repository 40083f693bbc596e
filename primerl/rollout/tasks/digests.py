"""Digests of tasks, by which a restored stream recognizes that its tasks have changed."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

Digests = list[tuple[str, str]]
"""The name and the digest of each part of the tasks, such as a file, in order."""


def fingerprint(row: Any) -> str | None:
    """Return a digest that identifies a task in a stream's state; None if it can't be encoded.

    The digest is computed from the row as MessagePack, which is the same in every process.
    """
    content = _encoded(row)
    return None if content is None else hashlib.blake2b(content, digest_size=8).hexdigest()


def digests_of(tasks: Any) -> Digests | None:
    """Return the digests of the parts of the tasks; None if they are unknown.

    They are what a method ``digests()`` of the tasks returns, such as that of
    ``data.Conversations``. A list has one part. The digests of other tasks are unknown, because
    reading all of them can be slow.
    """
    if hasattr(tasks, "digests"):
        return [(str(name), str(digest)) for name, digest in tasks.digests()]
    if not isinstance(tasks, list):
        return None
    total = hashlib.blake2b(digest_size=16)
    for row in tasks:
        content = _encoded(row)
        if content is None:
            return None
        total.update(len(content).to_bytes(8, "big") + content)
    return [("the list of tasks", total.hexdigest())]


def require_same_digests(saved: Sequence[Sequence[str]], now: Digests) -> None:
    """Check that tasks have the digests of a saved state, in the same order; names may differ.

    Raises:
        ValueError: a digest differs; the message names the parts that changed.
    """
    before = [(name, digest) for name, digest in saved]
    if [digest for _, digest in before] == [digest for _, digest in now]:
        return
    known, present = dict(before), dict(now)
    changes = [
        f"{name} has changed" if name in present else f"{name} is missing"
        for name, digest in known.items()
        if present.get(name) != digest
    ]
    changes += [f"{name} is new" for name in present if name not in known]
    if not changes:
        names = [", ".join(name for name, _ in parts) for parts in (before, now)]
        changes = [f"the order was {names[0]}, and is {names[1]}"]
    raise ValueError(
        f"the tasks are not those that the state was taken with: {'; '.join(changes)}. Resume with "
        "the same tasks, or begin a new run"
    )


def _encoded(row: Any) -> bytes | None:
    try:
        return msgspec.msgpack.encode(row, order="deterministic")
    except (TypeError, ValueError, OverflowError):  # a worker's state could not store it either
        return None
