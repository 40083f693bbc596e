"""The prefixes that a place has probably cached, estimated from the prompts that it was sent.

A prompt is a chain of blocks, each of which has a hash of its tokens and of all tokens before it.
So a place holds a prefix if it holds the last block of the prefix.
"""

import bisect
from collections.abc import Sequence

import numpy as np

BLOCK = 128  # tokens
PLACE_BLOCKS = 1 << 14  # at most 2 million tokens per place, in about 1.2 MB


def extend_hashes(hashes: list[int], token_ids: np.ndarray) -> None:
    """Append the hashes of a prompt's further whole blocks to those of its first ones.

    Hashes are comparable within this process only.

    Args:
        hashes: the hashes of the first blocks, in order.
        token_ids: the whole prompt, int32[t].
    """
    previous = hashes[-1] if hashes else 0
    for start in range(len(hashes) * BLOCK, len(token_ids) - BLOCK + 1, BLOCK):
        previous = hash((previous, token_ids[start : start + BLOCK].tobytes()))
        hashes.append(previous)


class HeldPrefixes:
    """The blocks that were sent to one place; the least recently sent are forgotten first.

    Args:
        most: the most blocks that are remembered.
    """

    def __init__(self, *, most: int = PLACE_BLOCKS) -> None:
        self._most = most
        self._blocks: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, hashes: Sequence[int]) -> None:
        """Record that a prompt was sent to the place."""
        blocks = self._blocks
        # The last block first, so that no block is ever forgotten before those that follow it.
        for one in reversed(hashes[: self._most]):
            blocks.pop(one, None)
            blocks[one] = None
        while len(blocks) > self._most:
            del blocks[next(iter(blocks))]

    def tokens(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens the place has probably cached."""
        found = bisect.bisect_left(hashes, True, key=lambda one: one not in self._blocks)
        return found * BLOCK

    def clear(self) -> None:
        """Forget everything, since the weights or the server have changed."""
        self._blocks.clear()
