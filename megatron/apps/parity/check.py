"""Comparison of layouts with a single process, on the user's model and data."""

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
from megatron.config.run import PART_FLAGS
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
"""Config fields that a layout's name sets. Recomputation can be in the name or in a flag, because
one process can recompute too. The decoder's first stage can only be set by a flag."""
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
"""Config fields that a check ignores. It does not save, load, evaluate, log, profile or compile. It
does not use FP8, whose results depend on the layout, or a learning-rate warm-up, which would leave
the weights almost unchanged in a few steps."""
_LENGTHS = {"train_iters", "train_samples", "train_tokens"}
PRECISION = {field.name for field in dataclasses.fields(PART_FLAGS["precision"])}
PRECISION |= {"fp32_residual_connection"}
"""Config fields that contradict or have no effect on a run in float32 or float64."""
_OF_ENGINE = OF_LAYOUTS | _IN_PIPELINES | PRECISION | {"deepspeed_config"}


@dataclass(frozen=True)
class CheckFlags:
    """Flags for the runs of a check. ``layout`` is for a layout's run, without the layout's own
    flags. ``plain`` is for the run on one process and includes the values of the DeepSpeed JSON.
    ``left_out`` are the user's flags that a check ignores."""

    layout: list[str]
    plain: list[str]
    left_out: list[str]


def check_flags(settings: Settings, layouts: Sequence[Layout], steps: int) -> CheckFlags:
    """Return the flags for a check of ``steps`` steps, given the user's flags of pretrain_gpt.py.
    Raises ConfigError if these include a layout's flags, or if the DeepSpeed JSON is invalid."""
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
        # With the default of 2^32, gradients would overflow, and steps be skipped, for a long time.
        values["initial_loss_scale"] = 4096.0
    if not settings.keys() & {"data_path", "train_data_path", "mock_data"}:
        values["mock_data"] = True
        if "tokenizer_type" not in settings:
            values |= {"tokenizer_type": "NullTokenizer", "vocab_size": 255}
    return values


def smallest_batch(layouts: Sequence[Layout], micro_batch_size: int) -> int:
    """Return the smallest global batch size that every layout accepts and that can reveal a
    difference. Each replica needs at least two micro batches, so that gradients are accumulated.
    One process needs at least four, so that they can be summed in several orders."""
    # Only interleaved schedules need a multiple of the pipeline size. Others are hardly affected.
    step = math.lcm(*(micro_batch_size * a.data * a.pipeline for a in layouts))
    fewest = max(
        micro_batch_size * max(4, a.data * max(2, a.fewest_micro_batches)) for a in layouts
    )
    return -(-fewest // step) * step


def _words(settings: Settings) -> list[str]:
    words = []
    for name, setting in settings.items():
        if setting.value is None:
            continue  # "auto" in the JSON: the value is derived
        is_flag = setting.origin.startswith("flag ")
        flag = setting.origin.removeprefix("flag ") if is_flag else flag_of(_FIELDS[name])
        values = setting.value if isinstance(setting.value, tuple) else (setting.value,)
        words += [flag] if isinstance(setting.value, bool) else [flag, *map(str, values)]
    return words


HALF_LOSS = 5e-3
HALF_NORM = 2e-2
"""Allowed relative difference of bf16 or fp16 loss and gradient norm from one process in fp32."""
HALF_GRADIENT = 0.1
"""Allowed difference of bf16 and fp16 gradients in the first step, relative to the parameter's
largest gradient or a tenth of the model's largest, whichever is more."""

ALONE = {"WORLD_SIZE": "1"}  # hides the environment variables of a launcher or Slurm
ATTENTION_OFF = ("--attention-dropout", "0")
HIDDEN_OFF = ("--hidden-dropout", "0")


@dataclass(frozen=True)
class Distance:
    """Largest difference of two runs: absolute for the loss, relative for the gradient norm."""

    loss: float
    norm: float


@dataclass(frozen=True)
class Outcome:
    """Result of comparing a layout with one process.

    Attributes:
        status: ``equal``, ``different``, ``refused`` or ``failed``.
        reason: why the layout was refused or failed, or the first difference.
        resolved: full name of the layout, including settings from the DeepSpeed JSON.
        dropout_off: dropout that was turned off, because its masks differ from those of one
          process.
        allowed: largest allowed difference. In the first step in fp32, a relative difference of
          at most 1e-6 is allowed.
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
    """Training on one process, with its rounding noise, and the parameters after its first step."""

    record: RunRecord
    noise: Drift
    first: dict[str, WholeParameter]


class Checker:
    """Comparison of one model's layouts with one process. Raises ValueError or OSError on bad
    flags."""

    def __init__(self, flags: CheckFlags) -> None:
        self._flags = flags
        with environment(ALONE):
            self.config = parse_run(None, flags.plain).config
        self._plain_gradients = cache(_plain_gradients)
        self._plain_training = cache(_plain_training)

    def check(self, name: str, layout: Layout) -> Outcome:
        """Compare one step in float64, then a training run through the engine. Raises ValueError or
        OSError if the run on one process fails too, because data or training flags are invalid."""
        argv = [*self._flags.layout, *flags_for(layout)]
        try:
            check_layout(layout)
            with environment({"WORLD_SIZE": str(layout.processes)}):
                run = parse_run(None, argv)
        except ConfigError as error:
            return Outcome(name, "refused", str(error))
        # This includes the settings from the DeepSpeed JSON.
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
    """Yield a step in float64, then training, from one process, because starting it is slow."""
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
    training = PlainTraining(argv)
    loss, norm, first = first_step_of(training)
    rest = training.run()
    record = RunRecord([loss, *rest.losses], [norm, *rest.norms])
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
    """Return a description of the first difference in training, or "" if all values agree."""
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
    if layout.precision == "fp32":
        return plain.noise.bounds(plain.record)
    losses = np.abs(plain.record.losses)
    return Drift(HALF_LOSS * losses, np.full_like(losses, HALF_NORM))


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
