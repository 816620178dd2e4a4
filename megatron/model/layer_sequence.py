"""Consecutive layers, as they run on one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.model.state import LayerState
from megatron.parallel.random import derive_seed, seed_devices

Step = Callable[[LayerState], LayerState]
"""Takes the state through one layer, or through several."""


class LayerSequence:
    """Takes the state through layers one after the other.

    Args:
        steps: a layer each, with its place in the whole list; or layers that are recomputed
            together in the backward pass, with None.
        blocks: the repeated blocks among the layers.
    """

    def __init__(
        self, steps: Sequence[tuple[int | None, Step]], blocks: Sequence[nn.Module] = ()
    ) -> None:
        self.steps, self.blocks = list(steps), list(blocks)

    def __call__(self, state: LayerState) -> LayerState:
        """The state after the last layer."""
        for place, step in self.steps:
            if state.dropout_seed is not None and place is not None:
                # A layer's masks depend on its place alone, not on the layers before it on this
                # process: they are the same however the list is cut into pipeline stages.
                seed_devices(derive_seed(state.dropout_seed, place))
            state = step(state)
        return state

    def observe(self, observer: Callable[[int, LayerState], None]) -> None:
        """Has a function called with the place of every layer and the state after it, for as long
        as this sequence lives."""
        self.steps = [(place, _observed(place, step, observer)) for place, step in self.steps]


class RecomputedLayers(LayerSequence):
    """Layers of whose activations only the first input is kept for the backward pass."""

    def __call__(self, state: LayerState) -> LayerState:
        """The state after the last layer."""
        if not torch.is_grad_enabled():
            return super().__call__(state)
        return checkpoint(self._with_new_masks, state, use_reentrant=False)

    def _with_new_masks(self, state: LayerState) -> LayerState:
        # What is computed again has to make its masks again: compiled code notices if they are
        # there the second time.
        masks = None if state.masks is None else state.masks.anew()
        return super().__call__(state._replace(masks=masks))


def _observed(place: int | None, step: Step, observer: Callable[[int, LayerState], None]) -> Step:
    if place is None:
        assert isinstance(step, LayerSequence)
        step.observe(observer)
        return step

    def observed(state: LayerState) -> LayerState:
        state = step(state)
        observer(place, state)
        return state

    return observed
