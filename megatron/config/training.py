"""Training flags: batch sizes, length, evaluation and precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.features import flag_parts
from megatron.config.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    ConfigError,
    ConfigResolver,
    needs_value,
    option,
    shared,
)
from megatron.config.layouts import StateDtypes
from megatron.config.sections import with_parts

LENGTHS = ("iters", "samples", "tokens")
"""Units in which the length of a run can be given, as in ``--train-iters``."""
RUN_LENGTHS = tuple(f"train_{unit}" for unit in LENGTHS)
"""Fields that give the length of a run."""
_FP16 = needs_value("fp16", refused=False)
_SEEDS = Bounds(lambda value: 0 <= value < 1 << 32, "must be from 0 to 4,294,967,295")
"""Bounds of the seeds that NumPy's generators accept."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    micro_batch_size: int | None = option(None, aliases=("--batch-size",), bounds=POSITIVE)
    """Micro batch size: number of samples per forward pass on one data-parallel rank."""
    global_batch_size: int | None = option(
        None, derived="micro-batch-size x data-parallel size", bounds=POSITIVE
    )
    """Global batch size: number of samples per optimizer step over all ranks. If it exceeds
    micro-batch-size x data-parallel size, gradients are accumulated."""

    def whole_batch(self, micro: int, replicas: int, resolver: ConfigResolver) -> int:
        """Return the global batch size for micro batches of ``micro`` samples on ``replicas``
        data-parallel ranks."""
        how = "micro-batch-size x data-parallel size"
        return resolver.fill("global_batch_size", self.global_batch_size, micro * replicas, how)


@dataclass(frozen=True, kw_only=True)
class _Training:
    """Fields shared by the flags and the resolved configuration."""

    train_iters: int | None = option(None, bounds=POSITIVE)
    """Length of the run in iterations (optimizer steps)."""
    train_samples: int | None = option(None, bounds=POSITIVE)
    """Length of the run in samples, instead of --train-iters."""
    train_tokens: int | None = option(None, bounds=POSITIVE)
    """Length of the run in tokens, instead of --train-iters. Together with --train-iters or
    --train-samples, which then determine the size of the data, it ends the run if it is reached
    first, as in Megatron-DeepSpeed."""
    seed: int = option(1234, bounds=_SEEDS)
    """Random seed of initial weights, data order and dropout."""
    eval_interval: int = option(1000, bounds=POSITIVE, role="course")
    """Number of iterations between evaluations on the validation data."""
    eval_iters: int = option(100, bounds=NOT_NEGATIVE, role="course")
    """Number of global batches per evaluation; 0 turns evaluation off."""
    skip_train: bool = option(False, role="course")
    """Only evaluate; do not train."""
    exit_interval: int | None = option(None, bounds=POSITIVE, role="course")
    """Save and exit at the first iteration that is a multiple of this."""
    exit_duration_in_mins: float | None = option(None, bounds=POSITIVE, role="course")
    """Save and exit after this many minutes."""
    kill_switch_file: str | None = option(None, role="course")
    """Save and exit as soon as this file exists. A run does not start while it exists."""
    check_for_nan_in_loss_and_grad: bool = option(
        True, off="--no-check-for-nan-in-loss-and-grad", flag="--check-for-nan-in-loss-and-grad"
    )
    """Stop when the loss is NaN or infinite. If turned off, such a step is skipped and counted."""
    max_skipped_steps: int = option(50, bounds=NOT_NEGATIVE, role="course")
    """Number of consecutive steps that may be skipped because their gradients are not finite before
    the run ends; 0 for no limit."""
    explain_config: bool = option(False, role="course")
    """Print every value of the configuration with its origin, and exit."""


@with_parts((*flag_parts("batch"), *flag_parts("training")))
@dataclass(frozen=True, kw_only=True)
class TrainingFlags(_Training, _Batch):
    """Training: batches, length, evaluation, exit conditions."""

    def iterations(self, lengths: Sequence[str], resolver: ConfigResolver) -> int | None:
        """Return the run's length in iterations if a flag gives it. ``lengths`` are all given flags
        for the length, as messages show them."""
        return self.train_iters


