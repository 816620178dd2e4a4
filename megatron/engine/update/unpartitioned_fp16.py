"""fp16 at ZeRO stage 0: float16 weights, and float32 main weights on every data-parallel rank.

DeepSpeed's optimizers for this case, ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer``, are wrong:
they divide gradients by a loss scale that the engine applies to the loss only for subclasses of
``ZeROOptimizer``. They also ignore hysteresis, and begin with an update by zeros. This optimizer
computes what ZeRO 1 does, in the same order, without partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.engine.update.optimizer import EXPERTS, fewer_replicas, norm_of_groups, owned
from megatron.parallel.mesh import SHARDED, Mesh


class UnpartitionedFp16Optimizer(ZeROOptimizer):
    """Optimizer in DeepSpeed's form around ``optimizer``, whose parameters become the main weights.

    Args:
        engine: DeepSpeed's engine, which provides the JSON's loss scale.

    Attributes:
        main_weights: float32 main weights by the model's parameters.
        overflow: whether the last step changed no weight because gradients were not finite.
    """

    # Attributes that the base class reads when it scales a loss.
    custom_loss_scaler = False
    torch_autocast_gradscaler = None

    def __init__(
        self, engine: Any, optimizer: torch.optim.Optimizer, config: RunConfig, mesh: Mesh
    ) -> None:
        super().__init__()
        self.optimizer, self._mesh, self._clip_grad = optimizer, mesh, config.optimizer.clip_grad
        self.loss_scaler = CreateLossScaler(
            torch.float16,
            engine.loss_scale(),
            engine.dynamic_loss_scale(),
            engine.dynamic_loss_scale_args(),
        )
        self.dynamic_loss_scale: bool = self.loss_scaler.dynamic
        self.overflow = False
        self._global_grad_norm: Tensor | float = 0.0
        self.main_weights: dict[nn.Parameter, Tensor] = {}
        for group in optimizer.param_groups:
            params = list(group["params"])
            mains = [param.detach().float().requires_grad_() for param in params]
            self.main_weights |= zip(params, mains, strict=True)
            group["params"] = mains
        self._apart = set(fewer_replicas(self.main_weights, mesh))
        self._sums_in_fp32 = config.precision.accumulate_allreduce_grads_in_fp32
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._accumulate)
            for param in self.main_weights
            if self._sums_in_fp32
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.cur_scale

    cur_scale = loss_scale  # DeepSpeed's engine reads this name for its monitors

    def _accumulate(self, param: Tensor) -> None:
        """Add a micro batch's gradient to the step's float32 sum."""
        main, grad = self.main_weights[param], param.grad  # type: ignore[index]
        assert grad is not None
        if main.grad is None:
            main.grad = grad.float()
        else:
            main.grad.add_(grad)
        param.grad = None

    def get_gradient_for_reduction(self, param: nn.Parameter) -> Tensor:
        """Return the sum of a parameter's gradients in this step; zeros if it has none."""
        holder = self.main_weights[param] if self._sums_in_fp32 else param
        if holder.grad is None:
            holder.grad = torch.zeros_like(holder)
        return holder.grad

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Return the gradients that DeepSpeed's engine averages over data-parallel ranks, and by
        group name the gradients that it sums over fewer ranks."""
        dense, others = (
            [
                self.get_gradient_for_reduction(param)
                for param in self.main_weights
                if (param in self._apart) == which
            ]
            for which in (False, True)
        )
        return dense, {EXPERTS: others} if others else {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for tensor in chain(self.main_weights, self.main_weights.values()):
            tensor.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update weights and loss scale. If gradients are not finite, update only the scale."""
        norm, scale = self._scaled_norm(), self.loss_scale
        self.overflow = not bool(norm.isfinite())
        if self.overflow:
            self._global_grad_norm = float("inf")
        else:
            self._global_grad_norm = norm / scale
            self._update(norm, scale)
        self.zero_grad()
        # After the update, which divides by the scale that the gradients were computed with.
        self.loss_scaler.update_scale(self.overflow)

    def _scaled_norm(self) -> Tensor:
        counted = [p for p in self.main_weights if owned(p, self._mesh, SHARDED)]
        grads, groups = map(self.get_gradient_for_reduction, counted), [self._mesh.group(*SHARDED)]
        device = next(iter(self.main_weights)).device
        return norm_of_groups([[*grads]], torch.float32, torch.float32, groups, device)

    def _update(self, norm: Tensor, scale: float) -> None:
        factor: Tensor | float = scale
        if self._clip_grad > 0:
            # DeepSpeed's formula. A shorter one would round differently.
            factor = ((norm / scale + 1e-6) / self._clip_grad).clamp(min=1.0) * scale
        for param, main in self.main_weights.items():
            main.grad = self.get_gradient_for_reduction(param).float()
            param.grad = None  # free it before the next copy
        grads = [main.grad for main in self.main_weights.values() if main.grad is not None]
        torch._foreach_mul_(grads, 1.0 / factor)
        self.optimizer.step()
        torch._foreach_copy_(list(self.main_weights), list(self.main_weights.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ``FP16_UnfusedOptimizer`` does, with the scaler's hysteresis."""
        scaler: Any = self.loss_scaler
        numbers: dict[str, Any] = {"cur_scale": scaler.cur_scale, "cur_iter": 0}
        if self.dynamic_loss_scale:
            names: Sequence[str] = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
            numbers |= {name: getattr(scaler, name) for name in names}
            numbers |= {name: getattr(scaler, name) for name in ("scale_factor", "scale_window")}
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            **numbers,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": [
                [main.detach() for main in group["params"]] for group in self.param_groups
            ],
        }

    def destroy(self) -> None:
        """Remove the hooks. Called when the engine is closed."""
        for hook in self._hooks:
            hook.remove()
