"""Output of a run: checkpoints, logs and profiles."""

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
    """Checkpoints: where, how often, what."""

    save: str | None = option(None)
    """Folder to save checkpoints in; without it nothing is saved."""
    load: str | None = option(None)
    """Folder of checkpoints (the newest complete one is loaded) or one checkpoint, in the format of
    this project or another. Training starts from scratch if the folder has no checkpoint."""
    exit_on_missing_checkpoint: bool = option(False, needs=_LOAD)
    """Do not start from scratch if --load has no checkpoint: that is an error."""
    load_tag: str | None = option(None, needs=_LOAD)
    """Load this checkpoint of --load (for example global_step100) instead of the newest."""
    save_interval: int | None = option(
        None,
        aliases=("--save-iters", "--persistent-save-interval"),
        bounds=POSITIVE,
        needs=_SAVE_NOTE,
    )
    """Number of iterations between checkpoints; the last iteration is always saved."""
    save_init: bool = option(False)
    """Also save before the first iteration, as iteration 0."""
    checkpoint_format: str = option("safetensors", choices=("safetensors", "deepspeed"))
    """Format to save in: this project's, which every layout and --load can read, or DeepSpeed's."""
    async_save: bool = option(False)
    """Copy the state to host memory and write it while training continues."""
    save_universal: bool = option(False)
    """Also write each checkpoint as a universal checkpoint of DeepSpeed."""
    universal_checkpoint: bool = option(False, needs=_LOAD)
    """Load DeepSpeed's universal checkpoint from a folder that has checkpoints of several formats;
    refused if it has none. Not needed otherwise: --load recognises the format."""
    pretrained_checkpoint: str | None = option(None)
    """Checkpoint to take the initial weights from when --load has none; where --load has adapters,
    the model that they belong to."""
    finetune: bool = option(False, needs=_WEIGHTS)
    """Load only the weights, and start at iteration 0."""
    reset_iteration: bool = option(False, needs=_LOAD)
    """Load weights and optimizer state, and start at iteration 0 with the first sample."""
    max_failed_saves: int = option(3, bounds=NOT_NEGATIVE, needs=_SAVE_NOTE)
    """Number of saves in a row that may fail until the run ends; 0 for no limit. The last save of a
    run must always succeed."""
    load_lr_state: bool = option(True, off="--no-load-lr-state", role="course")
    """Start the schedules of learning rate and weight decay again with --reset-iteration, as they
    always do here: they are functions of the iteration."""
    load_optim: bool = option(True, flag="--load-optim", off="--no-load-optim", needs=_LOAD_NOTE)
    """Load optimizer state."""
    load_rng: bool = option(True, flag="--load-rng", off="--no-load-rng", needs=_LOAD_NOTE)
    """Load random states."""
    save_optim: bool = option(True, flag="--save-optim", off="--no-save-optim", needs=_SAVE_NOTE)
    """Save optimizer state."""
    save_rng: bool = option(True, flag="--save-rng", off="--no-save-rng", needs=_SAVE_NOTE)
    """Save random states."""
    allow_changed_data: bool = option(False, needs=_LOAD_NOTE)
    """Continue from a checkpoint although files of data, or the models that the run learns from
    (reference, teacher), have other content than when it was saved. Without it that is an error.
    Other paths with the same content are accepted."""

    @property
    def falls_back(self) -> bool:
        """True if a run continues from another checkpoint where that of ``--load`` is damaged."""
        return False

    def check(self, resolver: ConfigResolver) -> None:
        """Refuses values that contradict each other."""
        for name in ("save_init", "async_save", "save_universal"):
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
            own or not self.async_save,
            f"{resolver.show('async_save')} contradicts {form}: training stops while DeepSpeed "
            "writes its folders",
        )
        resolver.check(
            own or self.save_optim,
            f"--no-save-optim contradicts {form}: DeepSpeed's folders keep weights and moments "
            "together",
        )


@with_parts(flag_parts("logging"))
@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging: what is reported, where."""

    log_interval: int = option(100, bounds=POSITIVE)
    """Number of iterations between log lines."""
    metrics_file: str | None = option(None, derived="metrics.jsonl in --save, if that is given")
    """JSON-lines file for the metrics of every log line and evaluation."""
    peak_tflops: float | None = option(None, derived="the accelerator's, or measured on CPU")
    """Peak TFLOP/s of one device, from which the log computes the model FLOP utilisation."""


def resolve_logging(
    flags: LoggingConfig, save: str | None, resolver: ConfigResolver
) -> LoggingConfig:
    """Completes the logging of a run with checkpoints in ``save``."""
    if save is None or flags.metrics_file is not None:
        return flags
    file = resolver.put("metrics_file", f"{save.rstrip('/')}/metrics.jsonl", "in --save")
    return replace(flags, metrics_file=file)


def check_output(flag: str, path: str | Path | None) -> None:
    """Creates the folder of a file that is written at the end. Raises ConfigError if that or
    writing there is not possible, or the path is a folder."""
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
