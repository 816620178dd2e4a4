"""Optimizer flags: learning rate, weight decay and their schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.features import features, flag_parts
from megatron.config.flags import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    ConfigResolver,
    Need,
    needs_value,
    option,
    shared,
)
from megatron.config.sections import with_parts
from megatron.config.training import LENGTHS, TrainingConfig

STATES = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    **{name: of for each in features().values() for name, of in each.optimizers.items()},
}
"""Names of a parameter's optimizer states, as in torch.optim, by optimizer."""

_POWERS = ("inverse-square-root", "power")
_WSD = needs_value("lr_decay_style", "WSD", *_POWERS)
_POWER = needs_value("lr_decay_style", "power")
_SCALED = needs_value("lr_decay_style", *_POWERS)
_DECAY = Need(
    "a --lr-decay-style other than constant",
    lambda values: values["lr_decay_style"] != "constant",
    refused=False,
)
_WARMUP = Need(
    "--lr-warmup-iters or its like",
    lambda values: any(values[f"lr_warmup_{unit}"] for unit in (*LENGTHS, "fraction")),
)
_ADAM = needs_value("optimizer", *(n for n in STATES if n not in ("sgd", "lion")), refused=False)
_SGD = needs_value("optimizer", "sgd", refused=False)


@with_parts(flag_parts("optimizer"))
@dataclass(frozen=True, kw_only=True)
class _Optimizer:
    """Fields shared by the flags and the resolved configuration, except derived lengths."""

    optimizer: str = option(
        "adam", choices=tuple(STATES), spellings={"adamw": "adam", "dist_muon": "muon"}
    )
    """Optimizer. adam and adamw both mean AdamW (decoupled weight decay), as in Megatron."""
    min_lr: float = option(0.0, role="schedule", needs=_DECAY)
    """Minimum learning rate, reached at the end of the decay."""
    lr_decay_style: str = option(
        "linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "power", "WSD"),
        role="schedule",
    )
    """Shape of the learning-rate decay. WSD means warm-up, stable, decay. power decays with
    --lr-power-exponent. inverse-square-root and power can also end with WSD's decay phase."""
    lr_power_exponent: float = option(-0.51, role="schedule", needs=_POWER)
    """Exponent of --lr-decay-style power; see --lr-power-timescale."""
    lr_power_timescale: int | None = option(
        None,
        derived="the length of the warm-up",
        bounds=POSITIVE,
        role="schedule",
        needs=_SCALED,
    )
    """Timescale of --lr-decay-style inverse-square-root and power, in the unit of the decay: at
    step s the learning rate is lr x ((s - warm-up + timescale) / timescale) ^ exponent."""
    lr_decay_iters: int | None = option(None, derived="train-iters", role="schedule")
    """Number of iterations over which the learning rate decays to --min-lr."""
    lr_decay_samples: int | None = option(None, derived="train-samples", role="schedule")
    """Number of samples over which the learning rate decays to --min-lr."""
    lr_decay_tokens: int | None = option(None, derived="train-tokens", role="schedule")
    """Number of tokens over which the learning rate decays to --min-lr, in runs of any unit."""
    lr_warmup_iters: int = option(0, role="schedule")
    """Number of iterations of linear learning-rate warm-up. Can precede a decay in tokens."""
    lr_warmup_samples: int = option(0, role="schedule")
    """Number of samples of linear learning-rate warm-up. Can precede a decay in tokens."""
    lr_warmup_tokens: int = option(0, role="schedule")
    """Number of tokens of linear learning-rate warm-up."""
    lr_warmup_init: float = option(0.0, role="schedule", needs=_WARMUP)
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: str = option(
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        role="schedule",
        needs=_WSD,
    )
    """WSD: shape of the decay phase."""
    lr_wsd_decay_iters: int | None = option(None, role="schedule", needs=_WSD)
    """WSD: length of the decay phase in iterations."""
    lr_wsd_decay_samples: int | None = option(None, role="schedule", needs=_WSD)
    """WSD: length of the decay phase in samples."""
    lr_wsd_decay_tokens: int | None = option(None, role="schedule", needs=_WSD)
    """WSD: length of the decay phase in tokens."""
    weight_decay: float = option(0.01, bounds=NOT_NEGATIVE, role="schedule")
    """Decoupled weight decay of weight matrices. Biases and norms are not decayed."""
    weight_decay_incr_style: str = option(
        "constant", choices=("constant", "linear", "cosine"), role="schedule"
    )
    """Schedule of the weight decay, from --start-weight-decay to --end-weight-decay."""
    clip_grad: float = option(1.0, bounds=NOT_NEGATIVE)
    """Clip gradients to this global L2 norm; 0 turns clipping off."""
    adam_beta1: float = option(0.9, bounds=FRACTION, needs=_ADAM)
    """Adam: decay rate of the first moment."""
    adam_beta2: float = option(0.999, bounds=FRACTION, needs=_ADAM)
    """Adam: decay rate of the second moment."""
    adam_eps: float = option(1e-8, bounds=POSITIVE, needs=_ADAM)
    """Adam: epsilon added to the square root of the second moment."""
    sgd_momentum: float = option(0.9, bounds=FRACTION, needs=_SGD)
    """SGD: momentum."""

    def schedule_units(self, unit: str) -> tuple[str, str]:
        """Return the units of warm-up and decay in a run whose length is given in ``unit``."""
        decay = "tokens" if self.lr_decay_tokens else unit
        units = (u for u in ("tokens", *LENGTHS) if getattr(self, f"lr_warmup_{u}"))
        return next(units, decay), decay

    @property
    def own_rates(self) -> tuple[float, float] | None:
        """Peak and minimum learning rate of parameters that do not use ``--lr``, or None."""
        return None


