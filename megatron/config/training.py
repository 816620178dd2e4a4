"""How long to train, in which batches, when to evaluate and stop."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option


@dataclass(frozen=True)
class TrainingConfig:
    """Training: batches, length, evaluation, stops."""

    micro_batch_size: int | None = option(None, aliases=("--batch-size",))
    """Samples that one process takes through the model at once."""
    global_batch_size: int | None = option(None, derived="micro-batch-size x data-parallel size")
    """Samples of one optimizer step over all processes."""
    rampup_batch_size: tuple[int, int, int] | None = option(None)
    """START INCREMENT SAMPLES: grow the global batch from START by INCREMENT to its full size over
    the first SAMPLES samples."""
    train_iters: int | None = option(None)
    """Optimizer steps of the whole run."""
    train_samples: int | None = option(None)
    """Samples of the whole run."""
    train_tokens: int | None = option(None)
    """Tokens of the whole run."""
    seed: int = option(1234)
    """Seed of weights, data order and dropout."""
    eval_interval: int = option(1000)
    """Steps between evaluations on the validation split."""
    eval_iters: int = option(100)
    """Global batches of one evaluation; 0 turns evaluation off."""
    skip_train: bool = option(False)
    """Evaluate only."""
    exit_interval: int | None = option(None)
    """Save and exit at a step that is a multiple of this."""
    exit_duration_in_mins: float | None = option(None)
    """Save and exit after this many minutes."""
    check_for_nan_in_loss_and_grad: bool = option(
        True, off="--no-check-for-nan-in-loss-and-grad", flag="--check-for-nan-in-loss-and-grad"
    )
    """Stop when the loss is NaN or infinite; turned off, such steps are skipped and counted."""
    explain_config: bool = option(False)
    """Print every value with its origin and exit."""
