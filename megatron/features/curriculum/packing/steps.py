"""Steps of bins: losses that are means over whole steps, and learning rates by samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.data.sampler import SkippedSamples, position
from megatron.features.curriculum.packing.data import PackedLengths, PackedSamples
from megatron.features.curriculum.packing.section import SamplePacking
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.training.trainer import Callback, Step, Trainer

logger = logging.getLogger(__name__)


def _weighed(forward: Callable[[Any, LayerState], LayerState] | None, module: Any, state: LayerState
             ) -> LayerState:  # fmt: skip
    """The last layer, which in training multiplies the losses of a micro batch by its weights among
    those of the step: of tokens, or of samples."""
    batch = state.batch
    state = module(state) if forward is None else forward(module, state)
    if not module.training or not state.losses:
        return state
    samples, tokens = batch.weights_2
    weights = {name: tokens for name in state.losses if name.startswith((LM_LOSS, "mtp_"))}
    weights |= {name: samples for name in state.losses if name.startswith("sop")}
    losses = {
        name: loss * weights[name].to(loss.dtype) if name in weights else loss
        for name, loss in state.losses.items()
    }
    return state.changed(losses=losses)


def with_weights(spec: ModelSpec) -> ModelSpec:
    """The model whose losses are means over the tokens and samples of whole steps."""

    def started(batch: Any) -> LayerState:
        return spec.begin(batch).changed(batch=batch)

    def layers(tp: TensorParallel) -> list[LayerSpec]:
        *others, last = spec.layers(tp)
        return [*others, replace(last, forward=partial(_weighed, last.forward))]

    return replace(spec, begin=started, layers=layers)


class StepsOfBins(Callback):
    """Sets the learning rate of every step by the samples in its bins, and counts their tokens."""

    def __init__(self, packing: SamplePacking, context: Any) -> None:
        self.packing, self._context, self._samples = packing, context, 0
        self._bind(context.data, context.plan)

    def _bind(self, data: Any, plan: Any) -> None:
        self._data, dataset = data, data.datasets.train
        self._skipped: tuple[range, ...] = ()
        while dataset is not None and not isinstance(dataset, PackedSamples):
            if isinstance(dataset, SkippedSamples):
                self._skipped = dataset.skipped
            dataset = dataset.dataset
        self._bins = dataset
        if isinstance(plan.lengths, PackedLengths) and dataset is not None:
            plan.lengths.consumed = lambda items: self._before(items)[1]

    def _before(self, items: int) -> tuple[int, int]:
        """Samples and tokens of the first items of the run."""
        assert self._bins is not None
        reached = position(self._skipped, items)
        samples, tokens = self._bins.before(reached)
        for each in self._skipped:
            if each.start < reached:
                begin, end = self._bins.before(each.start), self._bins.before(each.stop)
                samples, tokens = samples - end[0] + begin[0], tokens - end[1] + begin[1]
        return samples, tokens

    def before_step(self, trainer: Trainer) -> None:
        if trainer.data is not self._data:
            self._bind(trainer.data, trainer.plan)
        first, plan = trainer.consumed_samples, trainer.plan
        bins = plan.batch_size.batch_size(first)
        before, after = self._before(first), self._before(first + bins)
        samples, tokens = (end - start for start, end in zip(before, after, strict=True))
        plan.rate_factor = self.packing.rate_factor(samples, bins)
        self._samples = samples
        if self.packing.verbose:
            logger.info(
                "step %d: %d bins of %d samples and %d tokens, learning rate times %.4g",
                trainer.iteration + 1, bins, samples, tokens, plan.rate_factor,
            )  # fmt: skip

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self._context.report.record("samples_in_bins", float(self._samples))
