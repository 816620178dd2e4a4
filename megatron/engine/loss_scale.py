"""The dynamic loss scale of DeepSpeed's ZeRO optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
