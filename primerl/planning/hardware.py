"""The speeds of a machine: a table of stated numbers with their sources, which users edit."""

import math
from typing import Any

import attrs
from attrs.validators import ge, gt, le, lt


def _speed(default: float) -> Any:
    """Return a field of bytes or operations per second."""
    return attrs.field(default=default, validator=[gt(0), lt(math.inf)])


def _fraction(default: float) -> Any:
    return attrs.field(default=default, validator=[gt(0), le(1)])


@attrs.frozen(kw_only=True)
class Hardware:
    """Speeds of a GPU and of its links. The defaults are for one H200.

    Sources: (a) NVIDIA's data sheet; (b) measured on one H200 (docs/verified.md) or, what a CPU
    does, on a CPU; (c) measured by others, prime-rl's pull request 3341; (d) assumed, not measured.
    """

    bf16: float = _speed(989e12)
    """(a) FLOP/s of dense products in bfloat16; fractions below are of this peak."""
    products: float = _fraction(0.70)
    """(b) Fraction that products in bfloat16 reach: 690 TFLOP/s."""
    fp8_products: float = _fraction(0.37)
    """(b) Fraction that products in FP8 reach with torch's kernels, quantization included: 370
    TFLOP/s, half of what bfloat16 reaches."""
    server_fp8_products: float = _fraction(0.48)
    """(c) Fraction that servers reach in FP8, experts included: 52,300 tokens/s of prompts on 8
    H100, DeepSeek-V3 with experts on 32 GPUs (SGLang, lmsys.org, May 2025)."""
    grouped: float = _fraction(0.6)
    """(d) Speed of products grouped by expert, relative to those of one matrix."""
    attention: float = _fraction(0.35)
    """(b) Fraction that attention to all keys reaches forward: 342 TFLOP/s, FlashAttention 2."""
    attention_backward: float = _fraction(0.33)
    """(b) The same in the backward pass: 322 TFLOP/s."""
    sparse_attention: float = _fraction(0.30)
    """(d) Fraction that attention to chosen keys reaches, in both passes."""
    indexer: float = _fraction(0.30)
    """(d) Fraction that an indexer reaches, including the choice of keys."""
    head: float = _fraction(0.155)
    """(b) Fraction that the LM head reaches with its loss: 25.0 ms for both passes of 4,096 tokens,
    hidden size 1,024, and 151,936 entries."""
    memory: float = _speed(4.8e12)
    """(a) Bytes/s of a GPU's memory."""
    memory_fraction: float = _fraction(0.6)
    """(d) Fraction of it that decoding reaches."""
    pcie: float = _speed(50e9)
    """(d) Bytes/s between a GPU and pinned host memory in one direction, PCIe 5."""
    nvlink: float = _speed(300e9)
    """(d) Bytes/s that a GPU sends to others of its node; (a) says 450."""
    network: float = _speed(44.26e9)
    """(c) Bytes/s that a GPU sends to other nodes, by RDMA."""
    tcp: float = _speed(8e9)
    """(d) Bytes/s that a node sends, or receives, by TCP in many streams: two thirds of a link of
    100 Gbit/s, which many clusters have beside the adapters for RDMA."""
    exchange_s: float = attrs.field(default=20e-6, validator=[ge(0), lt(math.inf)])
    """(d) Seconds of sending a few tokens to their experts, or back, on top of their bytes."""
    disk: float = _speed(2e9)
    """(d) Bytes/s that a node writes to, or reads from, the shared file system."""
    copying: float = _speed(10e9)
    """(b) Bytes/s that a process copies from a mapped file, on a CPU. (d) The same to a GPU,
    because such memory isn't pinned."""
    threads: int = attrs.field(default=8, validator=ge(1))
    """Threads of each process for the following work: at most 8, so eight GPUs need 64 cores."""
    encoding: float = _speed(1.0e9)
    """(b) Bytes/s of weights that a thread compares, hashes and encodes as a delta, if 2% of the
    words change; 2.2e9 if 0.6% do."""
    patching: float = _speed(2.6e9)
    """(b) Bytes/s of weights to which a thread applies a delta, if 2% of the words change; 8.8e9 if
    0.6% do."""
    hashing: float = _speed(5e9)
    """(b) Bytes/s that a thread hashes when it reads them for the first time."""
