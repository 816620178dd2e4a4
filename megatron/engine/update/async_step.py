"""Optimizer steps that the CPU queues without reading a number from the device.

DeepSpeed's optimizers read the gradient norm to decide whether to step and how to clip, so the CPU
waits for the backward pass. In this module the norm, the clipping factor and the decision stay on
the device. torch's fused AdamW changes nothing if its ``found_inf`` tensor is 1; ZeRO 1 and 2 have
an own update (:mod:`partition_update`). Results equal DeepSpeed's, bitwise on CPUs without
clipping. DeepSpeed's own steps remain for fp16 (the loss scale is a number on the CPU), offloaded
optimizer state, and SGD, which has no ``found_inf``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.engine.deepspeed_json import Json, offloads, stage_of
from megatron.engine.deepspeed_patches import queues, take_clipping_over
from megatron.engine.update.adam import StateFormat
from megatron.engine.update.optimizer import clipping_factor, gradient_norm, norm_of_groups, owned
from megatron.engine.update.partition_update import partition_update
from megatron.parallel.mesh import MODEL, Mesh


def can_defer(config: RunConfig, settings: Json) -> bool:
    """Return whether :class:`AsyncOptimizerStep` can replace DeepSpeed's own steps in this run."""
    offloaded = any(offloads(settings, key) for key in ("offload_optimizer", "offload_param"))
    adam = config.optimizer.optimizer == "adam"
    if not adam or config.precision.fp16 or offloaded:
        return False
    return queues(stage_of(settings))


class AsyncOptimizerStep:
    """Gradient norm, clipping and the check for non-finite gradients, all on the device.

    Args:
        wrapper: DeepSpeed's optimizer around ``optimizer``; ``optimizer`` itself at stage 0.
        hold: change no weights after a step with non-finite gradients, so that they are still those
            before the step when the trainer learns of it.
        form: how ZeRO 1 and 2 store main weights and moments; None for float32.

    Attributes:
        norm: norm before clipping in the last step, infinite if not finite; a scalar on the device.
        held: 1.0 if the last step changed no weight, else 0.0. A float32 scalar on the device.
    """

    def __init__(
        self,
        wrapper: Any,
        optimizer: torch.optim.Optimizer,
        params: Iterable[nn.Parameter],
        mesh: Mesh,
        device: torch.device,
        clip_grad: float,
        hold: bool,
        form: StateFormat | None = None,
    ) -> None:
        self._wrapper, self._optimizer = wrapper, optimizer
        self._params, self._mesh = list(params), mesh
        self._device, self._clip_grad, self._hold = device, clip_grad, hold
        self.norm: Tensor
        self.held: Tensor | None = None
        self._factor: Tensor | None = None
        self._measure: Callable[[], Tensor]
        if wrapper is optimizer:
            self._measure = self._whole_norm
        elif isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            self._counted = {param for param in self._params if owned(param, mesh, MODEL)}
            self._measure = self._partitioned_norm_3
            take_clipping_over(wrapper, self._clip)
        else:
            self._measure = self._partitioned_norm
            self._update = partition_update(wrapper, optimizer, device, form)
            wrapper.update_by(self._step_partitioned)

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return the norm of the gradients, a scalar on the device."""
        return self._measure()

    @torch.no_grad()
    def prepare(self) -> None:
        """Measure a step's gradients, and make the following update clip them or change nothing."""
        norm = self._measure()
        bad = norm.isfinite().logical_not()
        held = bad.to(torch.float32)
        if self._hold and self.held is not None:
            held = torch.maximum(held, self.held)
        self.norm, self.held = norm.masked_fill(bad, float("inf")), held
        self._optimizer.found_inf = held  # type: ignore[attr-defined]
        if self._wrapper is self._optimizer and self._factor is not None:
            whole = [param.grad for param in self._params if param.grad is not None]
            torch._foreach_mul_(whole, self._factor)

    def _clip(self, grads: Sequence[Tensor]) -> None:
        if self._factor is not None:
            for grad in grads:
                grad.mul_(self._factor)

    def _whole_norm(self) -> Tensor:
        norm = gradient_norm(self._params, self._mesh)
        if self._clip_grad > 0:
            self._factor = clipping_factor(norm, self._clip_grad)
        return norm

    def _partitioned_norm(self) -> Tensor:
        return self._clipped(self._wrapper.norm())

    def _partitioned_norm_3(self) -> Tensor:
        wrapper, counted = self._wrapper, self._counted
        partials = [
            [g for p, g in zip(params, wrapper.averaged_gradients[n], strict=True) if p in counted]
            for n, params in enumerate(wrapper.fp16_groups)
        ]
        # DeepSpeed would make float64 copies of all gradients, which takes 5% of a small step.
        groups = [self._mesh.dense, self._mesh.model]
        return self._clipped(
            norm_of_groups(partials, torch.float32, torch.float64, groups, self._device)
        )

    def _clipped(self, norm: Tensor) -> Tensor:
        if self._clip_grad > 0:
            # DeepSpeed's formula. A shorter one would round differently.
            self._factor = 1.0 / ((norm + 1e-6) / self._clip_grad).clamp(min=1.0)
        return norm

    def _step_partitioned(self) -> None:
        assert self.held is not None
        self._update.step(self._factor, self.held)
