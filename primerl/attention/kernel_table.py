"""The kernels of attention, what each of them can compute, and which one is taken.

``KERNELS`` is the only place that says what a kernel can compute: ``choose`` reads it, and a test
compares the table of the documentation with it. Nothing here looks at a device or imports a kernel.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import attrs
import torch

KernelName = Literal["flash4", "cudnn", "varlen", "sdpa", "spans"]
# The dtypes of the kernels that need certain GPUs.
HALF_PRECISION = (torch.bfloat16, torch.float16)
ALIGNMENT = 8
"""The sizes of heads that these kernels compute are multiples of this."""
# Dense calls pad documents to a multiple of this many tokens. cuDNN plans each shape once, which is
# a number of documents and a length. Planning takes much longer than computing, so there must be
# few lengths, and few numbers of documents: powers of two up to a maximum, and 1 if they are long.
DENSE_MULTIPLE = 1024
LONGEST_TOGETHER = 4096
MOST_TOGETHER = 16
# cuDNN's dense kernel against torch's variable-length kernel: 599 / 521 against 312 / 296 TFLOP/s
# forward / backward (one H200, 16 heads of 128, 16,384 tokens).
DENSE_SPEEDUP = 1.8
# The time of a further call and its copies, in scores: an estimate, never measured.
CALL_SCORES = 2048**2


@attrs.frozen(kw_only=True)
class AttentionKernel:
    """A kernel of attention, with all that it can compute."""

    name: KernelName
    source: str
    """The package or the function that has the kernel."""
    merit: str
    """Why it is taken where it can be."""
    largest_heads: Mapping[int, int] | None = None
    """The largest size of heads by the major number of a GPU's compute capability.

    None if the kernel runs on any device, in any dtype and with any size of heads.
    """
    further_heads: frozenset[tuple[int, int, int]] = frozenset()
    """More sizes of heads: the major number, and the sizes of keys and of values."""
    windows: bool = False
    """Whether a query may see only the keys of a window."""
    softcaps: bool = False
    sinks: bool = False
    dropout: bool = False
    prefixes: bool = True
    """Whether spans may have more keys than queries, as documents with shared tokens do."""


KERNELS = (
    AttentionKernel(
        name="flash4",
        source="flash-attn-4",
        merit="it computes all spans in one call, and was written for this GPU",
        largest_heads={9: 256, 10: 128},
        further_heads=frozenset({(10, 192, 128)}),
        windows=True,
        softcaps=True,
        sinks=True,
    ),
    AttentionKernel(
        name="cudnn",
        source="cuDNN",
        merit="dense calls by length are faster than one variable-length call",
        largest_heads={9: 128, 10: 128},
        sinks=True,
        prefixes=False,
    ),
    AttentionKernel(
        name="varlen",
        source="torch's FlashAttention 2",
        merit="it computes all spans in one call",
        largest_heads={8: 256, 9: 256, 10: 256, 11: 256, 12: 256},
        windows=True,
        sinks=True,
    ),
    AttentionKernel(
        name="sdpa",
        source="scaled_dot_product_attention",
        merit="it computes every dtype and size of heads, and dropout",
        windows=True,
        dropout=True,
    ),
    AttentionKernel(
        name="spans",
        source="operators of torch",
        merit="it computes everything but dropout",
        windows=True,
        softcaps=True,
        sinks=True,
    ),
)
END_TO_END = frozenset(one.name for one in KERNELS if one.largest_heads is not None)
"""The kernels of ``end_to_end``, which run on GPUs only."""


@attrs.frozen(kw_only=True)
class AttentionProblem:
    """A call of attention: its device, dtype and sizes, and the features that it needs."""

    device: str
    """The type of the device, such as ``"cuda"``."""
    capability: tuple[int, int] | None = None
    """The compute capability of an NVIDIA GPU; None elsewhere."""
    dtype: torch.dtype
    heads: tuple[int, int]
    """The sizes of the heads of keys and of values."""
    window: bool = False
    """Whether a window is shorter than the longest span."""
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    groups: tuple[tuple[int, int, int], ...] | None = None
    """The number, queries and keys of spans of equal lengths; None if they are not known yet."""


def choose(
    problem: AttentionProblem,
    *,
    unusable: Mapping[str, str],
    forced: str | None = None,
) -> tuple[KernelName, str]:
    """Choose the first kernel of ``KERNELS`` that computes a problem and is not slower than others.

    On a CPU, the last kernels are the first choice.

    Args:
        problem: what is to be computed.
        unusable: reasons why kernels can't be used on this machine at all, by name.
        forced: the name of the only kernel that may be chosen.

    Returns:
        The name, and the reason.

    Raises:
        ValueError: no kernel computes the problem, the forced one doesn't, or there is none of
            that name.
    """
    if forced is not None:
        if forced not in get_args(KernelName):
            raise ValueError(
                f"there is no attention kernel {forced!r}; expected one of "
                f"{', '.join(get_args(KernelName))}"
            )
        kernel = next(one for one in KERNELS if one.name == forced)
        refused = unusable.get(kernel.name) or refusal(kernel, problem)
        if refused is not None:
            raise ValueError(f"the attention kernel {forced} can't be used: {refused}")
        return kernel.name, "it was asked for"
    if problem.dropout and (problem.softcap or problem.sinks):
        special = "capped scores" if problem.softcap else "sinks"
        raise ValueError(
            f"attention has {special} and dropout, which no kernel computes together; set the "
            "model's attention_dropout to 0"
        )
    better: list[str] = []
    for kernel in KERNELS if problem.device != "cpu" else KERNELS[::-1]:
        refused = unusable.get(kernel.name) or refusal(kernel, problem)
        if refused is None and kernel.name == "cudnn" and problem.groups is not None:
            slower = not dense_is_faster(problem.groups)
            refused = "one call for all spans is faster" if slower else None
        if refused is None:
            return kernel.name, "; ".join([kernel.merit, *better])
        better.append(f"not {kernel.name}: {refused}")
    raise AssertionError(f"no kernel computes {problem}")


def refusal(kernel: AttentionKernel, problem: AttentionProblem) -> str | None:
    """Return why a kernel can't compute a problem; None if it can."""
    if kernel.largest_heads is not None:
        needed = _device_refusal(kernel, kernel.largest_heads, problem)
        if needed is not None:
            return needed
    lacks = [
        (problem.window and not kernel.windows, "windows"),
        (problem.softcap and not kernel.softcaps, "capped scores"),
        (problem.sinks and not kernel.sinks, "sinks"),
        (problem.dropout and not kernel.dropout, "dropout"),
    ]
    for lacking, name in lacks:
        if lacking:
            return f"{kernel.source} has no {name}"
    known = problem.groups or ()
    if not kernel.prefixes and any(queries != keys for _, queries, keys in known):
        return f"{kernel.source} needs as many queries as keys"
    return None


