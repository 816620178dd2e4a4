"""The random state of a process, as tensors that a checkpoint can hold."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The states of torch's generators on this process."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """The inverse of :func:`random_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
