"""What an unattended run does around its steps, as its flags say."""

from __future__ import annotations

from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.unattended.replicas import ReplicaCheck
from megatron.features.resilience.unattended.spikes import (
    OnSpike,
    SpikeGuard,
    SpikeRule,
    stop_at_spike,
)
from megatron.training.context import Order, RunContext
from megatron.training.trainer import Callback


def add_callbacks(context: RunContext, elastic: bool) -> None:
    """Add the callbacks of a run; ``elastic``: torchrun has started its processes."""
    flags, several = context.config.section(ResilienceConfig), context.mesh.world.size > 1
    if several and elastic:
        from megatron.features.resilience.elastic import ElasticNodes, is_elastic

        if is_elastic():
            context.add(Order.LEAVE, ElasticNodes())
    if several:
        from megatron.features.resilience.unattended.stragglers import Stragglers

        compared = Stragglers(flags, context.mesh, context.device, context.report)
        context.add(Order.COMPARE, compared)
    _judge(context)
    replicas = ReplicaCheck(
        context.engine, flags.check_replicas_interval, newest=context.newest_shown
    )
    context.checks.append(replicas.check)
    context.add(Order.JUDGE, replicas)
    if flags.non_persistent_save_interval is not None:
        from megatron.features.resilience.unattended.node_memory import NodeCheckpoints

        context.added(NodeCheckpoints).begin(context.checkpoints)
    if flags.inprocess_restart:
        from megatron.features.resilience.unattended.restarted import restarted

        for callback in restarted(
            context.config, context.checkpoints, context.report, context.origin
        ):
            context.add(Order.RESTART, callback)


def _judge(context: RunContext) -> None:
    """Add what judges steps by those before them: the second look, before their update, and the
    rule of spikes with what follows one."""
    flags, rule = context.config.section(ResilienceConfig), None
    spikes: list[Callback] = []
    if flags.spike_sigma:
        rule = SpikeRule(flags.spike_sigma, flags.spike_window)
        rule.restore(context.origin.spikes)
        act = _on_spike(context, rule)
        spikes.append(SpikeGuard(context.guard, rule, context.checkpoints, act))
        if isinstance(act, Callback):
            spikes.append(act)
    if flags.rerun_on_anomaly != "disabled":
        from megatron.features.resilience.unattended.second_look import SecondLook

        look = SecondLook(context.run, context.engine, context.data, context.report, rule)
        context.add(Order.JUDGE, look)
    for callback in spikes:
        context.add(Order.JUDGE, callback)


def _on_spike(context: RunContext, rule: SpikeRule) -> OnSpike | None:
    """Return what follows the warning of a spike, as ``--on-spike`` says."""
    flags, checkpoints = context.config.section(ResilienceConfig), context.checkpoints
    if flags.on_spike == "stop":
        return stop_at_spike(checkpoints)
    if flags.on_spike != "rollback":
        return None
    from megatron.features.resilience.unattended.rollback import Rollback

    return Rollback(
        flags.spike_rollbacks, rule, checkpoints, context.origin, context.source, context.files
    )
