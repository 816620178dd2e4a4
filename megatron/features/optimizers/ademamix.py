"""AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137): Adam with a second, slow moving average of
the gradients, which has no bias correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from torch import Tensor

from megatron.features.optimizers.rules import Group, RuleContext, UpdateRule, descend, rooted


class AdEMAMix(UpdateRule):
    """AdEMAMix, which updates each element separately.

    Args:
        betas: decay rates of the fast average, of the second moment and of the slow average.
        alpha: factor of the slow average.
        warmup: number of updates over which ``alpha`` grows from 0, and the half-life of the slow
            average grows from that of the fast one; 0 for no warm-up.
    """

    states = ("exp_avg", "exp_avg_slow", "exp_avg_sq")

    def __init__(
        self, betas: tuple[float, float, float], eps: float, alpha: float, warmup: int
    ) -> None:
        self._betas, self._eps, self._alpha, self._warmup = betas, eps, alpha, warmup

    @classmethod
    def of(cls, context: RuleContext) -> Self:
        flags = context.flags
        betas = (*context.betas, flags.ademamix_beta3)
        return cls(betas, context.eps, flags.ademamix_alpha, flags.ademamix_warmup_iters)

    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        beta1, beta2, _ = self._betas
        for tensor, state in zip(tensors, states, strict=True):
            grad, step = tensor.grad, float(state["step"])
            assert grad is not None
            fast = state["exp_avg"].lerp_(grad, 1 - beta1)
            slow = state["exp_avg_slow"].lerp_(grad, 1 - self.slow_beta(step))
            squares = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            mixed = (fast / (1 - beta1**step)).add_(slow, alpha=self.alpha(step))
            descend(tensor, mixed.div_(rooted(squares, beta2, step, self._eps)), group)

    def alpha(self, step: float) -> float:
        """Return the factor of the slow average at update number ``step``."""
        return self._alpha * (min(1.0, step / self._warmup) if self._warmup else 1.0)

    def slow_beta(self, step: float) -> float:
        """Return the decay rate of the slow average at update number ``step``. During the warm-up
        its half-life, ln 0.5 / ln beta - 1, grows linearly."""
        first, _, last = self._betas
        if step >= self._warmup:
            return last
        lives = [math.log(0.5) / math.log(beta) - 1 if beta else -1.0 for beta in (first, last)]
        life = lives[0] + (lives[1] - lives[0]) * step / self._warmup
        return min(last, 0.5 ** (1 / (life + 1)))
