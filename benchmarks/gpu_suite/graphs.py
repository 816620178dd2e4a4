"""Graphs that torch.compile takes of a training, and what breaks them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from contestants.registry import NoMoreSteps, contestant
from contestants.setting import Setting

STEPS = 3


def graph_counts(setting: Setting, variants: dict[str, str]) -> dict[str, Any]:
    """Train two layers for a few steps with each contestant: ``rows`` [variant, graphs, breaks],
    and ``failed`` where a graph is broken."""
    small = dataclasses.replace(setting, layers=min(2, setting.layers), micro_batches=2)
    rows = [[name, *counted(small, of)] for name, of in variants.items()]
    broken = [f"{name}: {breaks[0]}" for name, _, breaks in rows if breaks]
    return {"rows": rows, **({"failed": "; ".join(broken)[:300]} if broken else {})}


def counted(setting: Setting, name: str) -> tuple[int, list[str]]:
    """Number of graphs of a training, and the reason of each break."""
    from torch._dynamo.utils import counters

    steps = 0

    def after_step(loss: Any, grad_norm: Any = None, /) -> None:
        nonlocal steps
        steps += 1
        if steps == STEPS:
            raise NoMoreSteps

    torch.compiler.reset()
    counters.clear()
    contestant(name).run(setting, after_step)
    breaks = [" ".join(str(reason).split())[:200] for reason in counters["graph_break"]]
    return counters["stats"]["unique_graphs"], breaks
