"""How long to train, in which batches, when to evaluate and stop."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigError, option
from megatron.config.resolver import ConfigResolver, shared


@dataclass(frozen=True, kw_only=True)
class _Batch:
    micro_batch_size: int | None = option(None, aliases=("--batch-size",), bounds=POSITIVE)
    """Samples that one process takes through the model at once."""
    global_batch_size: int | None = option(
        None, derived="micro-batch-size x data-parallel size", bounds=POSITIVE
    )
    """Samples of one optimizer step over all processes."""


@dataclass(frozen=True, kw_only=True)
class _Training:
    """What is resolved as it is given."""

    rampup_batch_size: tuple[int, int, int] | None = option(None)
    """START INCREMENT SAMPLES: grow the global batch from START by INCREMENT to its full size over
    the first SAMPLES samples."""
    train_iters: int | None = option(None, bounds=POSITIVE)
    """Optimizer steps of the whole run."""
    train_samples: int | None = option(None, bounds=POSITIVE)
    """Samples of the whole run."""
    train_tokens: int | None = option(None, bounds=POSITIVE)
    """Tokens of the whole run."""
    seed: int = option(1234, bounds=NOT_NEGATIVE)
    """Seed of weights, data order and dropout."""
    eval_interval: int = option(1000, bounds=POSITIVE, role="course")
    """Steps between evaluations on the validation split."""
    eval_iters: int = option(100, bounds=NOT_NEGATIVE, role="course")
    """Global batches of one evaluation; 0 turns evaluation off."""
    skip_train: bool = option(False, role="course")
    """Evaluate only."""
    exit_interval: int | None = option(None, bounds=POSITIVE, role="course")
    """Save and exit at a step that is a multiple of this."""
    exit_duration_in_mins: float | None = option(None, bounds=POSITIVE, role="course")
    """Save and exit after this many minutes."""
    check_for_nan_in_loss_and_grad: bool = option(
        True, off="--no-check-for-nan-in-loss-and-grad", flag="--check-for-nan-in-loss-and-grad"
    )
    """Stop when the loss is NaN or infinite; turned off, such steps are skipped and counted."""
    explain_config: bool = option(False, role="course")
    """Print every value with its origin and exit."""


@dataclass(frozen=True, kw_only=True)
class TrainingFlags(_Training, _Batch):
    """Training: batches, length, evaluation, stops."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(_Training):
    """Batches, length, evaluation, stops.

    Attributes:
        micro_batch_size: samples that one process takes through the model at once.
        global_batch_size: samples of one optimizer step over all processes.
    """

    micro_batch_size: int = 1
    global_batch_size: int = 1

    @property
    def length(self) -> tuple[str, int | None]:
        """Unit of the run's length, one of :data:`LENGTHS`, and how many of it; None where nothing
        is trained."""
        given = {unit: getattr(self, f"train_{unit}") for unit in LENGTHS}
        return next(((unit, n) for unit, n in given.items() if n is not None), ("iters", None))


LENGTHS = ("iters", "samples", "tokens")
"""What the length of a run is counted in, as flags call it."""


def resolve_training(
    flags: TrainingFlags, replicas: int, resolver: ConfigResolver
) -> TrainingConfig:
    """Batches and length that flags ask for, of so many data-parallel processes.

    Raises:
        ConfigError: one is missing, or they contradict each other.
    """
    (micro,) = resolver.require(micro_batch_size=flags.micro_batch_size)
    samples = micro * replicas
    whole = resolver.fill(
        "global_batch_size",
        flags.global_batch_size,
        samples,
        "micro-batch-size x data-parallel size",
    )
    if whole % samples:
        lower, upper = whole // samples * samples, -(-whole // samples) * samples
        raise ConfigError(
            f"{resolver.show('global_batch_size')} is not a multiple of "
            f"{resolver.show('micro_batch_size')} x {replicas} data-parallel "
            f"processes = {samples}; the nearest "
            f"{'are ' + str(lower) + ' and' if lower else 'is'} {upper}"
        )
    given = [
        resolver.show(f"train_{unit}")
        for unit in LENGTHS
        if getattr(flags, f"train_{unit}") is not None
    ]
    resolver.check(
        bool(given) or flags.skip_train,
        "missing the length of the run: --train-iters, --train-samples or --train-tokens",
    )
    resolver.check(len(given) < 2, f"{' and '.join(given)}: give one length of the run only")
    return TrainingConfig(
        **shared(flags, _Training), micro_batch_size=micro, global_batch_size=whole
    )
