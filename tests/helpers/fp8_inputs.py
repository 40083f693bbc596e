"""Matrices to quantize, of all magnitudes, with ties and other edge cases."""

import numpy as np
import torch

DENORMAL = 1e-41
ABOVE = float(np.nextafter(np.float32(448), np.float32(449)))


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs():
    """Matrices of 7 x 300: random, of all sizes, and what is easily forgotten."""
    spread = drawn((7, 300)) * torch.exp2(torch.linspace(-30, 30, 300))
    ties = torch.arange(7 * 300).reshape(7, 300).float() / 16 - 60
    one = torch.zeros(7, 300)
    one[3, 130] = -2.5
    return {
        "random": drawn((7, 300)),
        "16 bits": drawn((7, 300), 1).bfloat16(),
        "half": drawn((7, 300), 2).half(),
        "spread over 60 powers of two": spread,
        "tiny": 1e-30 * drawn((7, 300), 3),
        "below the smallest amax": 1e-11 * drawn((7, 300), 4),
        "denormal": torch.full((7, 300), DENORMAL),
        "huge": 1e37 * drawn((7, 300), 5),
        "largest": torch.full((7, 300), torch.finfo(torch.float32).max),
        "zero": torch.zeros(7, 300),
        "negative zero": -torch.zeros(7, 300),
        "one entry": one,
        "ties between neighbours": ties,
        "exactly the largest": 448 * torch.ones(7, 300),
        "just above it": torch.full((7, 300), ABOVE),
    }