@dataclass(frozen=True, kw_only=True)
class _Rates:
    lr: float | None = option(None, aliases=("--learning-rate",), bounds=POSITIVE, role="schedule")
    """Peak learning rate."""
    lr_warmup_fraction: float | None = option(None, aliases=("--warmup",), role="schedule")
    """Length of the warm-up as a fraction of the decay length (such as --lr-decay-iters), or of the
    run's length if the decay is in tokens and the run's length is not."""
    start_weight_decay: float | None = option(None, role="schedule")
    """Weight decay at the start of --weight-decay-incr-style."""
    end_weight_decay: float | None = option(None, role="schedule")
    """Weight decay at the end of --weight-decay-incr-style."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags(_Optimizer, _Rates):
    """Optimizer, learning rate and weight decay."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Optimizer):
    """Resolved optimizer, learning rate (0 if nothing is trained) and weight decay."""

    lr: float = 0.0
    start_weight_decay: float = 0.01
    end_weight_decay: float = 0.01


def resolve_optimizer(
    flags: OptimizerFlags, training: TrainingConfig, resolver: ConfigResolver
) -> OptimizerConfig:
    """Resolve the optimizer and its schedules. Raises ConfigError on contradictions."""
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
    """Return the derived lengths of warm-up and decay, by field name. Raises ConfigError."""
    unit, length = training.length
    _check_units(flags, unit, resolver)
    decay, warmup = f"lr_decay_{unit}", f"lr_warmup_{unit}"
    lengths: dict[str, Any] = {}
    span, share = getattr(flags, decay), flags.lr_warmup_fraction
    if length is not None and flags.schedule_units(unit)[1] == unit:
        span = lengths[decay] = resolver.fill(decay, span, length, f"train-{unit}")
    elif span is None:
        # As in Megatron-DeepSpeed, the fraction is of the run's length if the decay is in tokens.
        span = length
    for other in LENGTHS:
        absolute = f"lr_warmup_{other}"
        resolver.check(
            share is None or not getattr(flags, absolute),
            f"{resolver.show('lr_warmup_fraction')} contradicts {resolver.show(absolute)}",
        )
    if share is not None and span is not None:
        resolver.check(0 <= share < 1, f"{resolver.show('lr_warmup_fraction')} must be in [0, 1)")
        how = f"lr-warmup-fraction x {f'lr-decay-{unit}' if decay in lengths else f'train-{unit}'}"
        lengths[warmup] = resolver.put(warmup, int(share * span), how)
    return lengths


def _check_units(flags: OptimizerFlags, unit: str, resolver: ConfigResolver) -> None:
    """Raise ConfigError if a schedule length is neither in ``unit``, the run's, nor in tokens. If
    tokens are given, other lengths have no effect, as in Megatron-DeepSpeed, and are noted."""
    warmup_unit, decay_unit = flags.schedule_units(unit)
    of_length = f"but the run's length is {resolver.show(f'train_{unit}')}"
    for other in LENGTHS:
        fits = other in (unit, "tokens")
        for name, allowed in (
            (f"lr_decay_{other}", fits),
            (f"lr_warmup_{other}", fits or unit == "tokens"),
            (f"lr_wsd_decay_{other}", fits),
        ):
            resolver.check(
                allowed or not getattr(flags, name),
                f"{resolver.show(name)} goes with --train-{other}, {of_length}; give "
                f"--{name.replace(other, unit).replace('_', '-')}",
            )
        wsd = f"lr_wsd_decay_{other}"
        resolver.check(
            other == decay_unit or not getattr(flags, wsd),
            f"{resolver.show(wsd)}: the decay is in {decay_unit}; give --lr-wsd-decay-{decay_unit}",
        )
        for kind, used in (("decay", decay_unit), ("warmup", warmup_unit)):
            name = f"lr_{kind}_{other}"
            of_fraction = kind == "decay" and flags.lr_warmup_fraction is not None
            if getattr(flags, name) and other != used and not of_fraction:
                resolver.notes.append(
                    f"{resolver.show(name)} has no effect: "
                    f"{resolver.show(f'lr_{kind}_{used}')} is used instead"
                )
