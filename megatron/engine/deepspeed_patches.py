"""DeepSpeed's work on gradients that one replica has no use for, taken out.

With one data-parallel rank there is nothing to average. DeepSpeed's ZeRO 1 and 2 still copy every
gradient into a bucket, divide it by one, reduce it among one, copy it back and into a partition;
stage 0 flattens, reduces and copies back. All of that is the identity. And after every step ZeRO 1
and 2 point every parameter at the place in the flat buffer that it points at already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron.engine.json_keys import Json, offloads


def keep_gradients_in_place(settings: Json, stage: int) -> None:
    """DeepSpeed's keys for gradients that stay where the backward pass has put them; for one
    data-parallel rank. Optimizer state on the host needs DeepSpeed's copies."""
    zero = settings.setdefault("zero_optimization", {})
    if stage in (1, 2) and not offloads(settings, "offload_optimizer"):
        zero["contiguous_gradients"] = False
        zero["overlap_comm"] = False


def take_out(engine: Any, replicas: int) -> None:
    """Takes them out of DeepSpeed's engine.

    Args:
        engine: DeepSpeed's engine.
        replicas: number of data-parallel ranks.
    """
    wrapper = engine.optimizer
    partitioned = isinstance(wrapper, DeepSpeedZeroOptimizer)
    if partitioned:
        wrapper._update_model_bit16_weights = _nothing
    if replicas > 1:
        return
    if not partitioned:
        engine.buffered_allreduce_fallback = _nothing
    elif not wrapper.contiguous_gradients:
        wrapper.buffered_reduce_fallback = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of a method whose work changes nothing."""


def defer_scale_growth(wrapper: Any) -> Callable[[], None]:
    """Makes a ZeRO optimizer change its loss scale after a good step instead of within it.

    DeepSpeed 0.19 doubles the dynamic scale before it divides the gradients by it, so that the
    step at which the scale grows would use half the gradients.

    Returns:
        The update that is due after every step that was not skipped.
    """
    update = getattr(wrapper, "_update_scale", None)
    if update is None:
        return lambda: None

    def on_overflow_only(overflow: bool = False) -> None:
        if overflow:
            update(True)

    wrapper._update_scale = on_overflow_only
    return lambda: update(False)
