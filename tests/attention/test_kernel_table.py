"""The choice of a kernel of attention, over the table of what kernels compute."""

import re
from collections import Counter

import numpy as np
import pytest
import torch

from primerl.attention import Document, attend, choose_kernel, kernel_table, lay_out
from primerl.attention.end_to_end import choice
from primerl.attention.kernel_table import (
    KERNELS,
    AttentionProblem,
    choose,
    dense_calls,
    dense_is_faster,
    padded_length,
)

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
LONG = ((1, 16_384, 16_384),)
MANY = ((30, 200, 200), (10, 700, 700))
SHARED = ((1, 16_384, 16_384), (8, 100, 9_000))
MISSING = {"flash4": "flash-attn-4 is not installed"}


def problem(capability=HOPPER, **others):
    fields = {"dtype": torch.bfloat16, "heads": (128, 128), "groups": MANY} | others
    return AttentionProblem(device="cuda", capability=capability, **fields)


@pytest.mark.parametrize(
    ("capability", "others", "with_flash4", "without"),
    [
        (HOPPER, {}, "flash4", "varlen"),
        (HOPPER, {"groups": LONG}, "flash4", "cudnn"),
        (HOPPER, {"groups": None}, "flash4", "cudnn"),  # of some lengths
        (HOPPER, {"groups": LONG, "window": True}, "flash4", "varlen"),
        (HOPPER, {"groups": LONG, "sinks": True}, "flash4", "cudnn"),
        (HOPPER, {"groups": LONG, "softcap": True}, "flash4", "spans"),
        (HOPPER, {"groups": SHARED}, "flash4", "varlen"),
        (HOPPER, {"dropout": True}, "sdpa", "sdpa"),
        (HOPPER, {"dtype": torch.float32}, "sdpa", "sdpa"),
        (HOPPER, {"dtype": torch.float32, "sinks": True}, "spans", "spans"),
        (HOPPER, {"heads": (192, 128)}, "flash4", "varlen"),
        (HOPPER, {"heads": (256, 256), "groups": LONG}, "flash4", "varlen"),
        (HOPPER, {"heads": (288, 288)}, "sdpa", "sdpa"),
        (HOPPER, {"heads": (100, 100)}, "sdpa", "sdpa"),
        (BLACKWELL, {"heads": (192, 128)}, "flash4", "varlen"),
        (BLACKWELL, {"heads": (256, 256)}, "varlen", "varlen"),
        (AMPERE, {"groups": LONG}, "varlen", "varlen"),
        (AMPERE, {"softcap": True}, "spans", "spans"),
        ((7, 5), {}, "sdpa", "sdpa"),
        ((12, 0), {"groups": LONG}, "varlen", "varlen"),
        (None, {}, "sdpa", "sdpa"),  # a GPU of another maker
    ],
)
def test_the_best_kernel_that_computes_a_problem_is_taken(capability, others, with_flash4, without):
    assert choose(problem(capability, **others), unusable={})[0] == with_flash4
    assert choose(problem(capability, **others), unusable=MISSING)[0] == without


def test_the_reason_says_why_no_better_kernel_is_taken():
    name, reason = choose(problem(window=True), unusable=MISSING)

    assert name == "varlen"
    assert reason == (
        "it computes all spans in one call; not flash4: flash-attn-4 is not installed; "
        "not cudnn: cuDNN has no windows"
    )


@pytest.mark.parametrize(
    ("lengths", "faster"),
    [
        ([16_384], True),
        ([16_300], True),  # padded to 16,384
        ([30_000, 16_000, 8_000, 6_000, 3_000, 2_536], True),
        ([4_096] * 4, True),
        ([200] * 40, False),  # padding to 1,024 is 26 times the work
        ([1_100] * 20, False),  # and to 2,048 is 3.5 times
        (range(1_000, 24_000, 1_024), True),
        ([1_500] * 3 + [100] * 30, False),
    ],
)
def test_dense_calls_are_taken_where_padding_and_calls_cost_less_than_they_save(lengths, faster):
    groups = [(1, length, length) for length in lengths]
    assert dense_is_faster(groups) == faster


def test_each_call_costs_as_much_as_2048_squared_scores():
    """In units of 1,024 squared: 14 / 1.8 + 3 * 4 > 14 + 4, but 30 / 1.8 + 4 * 4 < 30 + 4."""
    groups = [(1, n, n) for n in (1024, 2048, 3072)]
    assert not dense_is_faster(groups)
    assert dense_is_faster([*groups, (1, 4096, 4096)])


def test_documents_are_padded_to_few_lengths():
    assert [padded_length(n) for n in (1, 1024, 1025, 16_384)] == [1024, 1024, 2048, 16_384]


def test_dense_calls_have_few_numbers_of_documents():
    assert dense_calls(1, 1024) == [1]
    assert dense_calls(23, 1024) == [16, 4, 2, 1]
    assert dense_calls(35, 4096) == [16, 16, 2, 1]
    assert dense_calls(3, 5120) == [1, 1, 1]


