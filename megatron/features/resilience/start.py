"""Starting a rank under a guardian (``--inprocess-restart``)."""

from __future__ import annotations

from megatron.config import ConfigError, ParallelFlags, Settings
from megatron.config.flags import build
from megatron.engine.environment import prepare_deepspeed
from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.guardian import Rules, guard
from megatron.run.fingerprint import given_facts


def guarded(settings: Settings, processes: int) -> int:
    """Make this process the guardian of a rank; return the number of processes of the run in each
    trainer that it starts. Raises ConfigError as :func:`guard` does, or if the run has fewer
    processes than it must keep."""
    options = build(ResilienceConfig, settings)
    least = options.inprocess_min_world_size
    if least is not None and least > processes:
        raise ConfigError(
            f"--inprocess-min-world-size {least} is more than the {processes} processes of the run"
        )
    minutes = build(ParallelFlags, settings).distributed_timeout_minutes
    rules = Rules(options.inprocess_max_iterations, least, minutes * 60)

    def prepare() -> None:
        prepare_deepspeed()
        stage = settings.get("zero_stage")
        if "deepspeed_config" in settings or (stage is not None and stage.value == 3):
            # ZeRO 3 imports it, which would take seconds of each restart.
            pass

    return guard(rules, given_facts(settings), prepare)
