"""Marks the phases of a step in traces, from outside of what runs them.

Nothing of the trainer or the engines knows about it, and a run without ``--profile`` does not pay
for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.engine.pipeline_executor import PipelineExecutor
from megatron.engine.train_engine import TrainEngine
from megatron.profiling.scopes import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OUTSIDE,
    RECEIVE_SCOPE,
    scope,
)


@contextlib.contextmanager
def phases_marked(engine: TrainEngine, saves: Any = None) -> Iterator[None]:
    """Writes the phases of a step, and what lies outside of it, into traces.

    Args:
        engine: what trains.
        saves: what saves.
    """
    deepspeed_engine = engine.engine
    with contextlib.ExitStack() as stack:
        replace = stack.enter_context
        replace(replaced(engine, "train_step", _reading(engine.train_step)))
        for owner, name, label in (
            (engine, "update", scope(OPTIMIZER)),
            (engine, "evaluate", OUTSIDE[0]),
            (saves, "save", OUTSIDE[1]),
            (deepspeed_engine, "backward", scope(BACKWARD)),
        ):
            if owner is not None:
                replace(replaced(owner, name, _scoped(getattr(owner, name), label)))
        for module in (deepspeed_engine, engine.model):
            stack.callback(_hooked(module, scope(FORWARD)))
        if isinstance(deepspeed_engine, PipelineExecutor):
            for name, label in (
                ("forward_pass", scope(FORWARD)),
                ("backward_pass", scope(BACKWARD)),
                ("wait_for_arrival", RECEIVE_SCOPE),
                ("wait_for_sends", RECEIVE_SCOPE),
            ):
                marked = _scoped(getattr(deepspeed_engine, name), label)
                replace(replaced(deepspeed_engine, name, marked))
        yield


def _scoped(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(label):
            return function(*args, **kwargs)

    return scoped


def _reading(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, taking its batches under the scope of data."""

    def step(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        return train_step(_Reading(batches), *args, **kwargs)

    return step


class _Reading(Iterator[Any]):
    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        with torch.profiler.record_function(scope(DATA)):
            return next(self._batches)


def _hooked(module: torch.nn.Module, label: str) -> Callable[[], None]:
    """Marks a module's forward pass; returns what ends that."""
    entered: list[Any] = []

    def before(*_: Any) -> None:
        entered.append(torch.profiler.record_function(label))
        entered[-1].__enter__()

    def after(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    handles = [
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Puts another value in place of an object's attribute, for a while."""
    own = name in vars(owner)
    before = getattr(owner, name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if own:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)
