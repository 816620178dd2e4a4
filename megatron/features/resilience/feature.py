"""Resilience feature: hangs, replicas, anomalies, spikes, stragglers and restarts."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver, Settings, build
from megatron.features.resilience.flags import ResilienceConfig

if TYPE_CHECKING:
    from megatron.features.resilience.steps.spikes import OnSpike, SpikeRule
    from megatron.training.context import RunContext


class ResilienceFeature(Feature):
    # older_checkpoints deletes checkpoints in memory
    needs = ("agreement", "async_save", "older_checkpoints")
    training_flags = (ResilienceConfig,)
    sections = {"resilience": ResilienceConfig}

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        if "inprocess_restart" not in settings:
            return settings
        from megatron.features.resilience.restart.trainer import from_own_checkpoint

        return from_own_checkpoint(settings)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.section(ResilienceConfig).check(config.checkpoint.save, processes, resolver)

    def start(self, settings: Settings, processes: int) -> int:
        """Make this process the guardian of a rank if ``--inprocess-restart`` is set. A guardian
        forks its trainer, and only the trainer returns from this function. Return the world size,
        which may be smaller than ``processes`` after a restart."""
        restart = settings.get("inprocess_restart")
        if restart is None or not restart.value or "explain_config" in settings:
            return processes
        from megatron.config import ConfigError, ParallelFlags
        from megatron.engine.environment import prepare_deepspeed
        from megatron.features.agreement.facts import given_facts
        from megatron.features.resilience.restart.guardian import Rules, guard

        flags = build(ResilienceConfig, settings)
        least = flags.inprocess_min_world_size
        if least is not None and least > processes:
            raise ConfigError(
                f"--inprocess-min-world-size {least} is more than the {processes} processes of "
                "the run"
            )
        minutes = build(ParallelFlags, settings).distributed_timeout_minutes
        rules = Rules(flags.inprocess_max_iterations, least, minutes * 60)
        return guard(rules, given_facts(settings), prepare_deepspeed)

    def watch(self, config: Any) -> AbstractContextManager[Any]:
        from megatron.features.resilience.watch.watchdog import watchdog_of

        return watchdog_of(config)

    def begin(self, context: RunContext) -> None:
        from megatron.features.resilience.restart.peers import current_generation

        generation = current_generation()
        if generation is not None:
            context.started = generation.started

    def before_load(self, context: RunContext) -> None:
        if context.config.section(ResilienceConfig).non_persistent_save_interval is None:
            return
        from megatron.features.resilience.node_memory.checkpoints import NodeCheckpoints
        from megatron.training.context import Order

        saves = NodeCheckpoints(context.engine, context.check)
        context.source = saves.newest(context.on_disk)
        context.add(Order.SAVE_IN_MEMORY, saves)

    def ready(self, context: RunContext) -> None:
        from megatron.features.resilience.steps.replicas import ReplicaCheck
        from megatron.training.context import Order

        flags = context.config.section(ResilienceConfig)
        if context.mesh.world.size > 1:
            _compare_ranks(context, flags)
        _judge_steps(context, flags)
        replicas = ReplicaCheck(
            context.engine, flags.check_replicas_interval, newest=context.newest_shown
        )
        context.checks.append(replicas.check)
        context.add(Order.JUDGE, replicas)
        if flags.non_persistent_save_interval is not None:
            from megatron.features.resilience.node_memory.checkpoints import NodeCheckpoints

            context.added(NodeCheckpoints).begin(context.checkpoints)
        if flags.inprocess_restart:
            from megatron.features.resilience.restart.trainer import restarted

            for callback in restarted(
                context.config, context.checkpoints, context.report, context.origin
            ):
                context.add(Order.RESTART, callback)


def _compare_ranks(context: RunContext, flags: ResilienceConfig) -> None:
    """Add the callbacks that compare ranks, for runs with more than one rank."""
    from megatron.features.resilience.steps.stragglers import Stragglers
    from megatron.training.context import Order

    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process
        from megatron.features.resilience.restart.trainer import ElasticNodes, is_elastic

        if is_elastic():
            context.add(Order.LEAVE, ElasticNodes())
    compared = Stragglers(flags, context.mesh, context.device, context.report)
    context.add(Order.COMPARE, compared)


def _judge_steps(context: RunContext, flags: ResilienceConfig) -> None:
    """Add the callbacks that judge a step by the preceding steps: the second look, which runs
    before the optimizer update, and spike detection with the ``--on-spike`` action."""
    from megatron.features.resilience.steps.spikes import SpikeGuard, SpikeRule
    from megatron.training.context import Order
    from megatron.training.trainer import Callback

    rule, spikes = None, list[Callback]()
    if flags.spike_sigma:
        rule = SpikeRule(flags.spike_sigma, flags.spike_window)
        rule.restore(context.origin.spikes)
        act = _on_spike(context, flags, rule)
        spikes.append(SpikeGuard(context.guard, rule, context.checkpoints, act))
        if isinstance(act, Callback):
            spikes.append(act)
    if flags.rerun_on_anomaly != "disabled":
        from megatron.features.resilience.steps.second_look import SecondLook

        look = SecondLook(context.run, context.engine, context.data, context.report, rule)
        context.add(Order.JUDGE, look)
    for callback in spikes:
        context.add(Order.JUDGE, callback)


def _on_spike(context: RunContext, flags: ResilienceConfig, rule: SpikeRule) -> OnSpike | None:
    """Return the ``--on-spike`` action that follows a spike warning; None if a run only warns."""
    from megatron.features.resilience.steps.spikes import Rollback, stop_at_spike

    if flags.on_spike == "stop":
        return stop_at_spike(context.checkpoints)
    if flags.on_spike != "rollback":
        return None
    return Rollback(
        flags.spike_rollbacks,
        rule,
        context.checkpoints,
        context.origin,
        context.source,
        context.files,
    )


FEATURE = ResilienceFeature()
