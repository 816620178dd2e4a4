"""Gathering of updated weights (ZeRO stages 1 and 2) that overlaps with the next forward pass.

The optimizer starts to gather a bucket as soon as this rank has updated its part of it, in the
order in which layers use the weights. Each layer waits just before it first runs, outside of
compiled code. Other readers use :attr:`ModelEngine.model`, ``names`` or ``trained``, which wait for
all.
"""

from __future__ import annotations

from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.zero_optimizer import ReducingOptimizer
from megatron.model.layer_list import LayerState, Step


def gather_late(engine: TrainEngine) -> None:
    """Make each layer wait for its own weights, so that a step need not wait for all of them. Do
    nothing if DeepSpeed gathers the weights."""
    wrapper, backend, kernels = engine.optimizer_wrapper, engine.backend, engine.kernels
    if not isinstance(wrapper, ReducingOptimizer):
        return
    wrapper.gathers_late, backend.await_weights = True, wrapper.await_weights
    number_of = {p: number for number, group in enumerate(wrapper.bit16_groups) for p in group}

    def around(index: int, step: Step) -> Step:
        key = backend.layers[index].tied_key
        layer = backend.model.get_submodule(str(index) if key is None else f"tied_modules.{key}")
        numbers = {number_of[param] for param in layer.parameters() if param in number_of}

        def waiting(state: LayerState) -> LayerState:
            wrapper.await_weights(numbers)
            kernels.refresh_layer(layer)
            return step(state)

        return waiting

    for sequence in engine.sequences:
        sequence.wrap(around)
