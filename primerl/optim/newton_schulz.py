"""Orthogonalization by the Newton-Schulz iteration."""

import torch
from jaxtyping import Float
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
SMALLEST_NORM = 1e-7


def orthogonalize(
    matrices: Float[Tensor, "n rows columns"],
    *,
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> Float[Tensor, "n rows columns"]:
    """Approximate the nearest orthogonal matrix to each matrix G.

        X <- G / |G|_F,  then ``steps`` times  X <- a X + (b S + c S S) X,  S = X X^T

    This is a quintic Newton-Schulz iteration with a, b, c = 3.4445, -4.7750, 2.0315, chosen for a
    steep slope at 0 rather than for convergence to 1 (Keller Jordan,
    https://kellerjordan.github.io/posts/muon). After five steps, singular values that were above
    about 0.002 of the norm are between 0.7 and 1.2. Smaller ones have grown by up to 485 times, and
    zeros stay zero. The result for a matrix does not depend on the other matrices. ``dtype`` is the
    dtype of the iteration and of the result; bfloat16 is enough for ``Muon``.
    """
    x = matrices.to(dtype)
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    if not x.numel():
        return matrices.to(dtype)
    # Compute the norms separately: a batched norm may depend on the other matrices.
    norms = torch.stack(torch._foreach_norm(list(x)))
    x = x / norms.clamp(min=SMALLEST_NORM)[:, None, None]
    for _ in range(steps):
        squares = x @ x.mT
        squares = torch.baddbmm(squares, squares, squares, beta=B, alpha=C)
        x = torch.baddbmm(x, squares, x, beta=A)
    return x.mT if is_tall else x
