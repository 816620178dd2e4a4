"""Callback that measures gradient norms of micro batches, and the noise scale derived from them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.optimizer import owned
from megatron.parallel.mesh import SHARDED
from megatron.training.trainer import Callback, Step, Trainer

MEMORY = 0.9
"""Decay of the moving averages per measurement. About ten are averaged, as single ones are
noisy."""


class Estimate:
    """Estimate of the simple noise scale tr(covariance) / |gradient|^2 (McCandlish et al. 2018,
    appendix A.1). Squared gradient norms at two batch sizes give unbiased estimates of both terms,
    whose moving averages are divided."""

    def __init__(self) -> None:
        self._noise = self._signal = 0.0

    def add(self, small: int, small_square: float, large: int, large_square: float) -> None:
        """Add a step: mean squared gradient norms over ``small`` and over ``large`` samples."""
        signal = (large * large_square - small * small_square) / (large - small)
        noise = (small_square - large_square) / (1 / small - 1 / large)
        self._signal = MEMORY * self._signal + (1 - MEMORY) * signal
        self._noise = MEMORY * self._noise + (1 - MEMORY) * noise

    @property
    def samples(self) -> float | None:
        """Noise scale in samples; None while the estimates are not positive."""
        positive = self._signal > 0 and self._noise > 0
        return self._noise / self._signal if positive else None


class NoiseScale(Callback):
    """Callback that measures the noise scale in every ``interval``-th step."""

    def __init__(self, interval: int) -> None:
        self._interval, self._estimate = interval, Estimate()
        self._handles: list[RemovableHandle] = []
        self._squares: list[Tensor] = []

    def numbers(self, _: float) -> Mapping[str, float | None]:
        """Return the noise scale for a log line."""
        return {"gradient_noise_scale": self._estimate.samples}

    def before_step(self, trainer: Trainer) -> None:
        if (trainer.iteration + 1) % self._interval:
            return
        engine, self._squares = trainer.engine, []
        for param in engine.trained:
            if owned(param, engine.mesh, SHARDED):
                self._handles.append(param.register_hook(self._measure))

    def _measure(self, grad: Tensor | None) -> None:
        # None if the layer accumulates the gradient itself. The layer then also calls this hook,
        # with the gradient.
        if grad is not None:
            self._squares.append(
                torch.linalg.vector_norm(grad, dtype=torch.float32).double().square()
            )

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        plan, engine = trainer.plan, trainer.engine
        count = plan.batch_size.micro_batches(step.first_sample)
        square = self._mean_square(engine, count)
        norm = float(step.result.grad_norm)
        if count * engine.mesh.samples.size > 1 and torch.isfinite(square) and norm < float("inf"):
            self._estimate.add(plan.micro_batch_size, float(square), step.samples, norm**2)

    def _mean_square(self, engine: TrainEngine, count: int) -> Tensor:
        """Return the mean squared norm over ``count`` micro batches of each data-parallel rank."""
        total = torch.zeros((), dtype=torch.float64, device=engine.device)
        if self._squares:
            total += torch.stack(self._squares).sum()
        world = engine.mesh.world
        if world.size > 1:
            dist.all_reduce(total, group=world.handle)
        # The backward pass divides a micro batch's loss by the number of micro batches in a step.
        return total * count / engine.mesh.samples.size
