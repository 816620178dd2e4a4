"""Flags for a run's output: checkpoints, logs and metrics."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.config.features import flag_parts
from megatron.config.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    ConfigError,
    ConfigResolver,
    Need,
    needs_value,
    option,
)
from megatron.config.sections import with_parts

_LOAD = needs_value("load")
_LOAD_NOTE = needs_value("load", refused=False)
_WEIGHTS = Need("--load", lambda values: bool(values["load"] or values["pretrained_checkpoint"]))
_SAVE_NOTE = needs_value("save", refused=False)


@with_parts(flag_parts("checkpoint"))
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: what to load, and what to save where and how often."""

    save: str | None = option(None)
    """Folder to save checkpoints in. Without this flag nothing is saved."""
    load: str | None = option(None)
    """Checkpoint to load, or a folder whose newest complete checkpoint is loaded, in this project's
    format or another. If the folder has no checkpoint, training starts from scratch."""
    exit_on_missing_checkpoint: bool = option(False, needs=_LOAD)
    """Fail if --load has no checkpoint, instead of starting from scratch."""
    load_tag: str | None = option(None, needs=_LOAD)
    """Load this checkpoint of --load, for example global_step100, instead of the newest."""
    save_interval: int | None = option(
        None,
        aliases=("--save-iters", "--persistent-save-interval"),
        bounds=POSITIVE,
        needs=_SAVE_NOTE,
    )
    """Number of iterations between checkpoints. The last iteration is always saved."""
    save_init: bool = option(False)
    """Also save before the first iteration, as iteration 0."""
    checkpoint_format: str = option("safetensors", choices=("safetensors", "deepspeed"))
    """Format to save in: safetensors (this project's, which any layout can load) or deepspeed."""
    save_universal: bool = option(False)
    """Also save each checkpoint as a universal checkpoint of DeepSpeed."""
    universal_checkpoint: bool = option(False, needs=_LOAD)
    """Load DeepSpeed's universal checkpoint from a folder with checkpoints in several formats, and
    fail if it has none. Otherwise not needed: --load recognises the format."""
    pretrained_checkpoint: str | None = option(None)
    """Checkpoint with the initial weights, used if --load has no checkpoint. If --load has
    adapters, the base model to which they belong."""
    finetune: bool = option(False, needs=_WEIGHTS)
    """Load only the weights, and start at iteration 0."""
    reset_iteration: bool = option(False, needs=_LOAD)
    """Load weights and optimizer state, but restart at iteration 0 with the first sample."""
    max_failed_saves: int = option(3, bounds=NOT_NEGATIVE, needs=_SAVE_NOTE)
    """Number of consecutive saves that may fail before the run ends; 0 for no limit. A run whose
    last save fails always ends with an error."""
    load_lr_state: bool = option(True, off="--no-load-lr-state", role="course")
    """With --reset-iteration, restart the schedules of learning rate and weight decay. Not needed:
    they depend only on the iteration and always restart."""
    load_optim: bool = option(True, flag="--load-optim", off="--no-load-optim", needs=_LOAD_NOTE)
    """Load optimizer state."""
    load_rng: bool = option(True, flag="--load-rng", off="--no-load-rng", needs=_LOAD_NOTE)
    """Load random states."""
    save_optim: bool = option(True, flag="--save-optim", off="--no-save-optim", needs=_SAVE_NOTE)
    """Save optimizer state."""
    save_rng: bool = option(True, flag="--save-rng", off="--no-save-rng", needs=_SAVE_NOTE)
    """Save random states."""

    @property
    def falls_back(self) -> bool:
        """True if a damaged ``--load`` checkpoint makes a run continue from another one."""
        return False

    def check(self, resolver: ConfigResolver) -> None:
        """Raise ConfigError if values contradict each other."""
        for name in ("save_init", "save_universal"):
            resolver.check(
                self.save is not None or not getattr(self, name),
                f"{resolver.show(name)} needs --save, the folder to save in",
            )
        resolver.check(
            self.reset_iteration or self.load_lr_state,
            "--no-load-lr-state needs --reset-iteration: learning rate and weight decay are "
            "functions of the iteration, and start again with it",
        )
        resolver.check(
            not (self.reset_iteration and self.finetune),
            "--reset-iteration keeps the optimizer state and --finetune does not; give one of them",
        )
        own, form = self.checkpoint_format == "safetensors", resolver.show("checkpoint_format")
        resolver.check(
            own or self.save_optim,
            f"--no-save-optim contradicts {form}: DeepSpeed's folders keep weights and moments "
            "together",
        )


@with_parts(flag_parts("logging"))
@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging: what is reported, and where."""

    log_interval: int = option(100, bounds=POSITIVE)
    """Number of iterations between log lines."""
    metrics_file: str | None = option(None, derived="metrics.jsonl in --save, if that is given")
    """JSON-lines file for the metrics of each log line and evaluation."""


def resolve_logging(
    flags: LoggingConfig, save: str | None, resolver: ConfigResolver
) -> LoggingConfig:
    """Return the logging flags, completed for a run that saves checkpoints in ``save``."""
    if save is None or flags.metrics_file is not None:
        return flags
    file = resolver.put("metrics_file", f"{save.rstrip('/')}/metrics.jsonl", "in --save")
    return replace(flags, metrics_file=file)


def check_output(flag: str, path: str | Path | None) -> None:
    """Create the parent folder of a file that is written at the end of a run. Raises ConfigError if
    the folder cannot be created or written to, or if ``path`` is a folder."""
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot write to {path.parent} ({error.strerror}); choose a folder "
            "with write access"
        ) from None
