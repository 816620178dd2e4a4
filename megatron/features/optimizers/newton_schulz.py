"""Newton-Schulz iterations, which approximate the nearest matrix whose singular values are all 1.

One step maps X to a X + (b A + c A^2) X with A = X X^T. It keeps the singular vectors, and maps
each singular value s to a s + b s^3 + c s^5. The coefficients a, b, c determine how fast small
values grow, and how close to 1 the final values are.

Shapes: M rows, N columns of a matrix; E matrices stacked in one tensor.
"""

from __future__ import annotations

import math
from itertools import islice

import torch
from torch import Tensor

from megatron.features.optimizers.coefficients import COEFFICIENTS

_LEAST_NORM = 1e-15


def steps_of(name: str, count: int) -> list[tuple[float, float, float]]:
    """Return the coefficients (a, b, c) of ``count`` steps."""
    coefficients, again = COEFFICIENTS[name]
    if again:
        return [coefficients[n % len(coefficients)] for n in range(count)]
    missing = max(0, count - len(coefficients))
    return [*islice(coefficients, count), *[coefficients[-1]] * missing]


def orthogonalise(
    x_MN: Tensor, steps: list[tuple[float, float, float]], dtype: torch.dtype
) -> Tensor:
    """Approximate the nearest matrix whose singular values are 1, for a matrix [M, N] or for each
    of several, [E, M, N]. The result has the input's dtype; products are computed in ``dtype``. A
    zero matrix remains zero."""
    wide = x_MN.shape[-2] > x_MN.shape[-1]
    x = x_MN.mT if wide else x_MN
    norm = torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_LEAST_NORM)
    x = (x / norm).to(dtype)
    for a, b, c in steps:
        gram = x @ x.mT
        if x.ndim == 2:
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        else:
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if wide else x).to(x_MN.dtype)


def scale(rule: str, rows: int, columns: int) -> float:
    """Return the factor of an orthogonalised update of a matrix of this shape.

    ``spectral`` is sqrt(max(M, N)), which gives the update a root mean square of 1; Liu et al. 2025
    (arXiv:2502.16982) multiply by a further 0.2 to match AdamW. ``unit_rms_norm`` is sqrt(M / N),
    with which an update changes the outputs equally at any width (Bernstein 2025).
    ``shape_scaling`` is sqrt(max(1, M / N)), as in Jordan et al. and torch."""
    if rule == "spectral":
        return math.sqrt(max(rows, columns))
    if rule == "unit_rms_norm":
        return math.sqrt(rows / columns)
    assert rule == "shape_scaling", rule
    return math.sqrt(max(1.0, rows / columns))
