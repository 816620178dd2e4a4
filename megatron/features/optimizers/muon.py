"""Muon (Jordan et al. 2024): momentum, with each whole matrix orthogonalised. Its adaptive form
divides the orthogonalised matrix by the root of a second moment.

Shapes: M rows, N columns of a matrix; E experts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron.features.optimizers.fused import rows_in
from megatron.features.optimizers.newton_schulz import orthogonalise, scale, steps_of
from megatron.features.optimizers.rules import Group, RuleContext
from megatron.features.optimizers.whole import Matrix, WholeRule

_MOST = 2**24
"""Maximum number of elements in a batch of products. Larger batches copy more, but are not
faster."""


@dataclass(frozen=True)
class MuonSettings:
    """Muon settings from the flags.

    Attributes:
        coefficients: coefficients (a, b, c) of each Newton-Schulz step.
        product_dtype: dtype of the products of float32 matrices.
        second_moment: ``adamuon``, ``normuon``, or None for plain Muon.
    """

    momentum: float
    nesterov: bool
    coefficients: list[tuple[float, float, float]]
    scale_mode: str
    factor: float
    product_dtype: torch.dtype
    second_moment: str | None = None
    beta2: float = 0.95
    eps: float = 1e-8


class Muon(WholeRule):
    """Muon for matrices that may be sharded or partitioned."""

    states = ("momentum_buffer",)
    _adaptive = False
    _settings: MuonSettings

    @classmethod
    def of(cls, context: RuleContext) -> Self:
        flags = context.flags
        half = flags.muon_fp32_matmul_prec in ("low", "medium")
        settings = MuonSettings(
            momentum=flags.muon_momentum,
            nesterov=flags.muon_nesterov,
            coefficients=steps_of(flags.muon_coefficient_type, flags.muon_num_ns_steps),
            scale_mode=flags.muon_scale_mode,
            factor=flags.muon_extra_scale_factor,
            product_dtype=torch.bfloat16 if half else torch.float32,
            second_moment=flags.adaptive_muon_moment2_method if cls._adaptive else None,
            beta2=flags.adaptive_muon_beta2,
            eps=flags.adaptive_muon_eps,
        )
        return cls(settings, context.names, rows_in(context), context.mesh)

    def direction(self, grad: Tensor, state: Group) -> Tensor:
        momentum, mean = self._settings.momentum, state["momentum_buffer"]
        mean.lerp_(grad, 1 - momentum)
        return torch.lerp(grad, mean, momentum) if self._settings.nesterov else mean.clone()

    def create_whole(self, values: Tensor) -> dict[str, Tensor]:
        kind = self._settings.second_moment
        if kind is None:
            return {}
        if kind == "normuon":
            values = values.mean(_shorter(values), keepdim=True)
        return {"moment2_buffer": torch.zeros_like(values)}

    def updates(self, matrices: Sequence[Matrix]) -> list[Tensor]:
        """Orthogonalise the matrices, and scale them by the factors set by the flags."""
        settings, results = self._settings, self._orthogonal([each.values for each in matrices])
        for each, result in zip(matrices, results, strict=True):
            if settings.second_moment is not None:
                result.copy_(self._divided(result, each.states["moment2_buffer"]))
            result *= scale(settings.scale_mode, *result.shape[-2:]) * settings.factor
        return results

    def _divided(self, x_MN: Tensor, moment: Tensor) -> Tensor:
        """Divide an orthogonalised matrix by the root of its second moment, which is updated in
        place: of every element (AdaMuon, Si et al. 2025, arXiv:2507.11005), or the mean over the
        shorter side (NorMuon, Li et al. 2025, arXiv:2510.05491), as in Megatron-LM's
        emerging_optimizers."""
        weight, eps = 1 - self._settings.beta2, self._settings.eps
        if self._settings.second_moment == "adamuon":
            moment.lerp_(x_MN.square(), weight)
            return x_MN / moment.sqrt().add_(eps)
        moment.lerp_(x_MN.square().mean(_shorter(x_MN), keepdim=True), weight)
        return x_MN * moment.clamp(min=eps).rsqrt_()

    def _orthogonal(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalise the matrices. Matrices of the same shape are batched on GPUs, and on CPUs
        with bfloat16 products; float32 batches are 10 to 17 % slower on CPUs."""
        settings, results = self._settings, list(matrices)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for n, each in enumerate(matrices):
            dtype = settings.product_dtype if each.dtype == torch.float32 else each.dtype
            batched = each.ndim == 2 and (each.is_cuda or dtype == torch.bfloat16)
            key = (*each.shape, 0) if batched else (*each.shape, n + 1)
            by_shape.setdefault(key, []).append(n)
        for (*shape, _), numbers in by_shape.items():
            many = max(1, _MOST // (shape[-1] * shape[-2]))
            for batch in (numbers[k : k + many] for k in range(0, len(numbers), many)):
                alike = [matrices[n] for n in batch]
                x = torch.stack(alike) if len(alike) > 1 else alike[0]
                dtype = settings.product_dtype if x.dtype == torch.float32 else x.dtype
                x = orthogonalise(x, settings.coefficients, dtype)
                results_of = x.unbind() if len(alike) > 1 else [x]
                for n, result in zip(batch, results_of, strict=True):
                    results[n] = result
        return results


class AdaptiveMuon(Muon):
    """Muon with a second moment of the orthogonalised matrices."""

    _adaptive = True


def _shorter(x_MN: Tensor) -> int:
    """Return the dimension over which NorMuon averages the second moment. The result has one value
    per row of a tall matrix, or per column of a wide one."""
    return -1 if x_MN.shape[-2] >= x_MN.shape[-1] else -2
