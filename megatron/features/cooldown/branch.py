"""Learning rate schedule of a cooldown branch, derived from the schedule of the run that it
continues."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.source import Source
from megatron.config import CheckpointConfig, ConfigError, RunConfig, Setting, Settings
from megatron.config.flags import build
from megatron.config.training import LENGTHS, RUN_LENGTHS
from megatron.features.cooldown.flags import CooldownConfig
from megatron.training.plan import TrainingPlan
from megatron.training.resume import find_origin

_FIXED = (
    *("lr", "decoupled_lr", "lr_decay_style", "lr_warmup_fraction", "lr_warmup_init"),
    *("lr_power_exponent", "lr_power_timescale"),
    *("weight_decay", "weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
    *(f"lr_{part}_{unit}" for part in ("warmup", "decay", "wsd_decay") for unit in LENGTHS),
    *("epochs", *RUN_LENGTHS),
)
"""Flags that follow from the checkpoint. Their values on the command line are those of the earlier
run, and are ignored."""


def with_cooldown(settings: Settings) -> Settings:
    """Return the settings of a run that continues ``--load`` with a decaying learning rate. Flags
    for learning rates and for the length of training, in any unit, are replaced, so that the
    earlier run's command plus ``--cooldown-iters`` starts the branch. Raises ConfigError if
    ``--load`` has no checkpoint to continue, or flags contradict the cooldown."""
    length = settings["cooldown_iters"]
    shown = f"--cooldown-iters {length.value}"
    for name in ("finetune", "reset_iteration", "use_checkpoint_opt_param_scheduler"):
        if name in settings:
            flag = settings[name].origin.removeprefix("flag ")
            raise ConfigError(f"{shown} contradicts {flag}: it continues the run of --load")
    origin = find_origin(build(CheckpointConfig, settings)) if "load" in settings else None
    if origin is None or not origin.continues:
        raise ConfigError(f"{shown} needs --load with a checkpoint: the one to branch off from")
    source = origin.found.open(verify=False)
    if source.run is None or not source.state:
        raise ConfigError(f"{shown}: {source.folder} does not say what schedules its run had")
    values = _schedules(source, source.run, length.value)
    kept = {name: setting for name, setting in settings.items() if name not in _FIXED}
    defaults = {"lr_wsd_decay_style": Setting("minus_sqrt", shown)}
    added = {name: Setting(value, f"derived: {shown}") for name, value in values.items()}
    return defaults | kept | added


def _schedules(source: Source, run: RunConfig, length: int) -> dict[str, Any]:
    """Return the schedule settings of a branch, by field. An interrupted branch keeps its own."""
    if run.section(CooldownConfig).cooldown_iters == length:
        optimizer = run.optimizer
        rates = (optimizer.lr, optimizer.weight_decay, (optimizer.own_rates or (None,))[0])
        end = run.training.train_iters or 0
    else:
        iteration, consumed = source.state["iteration"], source.state["consumed_samples"]
        now = TrainingPlan(run).rates(iteration, consumed)
        rates = (now[0], now[1], now[2] if len(now) > 2 else None)
        if rates[0] <= 0:
            raise ConfigError(
                f"--cooldown-iters {length}: the learning rate of {source.folder} is 0, as its "
                "schedule has ended; --load-tag chooses an earlier checkpoint"
            )
        end = iteration + length
    rate, decay, decoupled = rates
    values = {
        "train_iters": end,
        "lr": rate,
        "lr_decay_style": "WSD",
        "lr_decay_iters": end,
        "lr_wsd_decay_iters": length,
        "weight_decay": decay,
    }
    return values if decoupled is None else values | {"decoupled_lr": decoupled}
