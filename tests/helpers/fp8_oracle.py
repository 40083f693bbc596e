"""Reference implementation of the FP8 formats in numpy and ml_dtypes, without primerl or torch."""

import ml_dtypes
import numpy as np

EPSILON = np.float32(1e-10)
LARGEST = np.float32(448)


def quantized(x, *, rows, block, scale):
    """Quantize a float32 matrix block by block; return ``(codes uint8, scales float32)``."""
    height, width = x.shape
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-height // rows), -(-width // block)), np.float32)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            place = slice(r * rows, (r + 1) * rows), slice(c * block, (c + 1) * block)
            part = x[place]
            one = np.float32(max(np.abs(part).max(), EPSILON)) / LARGEST
            if scale == "ue8m0":
                one = power_of_two_at_least(one)
            scales[r, c] = one
            clamped = np.clip(part / one, -LARGEST, LARGEST).astype(np.float32)
            codes[place] = clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales


def power_of_two_at_least(value):
    mantissa, exponent = np.frexp(np.float64(value))  # value = mantissa * 2^exponent, in [0.5, 1)
    return np.float32(np.ldexp(1.0, int(exponent) - (mantissa == 0.5)))


def values(codes, scales, *, rows, block):
    wide = np.repeat(np.repeat(scales, rows, 0), block, 1)[: codes.shape[0], : codes.shape[1]]
    with np.errstate(over="ignore"):  # the largest float32 times a rounded-up scale overflows
        return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * wide


def nvfp4(x):
    """Quantize a float32 matrix of width 16 n; return ``(values, scales float32, global)``."""
    six = np.float32(6)
    whole = np.maximum(np.abs(x).max(), EPSILON) / np.float32(448 * 6)
    blocks = x.reshape(x.shape[0], -1, 16)
    scales = (np.abs(blocks).max(-1) / six / whole).astype(np.float32)
    scales = np.clip(scales, np.float32(2**-6), LARGEST).astype(ml_dtypes.float8_e4m3fn)
    scales = scales.astype(np.float32)
    unit = (whole * scales)[..., None]
    fours = np.clip(blocks / unit, -six, six).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (fours * unit).reshape(x.shape), scales, whole
