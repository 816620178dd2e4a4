"""Compares layouts with one process, on the user's model and data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from megatron.apps.parity.gradients import (
    GradientRecord,
    SteppedSlice,
    WholeParameter,
    first_difference,
    first_step_difference,
    first_step_of,
    gradient_difference,
    gradients_in,
    reference_gradients,
    stepped_slices,
)
from megatron.apps.parity.layouts import flags_for, short_name
from megatron.apps.parity.ranks import RankError, Ranks, environment
from megatron.apps.parity.runs import (
    Drift,
    PlainTraining,
    RunRecord,
    rounding_noise,
    watched_trainer,
)
from megatron.apps.profiling.flags import ProfilingConfig
from megatron.config import (
    FLAG_CLASSES,
    CheckpointConfig,
    ConfigError,
    LoggingConfig,
    Setting,
    Settings,
)
from megatron.config.engine import FastPathsConfig
from megatron.config.flags import flag_of, names_of
from megatron.config.layouts import Layout, check_layout
from megatron.engine.deepspeed_file import read_json
from megatron.engine.deepspeed_json import merge
from megatron.engine.environment import distributed
from megatron.engine.train_engine import StepResult
from megatron.families import trained_spec
from megatron.features.resilience.flags import ResilienceConfig
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

_FIELDS = {f.name: f for part in FLAG_CLASSES for f in dataclasses.fields(part)}

_IN_PIPELINES = {"pipeline_model_parallel_split_rank"}
OF_LAYOUTS = frozenset(names_of("layout", *FLAG_CLASSES)) - _IN_PIPELINES
"""Config fields that a layout's name sets. (Recomputation can be part of a name or a flag: one
process recomputes as well. Where a decoder starts is a flag: it has no name.)"""
LEFT_OUT = frozenset(
    {
        f.name
        for part in (
            CheckpointConfig,
            LoggingConfig,
            ProfilingConfig,
            FastPathsConfig,
            ResilienceConfig,
        )
        for f in dataclasses.fields(part)
    }
    | set(names_of("course", *FLAG_CLASSES))
    | {name for name in _FIELDS if name.startswith("lr_warmup")}
)
"""Config fields that a check ignores: it does not save, load, evaluate, log, profile or compile; it
does not use fp8, in which layouts differ; and a warm-up would leave the weights of its few steps
almost unchanged."""
_LENGTHS = {"train_iters", "train_samples", "train_tokens"}
_OF_ENGINE = (
    OF_LAYOUTS
    | _IN_PIPELINES
    | {"deepspeed_config", "accumulate_allreduce_grads_in_fp32", "loss_scale"}
)


@dataclass(frozen=True)
class CheckFlags:
    """Flags of the runs of a check: of a layout's run, to which its own are added; of the run on
    one process, including the DeepSpeed JSON's values; and flags of the user that a check
    ignores."""

    layout: list[str]
    plain: list[str]
    left_out: list[str]


def check_flags(settings: Settings, layouts: Sequence[Layout], steps: int) -> CheckFlags:
    """Return the flags of a check of ``steps`` steps from the flags of pretrain_gpt.py. Raises
    ConfigError if a layout's flag is among them, or the DeepSpeed JSON is wrong."""
    for name in settings.keys() & OF_LAYOUTS:
        raise ConfigError(
            f"{settings[name].origin.removeprefix('flag ')}: the layouts to compare are named by "
            "--layouts, as in --layouts tp2,pp2,dp2-zero1"
        )
    if "use_checkpoint_args" in settings:
        raise ConfigError("--use-checkpoint-args: a check loads nothing; give the model's flags")
    kept = {name: s for name, s in settings.items() if name not in LEFT_OUT}
    path = kept["deepspeed_config"].value if "deepspeed_config" in kept else ""
    merged = merge(kept, read_json(path) if path else {}, path, world_size=1)
    added = {
        name: Setting(value, "check")
        for name, value in _defaults(merged, layouts, steps).items()
        if name not in merged
    }
    return CheckFlags(
        layout=_words(kept | added),
        plain=_words({n: s for n, s in (merged | added).items() if n not in _OF_ENGINE}),
        left_out=[settings[name].origin.removeprefix("flag ") for name in settings.keys() - kept],
    )


def _defaults(settings: Settings, layouts: Sequence[Layout], steps: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "exit_interval": steps, "eval_iters": 0, "num_workers": 0, "peak_tflops": 1.0,
        "lr": 1e-3, "micro_batch_size": 1,
    }  # fmt: skip
    micro = settings["micro_batch_size"].value if "micro_batch_size" in settings else 1
    values["global_batch_size"] = smallest_batch(layouts, micro)
    if not settings.keys() & _LENGTHS:
        values["train_iters"] = steps
    if "loss_scale" not in settings:
        # The usual 2^32 overflows for many steps, each of which is skipped.
        values["initial_loss_scale"] = 4096.0
    if not settings.keys() & {"data_path", "train_data_path", "mock_data"}:
        values["mock_data"] = True
        if "tokenizer_type" not in settings:
            values |= {"tokenizer_type": "NullTokenizer", "vocab_size": 255}
    return values


