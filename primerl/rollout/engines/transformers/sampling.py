"""Sampling of one token for each row of logits, with random numbers that belong to the request."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import torch
from jaxtyping import Float, Int
from torch import Tensor

from primerl.rollout.engines.transformers.transfers import to_device
from primerl.types import SamplingParams

# Columns that are summed at a time when a token is drawn.
BLOCK = 256
# Below it, a temperature would be 0 in float32.
LEAST_TEMPERATURE = 1e-37
# How many kinds of request are counted, to tell equal ones apart.
COUNTED = 65_536


class RequestKeys:
    """Gives each request the key of its random numbers.

    The key depends on the seed, the session, the prompt and the number of earlier requests with the
    same session and prompt. It does not depend on what else is served. The key of a request
    with a seed depends on that seed only.

    Args:
        seed: the seed of all requests.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._least = 0  # what a request begins to count from whose count may have been dropped

    def key(self, prompt: list[int], params: SamplingParams, session: str | None) -> bytes:
        """Return the key of a request."""
        if params.seed is not None:
            return _digest("seed", params.seed)
        # The text that repr gives, at a fifth of the time for long prompts.
        tokens = msgspec.json.encode(prompt).replace(b",", b", ").decode()
        kind = _digest_of(f"({self._seed!r}, {session!r}, {tokens})")
        count = self._counts.pop(kind, self._least)
        self._counts[kind] = count + 1
        if len(self._counts) > COUNTED:
            self._least = max(self._least, self._counts.popitem(last=False)[1])
        return _digest(kind, count)


def uniform(key: bytes, position: int) -> float:
    """Return the random number in [0, 1) for one position of a request: 48 bits of a hash."""
    digest = hashlib.blake2b(key + position.to_bytes(8, "little"), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def _digest(*parts: object) -> bytes:
    return _digest_of(repr(parts))


def _digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def sample_tokens(
    logits: Float[Tensor, "rows vocab"],
    params: Sequence[SamplingParams],
    uniforms: Float[Tensor, " rows"],
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Sample one token for each row; return the tokens and their processed logprobs.

        p = softmax(logits / temperature), limited to top_k, top_p and min_p, and normalized again
        token = the first with  sum_{v <= token} p_v > u

    A row with temperature 0 gets its likeliest token, with the logprob 0.

    Args:
        logits: float32. Infinite logits are allowed if they are negative.
        params: how each row is sampled.
        uniforms: the random number u of each row, float64, in [0, 1).

    Returns:
        The tokens, int64, and their logprobs, float32; a row that can't be sampled, because its
        logits are not numbers, has the logprob NaN.
    """
    device = logits.device
    greedy = to_device([one.temperature == 0 for one in params], torch.bool, device)
    temperatures = [max(one.temperature, LEAST_TEMPERATURE) for one in params]
    highest, likeliest = logits.max(dim=1, keepdim=True)
    scaled = (logits - highest) / to_device(temperatures, torch.float32, device).unsqueeze(1)
    limited = [row for row, one in enumerate(params) if _is_limited(one)]
    if limited:
        rows = to_device(limited, torch.int64, device)
        scaled[rows] = _limit(scaled[rows], [params[row] for row in limited])
    drawn, total = _draw(scaled.exp(), uniforms)
    tokens = torch.where(greedy, likeliest.squeeze(1), drawn)
    logprobs = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1) - total.log()
    unusable = ~torch.isfinite(total)
    logprobs = logprobs.masked_fill(greedy, 0.0).masked_fill(unusable, float("nan"))
    return tokens, logprobs.float()


def _is_limited(params: SamplingParams) -> bool:
    limits = params.top_k != -1 or params.top_p < 1 or params.min_p > 0
    return limits and params.temperature > 0


def _limit(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set the logits of tokens beyond ``top_k``, ``min_p`` and ``top_p`` to minus infinity.

    ``top_k`` keeps the k likeliest tokens, and ``min_p`` those that have at least this share of the
    highest probability. Among them, ``top_p`` keeps the smallest number of likeliest tokens
    whose probabilities reach this sum.
    """
    vocabulary = logits.shape[1]

    def column(values: list[float]) -> Tensor:
        return to_device(values, torch.float64, logits.device).unsqueeze(1)

    ordered, order = logits.double().sort(dim=1, descending=True, stable=True)
    top_k = [vocabulary if one.top_k == -1 else one.top_k for one in params]
    kept = torch.arange(vocabulary, device=logits.device) < column([float(k) for k in top_k])
    kept &= (ordered - ordered[:, :1]).exp() >= column([one.min_p for one in params])
    probabilities = ordered.masked_fill(~kept, float("-inf")).softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    top_p = column([one.top_p for one in params])
    kept &= (before < top_p) | (top_p == 1)
    kept = torch.zeros_like(kept).scatter(1, order, kept)
    return logits.masked_fill(~kept, float("-inf"))


def _draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from unnormalized probabilities by the inverse of their cumulative sum, in float64.

    First a block of columns is drawn, then a column of this block. So the cumulative sum over all
    columns is never computed.

    Returns:
        The columns, and the sum of each row.
    """
    rows, columns = weights.shape
    blocks = torch.nn.functional.pad(weights, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    sums = blocks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    total = sums[:, -1]
    target = (uniforms * total).unsqueeze(1)
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    index = block.unsqueeze(2).expand(rows, 1, BLOCK)
    inside = blocks.gather(1, index).squeeze(1).double().cumsum(dim=1)
    # The two sums of a block differ in rounding: stay below the last column that has any weight.
    rest = torch.minimum(target - before, inside[:, -1:] * (1 - 2**-40))
    column = torch.searchsorted(inside, rest, right=True).clamp_(max=BLOCK - 1)
    drawn = (block * BLOCK + column).squeeze(1).clamp_(max=columns - 1)
    return drawn, total