@with_parts(flag_parts("training"))
@dataclass(frozen=True, kw_only=True)
class TrainingConfig(_Training):
    """Resolved batch sizes, length, evaluation and exit conditions of a run."""

    micro_batch_size: int = 1
    global_batch_size: int = 1

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Global batch sizes in samples, in the order in which the run uses them."""
        return (self.global_batch_size,)

    @property
    def length(self) -> tuple[str, int | None]:
        """Unit of the run's length, one of :data:`LENGTHS`, and the length (None if nothing is
        trained). If several are given, other units take precedence over tokens."""
        numbers = {unit: getattr(self, f"train_{unit}") for unit in LENGTHS}
        return next(((unit, n) for unit, n in numbers.items() if n is not None), ("iters", None))

    @property
    def tokens_end_the_run(self) -> bool:
        """True if ``--train-tokens`` is given in addition to another length."""
        return self.train_tokens is not None and self.length[0] != "tokens"


def resolve_training(
    flags: TrainingFlags, replicas: int, resolver: ConfigResolver
) -> TrainingConfig:
    """Resolve batch sizes and length for ``replicas`` data-parallel ranks. Raises ConfigError."""
    json_key = "train_micro_batch_size_per_gpu in DeepSpeed's JSON"
    (micro,) = resolver.require(json_key, micro_batch_size=flags.micro_batch_size)
    samples = micro * replicas
    whole = flags.whole_batch(micro, replicas, resolver)
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
        "missing the length of the run: --train-iters, --train-samples, --train-tokens or --epochs",
    )
    resolver.check(
        flags.train_iters is None or flags.train_samples is None,
        f"{' and '.join(given)}: give one length of the run only; --train-tokens may be given as "
        "well and ends it",
    )
    iters = flags.iterations(given, resolver)
    return TrainingConfig(
        **shared(flags, TrainingConfig)
        | {"train_iters": iters, "micro_batch_size": micro, "global_batch_size": whole}
    )


@with_parts(flag_parts("precision"))
@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision: dtypes and loss scaling."""

    fp16: bool = option(False, role="layout")
    """Train in float16, with loss scaling and float32 main weights."""
    bf16: bool = option(False, role="layout")
    """Train in bfloat16, with float32 main weights."""
    loss_scale: float | None = option(None, derived="dynamic", bounds=NOT_NEGATIVE)
    """fp16: static loss scale; 0, like the default, means dynamic loss scaling. An fp16 section in
    the DeepSpeed JSON whose loss_scale is missing or 0 overrides this with dynamic loss scaling."""
    initial_loss_scale: float = option(2.0**32, needs=_FP16)
    """fp16: initial dynamic loss scale, a power of two."""
    min_loss_scale: float = option(1.0, aliases=("--min-scale",), bounds=POSITIVE, needs=_FP16)
    """fp16: lowest dynamic loss scale."""
    loss_scale_window: int = option(1000, bounds=POSITIVE, needs=_FP16)
    """fp16: number of iterations without overflow after which the dynamic loss scale is doubled."""
    hysteresis: int = option(2, bounds=POSITIVE, needs=_FP16)
    """fp16: number of overflows before the dynamic loss scale is halved."""
    accumulate_allreduce_grads_in_fp32: bool = option(False, aliases=("--fp32-allreduce",))
    """Accumulate and all-reduce gradients in float32 (data_types.grad_accum_dtype in the DeepSpeed
    JSON)."""

    @property
    def states(self) -> StateDtypes | None:
        """Dtypes of main weights and Adam's moments; None if they are separate float32 tensors."""
        return None

    def _check_scale(self, resolver: ConfigResolver) -> None:
        scale, origin = "loss_scale", resolver.origins["loss_scale"]
        json, instead, flag = origin.partition(": fp16 instead of ")
        if instead and self.fp16:
            resolver.notes.append(
                f"{flag} has no effect: {json} has an fp16 section without a static loss scale, "
                'and the scale is dynamic; write "loss_scale": "auto" there to use the flag'
            )
        elif (instead or self.loss_scale) and not self.fp16:
            under_deepspeed = resolver.values["deepspeed"] or resolver.values["deepspeed_config"]
            message = f"{flag or resolver.show(scale)} has an effect with --fp16 only"
            resolver.check(bool(under_deepspeed), message)
            resolver.notes.append(message)

    def check(self, zero_stage: int, resolver: ConfigResolver) -> None:
        """Raise ConfigError on contradictions, and add notes about flags without effect."""
        resolver.check(not (self.fp16 and self.bf16), "--fp16 contradicts --bf16")
        self._check_scale(resolver)
        resolver.check(
            self.initial_loss_scale >= 1 and math.log2(self.initial_loss_scale).is_integer(),
            f"{resolver.show('initial_loss_scale')} must be a power of two",
        )
        if self.bf16 and zero_stage == 0:
            resolver.notes.append(
                "bf16 at ZeRO stage 0 runs as autocast: float32 weights, bfloat16 matrix products"
            )
        half = self.fp16 or (self.bf16 and zero_stage > 0)
        if self.accumulate_allreduce_grads_in_fp32 and not half:
            resolver.notes.append(
                "--accumulate-allreduce-grads-in-fp32 changes nothing: gradients are float32 anyway"
            )
