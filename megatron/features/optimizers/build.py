"""Construction of a run's optimizer: which rule updates each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from megatron.config import RunConfig
from megatron.engine.state import places
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.optimizer import OptimizerPlan
from megatron.features.optimizers.flags import OptimizersConfig
from megatron.features.optimizers.fused import is_matrix
from megatron.features.optimizers.rules import Group, RuleContext, RuledOptimizer
from megatron.features.optimizers.schedule_free import MeanPartition, ScheduleFree, Switch
from megatron.features.optimizers.table import OPTIMIZERS, RULES
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of


def plan(config: RunConfig, trained: Mapping[nn.Parameter, str], mesh: Mesh) -> OptimizerPlan:
    """Return the optimizer plan of ``--optimizer``: the rule and learning rate factor of each
    parameter. Raises ConfigError if ranks cannot keep a fused projection whole."""
    flags, name = config.section(OptimizersConfig), config.optimizer.optimizer
    kinds, factors = dict.fromkeys(trained, name), dict[str, float]()
    if name in OPTIMIZERS and OPTIMIZERS[name].matrices:
        other = flags.muon_scalar_optimizer if name != "soap" else "adam"
        kinds = {
            param: name if is_matrix(trained[param], shard_of(param)) else other
            for param in trained
        }
        factors = {other: flags.muon_scalar_lr_factor}
    names = {
        rule: {param: trained[param] for param in trained if kinds[param] == rule}
        for rule in dict.fromkeys(kinds.values())
    }
    rules = {
        rule: RULES[rule]().of(RuleContext(config, flags, of_rule, mesh))
        for rule, of_rule in names.items()
    }
    more = {
        "cautious": flags.cautious_weight_decay,
        "peak_lr": config.optimizer.lr if flags.weight_decay_follows_lr else None,
    }

    def make(groups: list[Group], defaults: dict[str, Any]) -> Optimizer:
        return RuledOptimizer(groups, rules, defaults | more)

    return OptimizerPlan(kinds, factors, make)


def attach(engine: TrainEngine) -> None:
    """Tell the rules where this rank's partitions of parameters are, and set up the schedule-free
    weights of evaluations and checkpoints."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, RuledOptimizer):
        return
    place_of = places(engine)
    for rule in optimizer.rules.values():
        rule.place_of, rule.divided = place_of, engine.stage > 0
        if isinstance(rule, ScheduleFree):
            engine.switch = switch = Switch(engine, rule)
            rule.on_load = switch.loaded
            engine.view = _view_of(rule)


def _view_of(rule: ScheduleFree) -> Any:
    return lambda main, state: MeanPartition(rule, main, state)