def smallest_batch(layouts: Sequence[Layout], micro_batch_size: int) -> int:
    """Return the smallest global batch that every layout accepts and that can show a difference:
    two micro batches or more for each replica, so that there is a sum over them, and four for one
    process, so that they can be summed in several orders."""
    # Only interleaved pipelines need a multiple of their ranks; it costs the others little.
    step = math.lcm(*(micro_batch_size * a.data * a.pipeline for a in layouts))
    fewest = max(
        micro_batch_size * max(4, a.data * max(2, a.fewest_micro_batches)) for a in layouts
    )
    return -(-fewest // step) * step


def _words(settings: Settings) -> list[str]:
    words = []
    for name, setting in settings.items():
        if setting.value is None:
            continue  # "auto" in the JSON: derived
        is_flag = setting.origin.startswith("flag ")
        flag = setting.origin.removeprefix("flag ") if is_flag else flag_of(_FIELDS[name])
        values = setting.value if isinstance(setting.value, tuple) else (setting.value,)
        words += [flag] if isinstance(setting.value, bool) else [flag, *map(str, values)]
    return words


FIRST_STEP = 1e-6  # allowed relative difference of loss and gradient norm at the first step in fp32
FACTOR = 4
"""Allowed difference afterwards, as a multiple of the effect of rounding on one process: a layout
cuts more sums than the runs that measure it."""
HALF_LOSS = 5e-3
HALF_NORM = 2e-2
"""Allowed relative difference of loss and gradient norm in bf16 and fp16 from one process in
fp32."""
HALF_GRADIENT = 0.1
"""Allowed difference of the gradients of their first step, relative to the larger of the
parameter's largest and a tenth of the model's."""

ALONE = {"WORLD_SIZE": "1"}  # instead of the variables of a launcher or slurm
ATTENTION_OFF = ("--attention-dropout", "0")
HIDDEN_OFF = ("--hidden-dropout", "0")


@dataclass(frozen=True)
class Distance:
    """Largest difference of two runs: of the loss, absolute, and of the gradient norm, relative."""

    loss: float
    norm: float


@dataclass(frozen=True)
class Outcome:
    """The result of comparing a layout.

    Attributes:
        status: ``equal``, ``different``, ``refused`` or ``failed``.
        reason: why it is refused or failed, or what differs first.
        resolved: its full name, with what the DeepSpeed JSON adds.
        dropout_off: the dropout that was turned off, as its masks differ from one process's.
        allowed: the allowed difference; in fp32 at the first step at most 1e-6 relative.
    """

    layout: str
    status: str
    reason: str = ""
    resolved: str = ""
    processes: int = 0
    dropout_off: str = ""
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    plain_losses: tuple[float, ...] = ()
    plain_norms: tuple[float, ...] = ()
    largest: Distance | None = None
    allowed: Distance | None = None


@dataclass(frozen=True)
class PlainRun:
    """Training on one process, with the effect of rounding and the parameters of its first step."""

    record: RunRecord
    noise: Drift
    first: dict[str, WholeParameter]


class Checker:
    """Checks of layouts of one model. Raises ValueError or OSError if the flags are wrong for
    each."""

    def __init__(self, flags: CheckFlags) -> None:
        self._flags = flags
        with environment(ALONE):
            self.config = parse_run(None, flags.plain).config
        self._plain_gradients = cache(_plain_gradients)
        self._plain_training = cache(_plain_training)

    def check(self, name: str, layout: Layout) -> Outcome:
        """Compare one step in float64, then whole steps through the engine. Raises ValueError or
        OSError if one process fails too, because of data or training flags."""
        argv = [*self._flags.layout, *flags_for(layout)]
        try:
            check_layout(layout)
            with environment({"WORLD_SIZE": str(layout.processes)}):
                run = parse_run(None, argv)
        except ConfigError as error:
            return Outcome(name, "refused", str(error))
        # With what the DeepSpeed JSON adds.
        layout = run.config.layout(run.content)
        off = self._dropout_off(layout)
        outcome = Outcome(
            name,
            "equal",
            resolved=short_name(layout),
            processes=layout.processes,
            dropout_off=" and ".join(word.removeprefix("--") for word in off[::2]),
        )
        plain = (*self._flags.plain, *off)
        with environment(ALONE):
            expected, training = self._plain_gradients(plain), self._plain_training(plain)
        with Ranks(layout.processes, _on_each_rank, [*argv, *off]) as ranks:
            try:
                layers = trained_spec(self.config).layers(TensorParallel())
                difference = first_difference(ranks.results(), expected, layers)
                reason = "" if difference is None else f"{difference} (one step in float64)"
            except RankError as error:
                return replace(outcome, status="failed", reason=f"in float64, {error}")
            try:
                results = ranks.results()
            except RankError as error:
                if reason:
                    return replace(outcome, status="different", reason=reason)
                return replace(outcome, status="failed", reason=f"in DeepSpeed's engine, {error}")
        record, parts = results[0][0], [slices for _, slices in results]
        reason = reason or _training_difference(layout, record, parts, training)
        outcome = replace(outcome, status="different" if reason else "equal", reason=reason)
        return _with_numbers(outcome, layout, record, training)

    def _dropout_off(self, layout: Layout) -> tuple[str, ...]:
        model = self.config.model
        off: tuple[str, ...] = ()
        if model.attention.attention_dropout and layout.dropout != "all":
            off += ATTENTION_OFF
        if model.hidden_dropout and layout.dropout == "none":
            off += HIDDEN_OFF
        return off


def _on_each_rank(argv: Sequence[str]) -> Iterator[Any]:
    """Yield a step in float64, then training in the same process, as starting one is slow."""
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        yield gradients_in(run, mesh)
        record, slices = RunRecord(), []

        def watch(result: StepResult) -> None:
            record.add(result)
            if len(record.losses) == 1:
                slices.extend(stepped_slices(trainer.engine, float(result.grad_norm)))

        trainer = watched_trainer(run, mesh, watch)
        trainer.fit()
        yield record, slices


def _plain_gradients(argv: Sequence[str]) -> GradientRecord:
    record = reference_gradients(argv)
    _check_finite([record.loss], [record.norm])
    return record


def _plain_training(argv: Sequence[str]) -> PlainRun:
    training, record = PlainTraining(argv), RunRecord()
    loss, norm, first = first_step_of(training)
    steps = [(loss, norm), *(training.step() for _ in range(training.steps - 1))]
    record.losses, record.norms = map(list, zip(*steps, strict=True))
    _check_finite(record.losses, record.norms)
    return PlainRun(record, rounding_noise(argv, record), first)


def _check_finite(losses: Sequence[float], norms: Sequence[float]) -> None:
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        if not math.isfinite(loss + norm):
            raise ConfigError(
                f"one process by itself has loss {loss} and gradient norm {norm} at step {step}; "
                "choose another --lr or --init-method-std"
            )


def _training_difference(
    layout: Layout, record: RunRecord, ranks: Sequence[Sequence[SteppedSlice]], plain: PlainRun
) -> str:
    """Return the first difference in training, or an empty text."""
    if any(record.skipped):
        step = record.skipped.index(True)
        return (
            f"step {step + 1} was skipped: gradients overflowed at loss scale "
            f"{record.scales[step]:g}; set a smaller --initial-loss-scale"
        )
    if len(record.losses) != len(plain.record.losses):
        return f"{len(record.losses)} steps were trained instead of {len(plain.record.losses)}"
    if layout.precision == "fp32":
        difference = first_step_difference(ranks, plain.first)
    else:
        difference = gradient_difference(ranks, plain.first, HALF_GRADIENT, floor=0.1)
    if difference is not None:
        return f"{difference} (first step through DeepSpeed's engine)"
    drift, bounds = Drift.between([record], plain.record), _bounds(layout, plain)
    for step in range(len(record.losses)):
        for number, distance, allowed in (
            ("loss", drift.losses[step], bounds.losses[step]),
            ("gradient norm", drift.norms[step], bounds.norms[step]),
        ):
            if not distance <= allowed:
                return (
                    f"{number} of step {step + 1}: {distance:.1e} off, {allowed:.1e} allowed "
                    "(gradients and new weights of the first step agree)"
                )
    return ""


def _bounds(layout: Layout, plain: PlainRun) -> Drift:
    losses = np.abs(plain.record.losses)
    if layout.precision != "fp32":
        return Drift(HALF_LOSS * losses, np.full_like(losses, HALF_NORM))
    bounds = Drift(
        np.full_like(losses, FACTOR * plain.noise.losses.max()),
        np.full_like(losses, FACTOR * plain.noise.norms.max()),
    )
    bounds.losses[0] = min(bounds.losses[0], FIRST_STEP * losses[0])
    bounds.norms[0] = min(bounds.norms[0], FIRST_STEP)
    return bounds


def _with_numbers(outcome: Outcome, layout: Layout, record: RunRecord, plain: PlainRun) -> Outcome:
    if len(record.losses) != len(plain.record.losses):
        return outcome
    drift, bounds = Drift.between([record], plain.record), _bounds(layout, plain)
    return replace(
        outcome,
        losses=tuple(record.losses),
        norms=tuple(record.norms),
        plain_losses=tuple(plain.record.losses),
        plain_norms=tuple(plain.record.norms),
        largest=Distance(float(drift.losses.max()), float(drift.norms.max())),
        allowed=Distance(float(bounds.losses.max()), float(bounds.norms.max())),
    )