def _device_refusal(
    kernel: AttentionKernel, largest_heads: Mapping[int, int], problem: AttentionProblem
) -> str | None:
    if problem.device == "cpu":
        return "the device is a CPU"
    major = problem.capability[0] if problem.capability else 0
    if major not in largest_heads:
        needed = ", ".join(f"{one}.x" for one in largest_heads)
        return f"{kernel.source} needs an NVIDIA GPU of compute capability {needed}"
    if problem.dtype not in HALF_PRECISION:
        return f"{kernel.source} does not compute {problem.dtype}"
    fits = max(problem.heads) <= largest_heads[major]
    fits = fits or (major, *problem.heads) in kernel.further_heads
    if not fits or any(size % ALIGNMENT for size in problem.heads):
        return f"{kernel.source} does not compute heads of {problem.heads} numbers"
    return None


def padded_length(length: int) -> int:
    """Return the length to which dense calls pad a document."""
    return -(-length // DENSE_MULTIPLE) * DENSE_MULTIPLE


def dense_calls(number: int, length: int) -> list[int]:
    """Return how many documents each dense call computes, of a number of one padded length."""
    if length > LONGEST_TOGETHER:
        return [1] * number
    sizes, size = [], MOST_TOGETHER
    while number:
        sizes += [size] * (number // size)
        number, size = number % size, size // 2
    return sizes


def dense_is_faster(groups: Iterable[tuple[int, int, int]]) -> bool:
    """Whether dense calls by padded length beat one variable-length call.

        sum of (padded length)^2 / 1.8 + calls 2048^2  <  sum of length^2 + 2048^2

    Args:
        groups: the number, queries and keys of spans of equal lengths.
    """
    dense: Counter[int] = Counter()
    scores = 0
    for number, length, _ in groups:
        dense[padded_length(length)] += number
        scores += number * length**2
    padded = sum(number * length**2 for length, number in dense.items())
    calls = sum(len(dense_calls(number, length)) for length, number in dense.items())
    return padded / DENSE_SPEEDUP + CALL_SCORES * calls < scores + CALL_SCORES