@pytest.mark.parametrize("tokens", [16_384, 65_536])
def test_all_packs_of_a_size_have_few_shapes_of_dense_calls(tokens):
    """One for each padded length, and four more for each of the four shortest."""
    random, shapes = np.random.default_rng(0), set()
    for _ in range(2_000):
        mean = random.integers(3, np.log(tokens))
        lengths = random.lognormal(mean, 1.0, 4 * tokens // int(np.exp(mean))).astype(int) + 1
        lengths = lengths[np.cumsum(lengths) <= tokens]
        numbers = Counter(map(padded_length, lengths.tolist()))
        shapes |= {(n, size) for n, count in numbers.items() for size in dense_calls(count, n)}

    assert tokens // 1024 < len(shapes) <= tokens // 1024 + 16


def test_each_dense_call_counts():
    """One call of eight documents, or four calls of fifteen: 15 * 4 / 1.8 + 4 * 4 < 15 * 4 + 4."""
    assert dense_is_faster([(15, 2048, 2048)])
    assert dense_is_faster([(8, 1024, 1024)])
    assert not dense_is_faster([(7, 1024, 1024)])  # three calls: 7 / 1.8 + 3 * 4 > 7 + 4


def test_a_forced_kernel_is_taken_or_refused_with_the_reason():
    assert choose(problem(), unusable={}, forced="cudnn") == ("cudnn", "it was asked for")
    for others, message in [
        ({"groups": SHARED}, "cuDNN needs as many queries as keys"),
        ({"window": True}, "cudnn can't be used: cuDNN has no windows"),
        ({"capability": AMPERE}, r"needs an NVIDIA GPU of compute capability 9\.x, 10\.x"),
        ({"heads": (192, 128)}, r"does not compute heads of \(192, 128\) numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            choose(problem(**others), unusable={}, forced="cudnn")
    with pytest.raises(ValueError, match="flash4 can't be used: flash-attn-4 is not installed"):
        choose(problem(), unusable=MISSING, forced="flash4")
    with pytest.raises(ValueError, match="no attention kernel 'flash5'; expected one of flash4"):
        choose(problem(), unusable={}, forced="flash5")


def test_kernels_are_forced_by_an_argument_or_a_variable(monkeypatch):
    x = torch.randn(5, 4, 8, requires_grad=True)
    layout = lay_out((Document(0, 3), Document(3, 5)))
    expected = attend(x, x, x, layout)
    torch.testing.assert_close(attend(x, x, x, layout, kernel="sdpa"), expected)

    monkeypatch.setenv(choice.VARIABLE, "varlen")
    with pytest.raises(ValueError, match="varlen can't be used: the device is a CPU"):
        attend(x, x, x, layout)
    monkeypatch.setenv(choice.VARIABLE, "sdpa")
    assert choose_kernel(x, x) == ("sdpa", "it was asked for")
    torch.testing.assert_close(attend(x, x, x, layout), expected)


def test_a_cpu_computes_spans_unless_there_is_dropout():
    x = torch.zeros(2, 4, 64)
    assert choose_kernel(x, x) == ("spans", "it computes everything but dropout")
    assert choose_kernel(x, x, window=3, softcap=50.0, sinks=True)[0] == "spans"
    assert choose_kernel(x, x, dropout=0.1)[0] == "sdpa"
    with pytest.raises(ValueError, match="capped scores and dropout, which no kernel"):
        choose_kernel(x, x, dropout=0.1, softcap=50.0)
    elsewhere = torch.zeros(2, 4, 64, device="meta")
    assert choose_kernel(elsewhere, elsewhere)[0] == "sdpa"
    assert choose_kernel(elsewhere, elsewhere, sinks=True)[0] == "spans"


def test_a_window_that_is_longer_than_every_document_is_none(monkeypatch):
    x = torch.zeros(5, 4, 64)
    seen = []
    monkeypatch.setattr(
        choice, "choose_for", lambda *_, **asked: seen.append(asked) or ("spans", "")
    )
    layout = lay_out((Document(0, 3), Document(3, 5)))
    for window in (None, 2, 3):
        choose_kernel(x, x, layout=layout, window=window)
    choose_kernel(x, x, window=3)

    assert [asked["window"] for asked in seen] == [False, True, False, True]
    assert seen[0]["groups"] == ((1, 2, 2), (1, 3, 3))


def yes(given):
    return "yes" if given else "no"


def row(kernel):
    """A kernel's row of the table in the documentation."""
    if kernel.largest_heads is None:
        capabilities, dtypes, heads = "any device", "all", "all"
    else:
        capabilities = ", ".join(f"{major}.x" for major in kernel.largest_heads)
        dtypes = ", ".join(str(x).removeprefix("torch.") for x in kernel_table.HALF_PRECISION)
        sizes = {size: [] for size in kernel.largest_heads.values()}
        for major, size in kernel.largest_heads.items():
            sizes[size].append(f"{major}.x")
        one = len(sizes) == 1
        heads = "; ".join(
            f"up to {size}" + ("" if one else f" ({', '.join(on)})") for size, on in sizes.items()
        )
        for major, keys, values in sorted(kernel.further_heads):
            heads += f"; {keys} and {values} ({major}.x)"
    abilities = (
        kernel.windows, kernel.sinks, kernel.softcaps, kernel.prefixes, kernel.dropout
    )  # fmt: skip
    cells = [f"`{kernel.name}`", kernel.source, capabilities, dtypes, heads]
    return f"| {' | '.join([*cells, *map(yes, abilities)])} |"


def test_the_documentation_has_the_same_table(root):
    page = (root / "docs/attention-kernels.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\w+` \|.*\|$", page, re.MULTILINE)

    assert rows == [row(kernel) for kernel in KERNELS]
    assert f"multiple of {kernel_table.DENSE_MULTIPLE:,} tokens" in page
    assert f"/ {kernel_table.DENSE_SPEEDUP} + " in page
    assert f"up to {kernel_table.MOST_TOGETHER} documents" in page
    assert f"of up to {kernel_table.LONGEST_TOGETHER:,} tokens" in page
