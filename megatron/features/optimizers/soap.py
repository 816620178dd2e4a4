"""SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in the eigenbases of Shampoo's factors. The rank
to which a whole matrix is assigned keeps the factors and Adam's moments. As in the publication, the
first gradient only sets the bases: a moment of what is diagonal in them is 0 elsewhere. As in
Megatron-LM, a step uses the bases that it has just updated.

Shapes: M rows, N columns of a matrix; E experts of a rank. Factors are [M, M] and [N, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron.features.optimizers.fused import rows_in
from megatron.features.optimizers.rules import Group, RuleContext, rooted
from megatron.features.optimizers.whole import Matrix, WholeRule

_SIDES = ("left", "right")


@dataclass(frozen=True)
class SoapSettings:
    """SOAP settings from the flags.

    Attributes:
        factor_beta: decay rate of the factors.
        every: number of updates between changes of the bases.
        kl: True to leave out of each factor what the other explains (arXiv:2509.03378).
    """

    betas: tuple[float, float]
    eps: float
    factor_beta: float
    every: int
    kl: bool


class Soap(WholeRule):
    """SOAP for matrices that may be sharded or partitioned."""

    _settings: SoapSettings

    @classmethod
    def of(cls, context: RuleContext) -> Self:
        flags = context.flags
        settings = SoapSettings(
            betas=context.betas,
            eps=context.eps,
            factor_beta=flags.soap_shampoo_beta,
            every=flags.soap_precondition_frequency,
            kl=flags.soap_use_kl_shampoo,
        )
        return cls(settings, context.names, rows_in(context), context.mesh)

    def direction(self, grad: Tensor, state: Group) -> Tensor:
        return grad.clone()

    def create_whole(self, values: Tensor) -> dict[str, Tensor]:
        states = {name: torch.zeros_like(values) for name in ("exp_avg", "exp_avg_sq")}
        *experts, rows, columns = values.shape
        for side, size in zip(_SIDES, (rows, columns), strict=True):
            ones = values.new_ones((*experts, size))
            eye = torch.diag_embed(ones)
            states |= {side: torch.zeros_like(eye), f"{side}_basis": eye, f"{side}_values": ones}
        return states

    def updates(self, matrices: Sequence[Matrix]) -> list[Tensor]:
        """Compute Adam's updates in the eigenbases, and rotate them to the basis of the weights."""
        return [self._update(each.values, each.states, each.number) for each in matrices]

    def _update(self, grad: Tensor, states: dict[str, Tensor], count: float) -> Tensor:
        (beta1, beta2), beta = self._settings.betas, self._settings.factor_beta
        weight = (1 - beta) / (1 - beta**count)  # with bias correction
        factors = self._factor(grad, states, "right"), self._factor(grad.mT, states, "left")
        for side, factor in zip(_SIDES, factors, strict=True):
            states[side].lerp_(factor, weight)
        if count == 1 or count % self._settings.every == 0:
            self._turn(states, count == 1)
        if count == 1:
            return torch.zeros_like(grad)
        left, right = states["left_basis"], states["right_basis"]
        turned = left.mT @ grad @ right
        mean = states["exp_avg"].lerp_(turned, 1 - beta1)
        squares = states["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        scale = rooted(squares, beta2, count - 1, self._settings.eps)
        return left @ (mean / (1 - beta1 ** (count - 1))).div_(scale) @ right.mT

    def _factor(self, x_MN: Tensor, states: dict[str, Tensor], other: str) -> Tensor:
        """Compute X X^T or, with ``kl``, X F^-1 X^T / N with the factor F of the side ``other``."""
        if self._settings.kl:
            values = states[f"{other}_values"].clamp(min=self._settings.eps) * x_MN.shape[-1]
            x_MN = x_MN @ states[f"{other}_basis"] * values.rsqrt()[..., None, :]
        return x_MN @ x_MN.mT

    def _turn(self, states: dict[str, Tensor], first: bool) -> None:
        """Update the bases: to the eigenvectors at first, then by one step of orthogonal
        iteration. The first moment is rotated with the bases, and the second reordered like the
        eigenvalues."""
        left, right = states["left_basis"], states["right_basis"]
        mean = left @ states["exp_avg"] @ right.mT
        for side, dim in zip(_SIDES, (-2, -1), strict=True):
            factor, basis = states[side], states[f"{side}_basis"]
            if first:
                # eigh in float32 may return NaN
                basis = torch.linalg.eigh(factor.double())[1].flip(-1).to(factor)
            else:
                turned = factor @ basis
                order = (basis * turned).sum(-2).argsort(dim=-1, descending=True, stable=True)
                basis = torch.linalg.qr(turned.take_along_dim(order[..., None, :], -1))[0]
                places = order[..., :, None] if dim == -2 else order[..., None, :]
                states["exp_avg_sq"] = states["exp_avg_sq"].take_along_dim(places, dim)
            states[f"{side}_basis"] = basis = basis.contiguous()  # strides affect rounding
            states[f"{side}_values"] = (basis * (factor @ basis)).sum(-2)
        states["exp_avg"] = states["left_basis"].mT @ mean @ states["right_basis"]
