"""What is reported, where."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.config.flags import POSITIVE, option
from megatron.config.resolver import ConfigResolver


@dataclass(frozen=True)
class LoggingConfig:
    """Logging: what is reported, where."""

    log_interval: int = option(100, bounds=POSITIVE)
    """Steps between log lines."""
    metrics_file: str | None = option(None, derived="metrics.jsonl in --save, if that is given")
    """JSON-lines file of metrics."""
    peak_tflops: float | None = option(None, derived="the accelerator's, or measured on CPU")
    """Peak TFLOP/s of one device, for the FLOP utilisation in the log."""
    tensorboard_dir: str | None = option(None)
    """Folder for TensorBoard."""
    tensorboard_log_interval: int = option(1)
    """Steps between TensorBoard points."""
    tensorboard_queue_size: int = option(1000)
    """TensorBoard events held before they are written."""
    log_timers_to_tensorboard: bool = option(False)
    """Write step times to TensorBoard."""
    log_batch_size_to_tensorboard: bool = option(False)
    """Write the global batch size to TensorBoard."""
    log_learning_rate_to_tensorboard: bool = option(
        True, off="--no-log-learnig-rate-to-tensorboard", flag="--log-learning-rate-to-tensorboard"
    )
    """Write the learning rate to TensorBoard (the off flag's spelling is Megatron's)."""
    log_loss_scale_to_tensorboard: bool = option(
        True, off="--no-log-loss-scale-to-tensorboard", flag="--log-loss-scale-to-tensorboard"
    )
    """Write the loss scale to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = option(False)
    """Write validation perplexity to TensorBoard."""
    log_memory_to_tensorboard: bool = option(False)
    """Write memory use to TensorBoard."""
    wandb_project: str | None = option(None)
    """Weights & Biases project; turns its writer on."""
    wandb_exp_name: str | None = option(None)
    """Weights & Biases run name."""
    wandb_save_dir: str | None = option(None)
    """Folder of Weights & Biases' local files."""
    wandb_entity: str | None = option(None)
    """Weights & Biases team or user."""


def resolve_logging(
    flags: LoggingConfig, save: str | None, resolver: ConfigResolver
) -> LoggingConfig:
    """What flags ask to report, in a run with these checkpoints."""
    if flags.metrics_file is not None or save is None:
        return flags
    file = resolver.put("metrics_file", f"{save.rstrip('/')}/metrics.jsonl", "in --save")
    return replace(flags, metrics_file=file)
