"""Table of the feature's optimizers. A new optimizer adds an entry.

Reading the table does not import torch. The modules of rules are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron.features.optimizers.rules import UpdateRule


class OptimizerEntry(NamedTuple):
    """Properties of an optimizer of this feature.

    Attributes:
        rule: function that imports and returns the class of its rule.
        states: names of elementwise states, of its own rule and of the rule for other parameters.
        matrices: True if its rule only updates the matrices of blocks. ``--muon-scalar-optimizer``
            or Adam updates the other parameters.
        more: True if it has further states, which are saved in separate files.
    """

    rule: Callable[[], type[UpdateRule]]
    states: tuple[str, ...]
    matrices: bool = False
    more: bool = False


def _adam() -> type[UpdateRule]:
    from megatron.features.optimizers.rules import Adam

    return Adam


def _lion() -> type[UpdateRule]:
    from megatron.features.optimizers.rules import Lion

    return Lion


def _muon() -> type[UpdateRule]:
    from megatron.features.optimizers.muon import Muon

    return Muon


def _adaptive_muon() -> type[UpdateRule]:
    from megatron.features.optimizers.muon import AdaptiveMuon

    return AdaptiveMuon


def _soap() -> type[UpdateRule]:
    from megatron.features.optimizers.soap import Soap

    return Soap


def _ademamix() -> type[UpdateRule]:
    from megatron.features.optimizers.ademamix import AdEMAMix

    return AdEMAMix


def _adam_mini() -> type[UpdateRule]:
    from megatron.features.optimizers.adam_mini import AdamMini

    return AdamMini


def _schedule_free() -> type[UpdateRule]:
    from megatron.features.optimizers.schedule_free import ScheduleFree

    return ScheduleFree


_ADAM = ("exp_avg", "exp_avg_sq")

OPTIMIZERS: dict[str, OptimizerEntry] = {
    "muon": OptimizerEntry(_muon, ("momentum_buffer", *_ADAM), matrices=True),
    "lion": OptimizerEntry(_lion, ("exp_avg",)),
    "soap": OptimizerEntry(_soap, _ADAM, matrices=True, more=True),
    "adaptive_muon": OptimizerEntry(
        _adaptive_muon, ("momentum_buffer", *_ADAM), matrices=True, more=True
    ),
    "ademamix": OptimizerEntry(_ademamix, ("exp_avg", "exp_avg_slow", "exp_avg_sq")),
    "adam_mini": OptimizerEntry(_adam_mini, ("exp_avg",), more=True),
    "schedule_free": OptimizerEntry(
        _schedule_free, ("z", "exp_avg_sq", "trained_weight"), more=True
    ),
}
"""Optimizers by their name in ``--optimizer``."""

RULES: dict[str, Callable[[], type[UpdateRule]]] = {
    "adam": _adam,
    **{name: entry.rule for name, entry in OPTIMIZERS.items()},
}
"""Rules by name. ``adam`` is the core's AdamW with this feature's weight decay options."""
