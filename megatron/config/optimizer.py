"""Optimizer, learning-rate and weight-decay schedules, number formats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.config.flags import FRACTION, NOT_NEGATIVE, POSITIVE, option
from megatron.config.resolver import ConfigResolver, shared
from megatron.config.training import LENGTHS, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class _Optimizer:
    """What is resolved as it is given, but for the lengths of the schedule."""

    optimizer: str = option("adam", choices=("adam", "sgd"))
    """Optimizer; adam is AdamW (decoupled weight decay), as in Megatron."""
    min_lr: float = option(0.0, role="schedule")
    """Learning rate at the end of the decay."""
    lr_decay_style: str = option(
        "linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        role="schedule",
    )
    """Shape of the decay; WSD is warm-up, stable, decay."""
    lr_decay_iters: int | None = option(None, derived="train-iters", role="schedule")
    """Iterations until min-lr."""
    lr_decay_samples: int | None = option(None, derived="train-samples", role="schedule")
    """Samples until min-lr."""
    lr_decay_tokens: int | None = option(None, derived="train-tokens", role="schedule")
    """Tokens until min-lr."""
    lr_warmup_iters: int = option(0, role="schedule")
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = option(0, role="schedule")
    """Samples of linear warm-up."""
    lr_warmup_tokens: int = option(0, role="schedule")
    """Tokens of linear warm-up."""
    lr_warmup_init: float = option(0.0, role="schedule")
    """Learning rate at which warm-up starts."""
    lr_wsd_decay_style: str = option(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"), role="schedule"
    )
    """Shape of the last part of WSD."""
    lr_wsd_decay_iters: int | None = option(None, role="schedule")
    """Iterations of the last part of WSD."""
    lr_wsd_decay_samples: int | None = option(None, role="schedule")
    """Samples of the last part of WSD."""
    lr_wsd_decay_tokens: int | None = option(None, role="schedule")
    """Tokens of the last part of WSD."""
    weight_decay: float = option(0.01, bounds=NOT_NEGATIVE, role="schedule")
    """Decoupled weight decay of matrices; biases and norms have none."""
    weight_decay_incr_style: str = option(
        "constant", choices=("constant", "linear", "cosine"), role="schedule"
    )
    """Shape of the weight-decay schedule."""
    clip_grad: float = option(1.0, bounds=NOT_NEGATIVE)
    """Largest global gradient norm (2-norm); 0 does not clip."""
    adam_beta1: float = option(0.9, bounds=FRACTION)
    """Decay of the first moment."""
    adam_beta2: float = option(0.999, bounds=FRACTION)
    """Decay of the second moment."""
    adam_eps: float = option(1e-8, bounds=POSITIVE)
    """Added to the root of the second moment."""
    sgd_momentum: float = option(0.9, bounds=FRACTION)
    """Momentum of SGD."""


@dataclass(frozen=True, kw_only=True)
class _Rates:
    lr: float | None = option(None, bounds=POSITIVE, role="schedule")
    """Peak learning rate."""
    lr_warmup_fraction: float | None = option(None, role="schedule")
    """Warm-up as a share of the decay length."""
    start_weight_decay: float | None = option(None, role="schedule")
    """Weight decay at the start of its schedule."""
    end_weight_decay: float | None = option(None, role="schedule")
    """Weight decay at the end of its schedule."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags(_Optimizer, _Rates):
    """Optimizer, learning rate and weight decay."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Optimizer):
    """Optimizer, learning rate and weight decay.

    Attributes:
        lr: peak learning rate; 0 where nothing is trained.
        start_weight_decay: weight decay at the start of its schedule.
        end_weight_decay: weight decay at the end of its schedule.
    """

    lr: float = 0.0
    start_weight_decay: float = 0.01
    end_weight_decay: float = 0.01


def resolve_optimizer(
    flags: OptimizerFlags, training: TrainingConfig, resolver: ConfigResolver
) -> OptimizerConfig:
    """Optimizer and schedules that flags ask for.

    Raises:
        ConfigError: the learning rate is missing, or they contradict each other.
    """
    if not training.skip_train:
        resolver.require(lr=flags.lr)
    lengths = _lengths(flags, training, resolver)
    if flags.lr is not None:
        resolver.check(
            flags.min_lr <= flags.lr, f"{resolver.show('min_lr')} is above {resolver.show('lr')}"
        )
    decay, constant = flags.weight_decay, flags.weight_decay_incr_style == "constant"
    for name, value in (
        ("start_weight_decay", flags.start_weight_decay),
        ("end_weight_decay", flags.end_weight_decay),
    ):
        resolver.check(
            not constant or value in (None, decay),
            f"{resolver.show(name)} differs from {resolver.show('weight_decay')}; that needs "
            "--weight-decay-incr-style linear or cosine",
        )
    start, end = flags.start_weight_decay, flags.end_weight_decay
    return OptimizerConfig(
        **shared(flags, _Optimizer) | lengths,
        lr=flags.lr or 0.0,
        start_weight_decay=resolver.fill("start_weight_decay", start, decay, "weight-decay"),
        end_weight_decay=resolver.fill("end_weight_decay", end, decay, "weight-decay"),
    )


def _lengths(
    flags: OptimizerFlags, training: TrainingConfig, resolver: ConfigResolver
) -> dict[str, Any]:
    """The lengths of warm-up and decay that are derived, by field."""
    unit, length = training.length
    for other in LENGTHS:
        for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
            resolver.check(
                other == unit or not getattr(flags, name),
                f"{resolver.show(name)} goes with --train-{other}, but the run's length is "
                f"{resolver.show(f'train_{unit}')}; give "
                f"--{name.replace(other, unit).replace('_', '-')}",
            )
    decay, warmup = f"lr_decay_{unit}", f"lr_warmup_{unit}"
    found: dict[str, Any] = {}
    span, share = getattr(flags, decay), flags.lr_warmup_fraction
    if length is not None:
        span = found[decay] = resolver.fill(decay, span, length, f"train-{unit}")
    resolver.check(
        share is None or not getattr(flags, warmup),
        f"{resolver.show('lr_warmup_fraction')} contradicts {resolver.show(warmup)}",
    )
    if share is not None and span is not None:
        resolver.check(0 <= share < 1, f"{resolver.show('lr_warmup_fraction')} must be in [0, 1)")
        how = f"lr-warmup-fraction x lr-decay-{unit}"
        found[warmup] = resolver.put(warmup, int(share * span), how)
    return found


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision: number formats and loss scaling."""

    fp16: bool = option(False, role="layout")
    """Train in float16 with loss scaling, float32 main weights."""
    bf16: bool = option(False, role="layout")
    """Train in bfloat16, float32 main weights."""
    loss_scale: float | None = option(None, derived="dynamic", bounds=POSITIVE)
    """Fixed loss scale for fp16."""
    initial_loss_scale: float = option(2.0**32)
    """First value of the dynamic loss scale, a power of two."""
    min_loss_scale: float = option(1.0, bounds=POSITIVE)
    """Lowest dynamic loss scale."""
    loss_scale_window: int = option(1000, bounds=POSITIVE)
    """Steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = option(2, bounds=POSITIVE)
    """Overflows that are let pass before the dynamic loss scale halves."""
    accumulate_allreduce_grads_in_fp32: bool = option(False)
    """Accumulate and reduce gradients in float32 (JSON: data_types.grad_accum_dtype)."""

    def check(self, zero_stage: int, resolver: ConfigResolver) -> None:
        """Refuses values that contradict each other, and notes what has no effect.

        Raises:
            ConfigError: naming flags and values.
        """
        resolver.check(not (self.fp16 and self.bf16), "--fp16 contradicts --bf16")
        resolver.check(
            self.loss_scale is None or self.fp16,
            f"{resolver.show('loss_scale')} has an effect with --fp16 only",
        )
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
