"""Names of a run's metrics, and their form in logs.

The code that computes a metric records it: ``record("queue_seconds", seconds, "mean", "s")``. The
log line, the JSON lines and the trackers then show it. :data:`METRICS` lists metrics whose label or
tag is not the default, in the order on which readers of logs and files rely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

Reduce = Literal["last", "mean", "sum", "max", "count", "not finite", "rate"]
"""Reduction over the steps of a log interval. "mean" is over the finite values, "count" is a
rounded sum, "not finite" is the number of non-finite values, and "rate" is the sum per second."""
Show = str | Callable[[Mapping[str, Any]], str]

CLOCKS = ("iteration", "consumed_samples", "consumed_tokens")
"""Names of the values that give a row's position in the run."""
TASK_COSTS = ("examples", "seconds", "tokens_per_second", "share_of_time")
"""Values in ``task`` rows that describe the evaluation itself, besides the task's metrics."""


@dataclass(frozen=True)
class RunMetric:
    """Metric of a training run, and how it is shown.

    Attributes:
        name: name in the JSON lines.
        label: name on the console; empty for a metric that log lines omit.
        show: format of ``scale`` times the value, or a function of all values in the line.
        tag: name in trackers. An empty tag is ``name`` with hyphens; None leaves the metric out.
        curve: whether model reports plot it; False for speed and schedules.
    """

    name: str
    unit: str = ""
    reduce: Reduce = "last"
    label: str = ""
    show: Show = ".6g"
    scale: float = 1
    tag: str | None = ""
    curve: bool = False

    def field(self, values: Mapping[str, Any]) -> str:
        """Return the metric's field in a log line with these values."""
        show = self.show
        text = f"{values[self.name] * self.scale:{show}}" if isinstance(show, str) else show(values)
        return f"{self.label}: {text}"


def _money(value: float) -> str:
    return f"{value:.2f}" if value >= 10 else f"{value:.3g}"


def _between_ranks(values: Mapping[str, Any]) -> str:
    fastest, slowest = values["own_seconds_fastest"], values["own_seconds_slowest"]
    return f"{1000 * fastest:.1f} to {1000 * slowest:.1f}"


_TABLE = (
    RunMetric("seq_length", "tokens", "last", "curriculum seqlen", "5.0f", tag=None),
    # Sequence length in layers that drop tokens, and its mean over all layers.
    RunMetric(
        *("random_ltd_reserved_length", "tokens", "last", "random ltd reserved length", "5.0f"),
        tag=None,
    ),
    RunMetric("actual_seq_length", "tokens", "last", "actual seqlen", "5.0f", tag=None),
    RunMetric(
        "trained_tokens_per_second", "1/s", "rate", "trained tokens per second", ".1f", tag=None
    ),
    # Time that a rank computes in a step, excluding waits for other ranks.
    RunMetric("slowest_rank", label="slowest rank", show="d"),
    RunMetric("own_seconds_slowest", "s", tag="own-time-slowest-rank"),
    RunMetric("own_seconds_median", "s", tag="own-time-median-rank"),
    RunMetric(
        "own_seconds_fastest",
        "s",
        label="own time of ranks (ms)",
        show=_between_ranks,
        tag="own-time-fastest-rank",
    ),
    RunMetric("loss", "nat", "mean", tag="lm loss", curve=True),
    RunMetric("grad_norm", label="grad norm", show=".3f", curve=True),
    RunMetric("learning_rate", label="learning rate", show=".3E", curve=True),
    RunMetric("weight_decay"),
    RunMetric("global_batch_size", "samples", "last", "global batch size", "5d", tag="batch-size"),
    RunMetric("loss_scale", label="loss scale", show=".1f"),
    RunMetric("skipped_steps", "", "count", "number of skipped iterations", "3d", tag=None),
    RunMetric("nan_steps", "", "not finite", "number of nan iterations", "3d", tag=None),
    RunMetric(
        "seconds_per_iteration",
        "s",
        label="elapsed time per iteration (ms)",
        show=".1f",
        scale=1000,
        tag="iteration-time",
    ),
    RunMetric("samples_per_second", "1/s", "rate", "samples per second", ".3f"),
    RunMetric("tokens_per_second_per_device", "1/s", "rate", "tokens per second per device", ".1f"),
    RunMetric(
        "tflops_per_device", "TFLOP/s", "rate", "TFLOP/s per device", ".3f", tag="throughput"
    ),
    # FLOP/s as a share of the devices' peak: the model's own FLOPs, and including recomputation.
    RunMetric("mfu", "", "rate", "MFU", ".1%"),
    RunMetric("hfu", "", "rate", "HFU", ".1%"),
    RunMetric(
        "memory_allocated_bytes",
        "bytes",
        label="memory (GiB)",
        show=".2f",
        scale=2**-30,
        tag="mem-max-allocated-bytes",
    ),
    RunMetric("memory_reserved_bytes", "bytes", tag="mem-max-reserved-bytes"),
    RunMetric(
        "gradient_noise_scale", "samples", label="gradient noise scale", show=".3g", curve=True
    ),
    RunMetric("num_zeros", label="num zeros", show=".1f", curve=True),
    RunMetric("params_norm", label="params norm", show=".3f", curve=True),
    RunMetric(
        "seconds_left",
        "s",
        label="time left",
        show=lambda values: str(timedelta(seconds=round(values["seconds_left"]))),
    ),
    # Worst expert layer: tokens of the fullest expert over the mean, entropy of shares over its
    # maximum, share of choices beyond the capacity. Then the total of idle experts.
    RunMetric("experts_max_over_mean", label="experts max/mean", show=".2f"),
    RunMetric("experts_entropy"),
    RunMetric("experts_dropped_share", label="experts dropped", show=".1%"),
    RunMetric("experts_idle", "experts"),
    # Totals including earlier starts of the run. Money is in the currency of the device price.
    RunMetric("energy_joules", "J", label="energy (kWh)", show=".4g", scale=1 / 3.6e6),
    RunMetric("devices_joules", "J", tag=None),
    RunMetric("processors_joules", "J", tag=None),
    RunMetric("device_seconds", "s", tag=None),
    RunMetric("cost", label="cost", show=lambda values: _money(values["cost"])),
    RunMetric("co2_grams", "g", label="CO2 (kg)", show=".4g", scale=1 / 1000),
    RunMetric("cost_left", label="cost to finish", show=lambda values: _money(values["cost_left"])),
)
METRICS = {metric.name: metric for metric in _TABLE}
"""Metrics by name, in the order of the JSON lines. Named losses follow ``loss``."""
# Other metrics follow at the end of lines, rows and tags.
_BEFORE_LOSSES = ("seconds_per_iteration", "learning_rate", "global_batch_size")
_AFTER_LOSSES = (
    *("loss_scale", "grad_norm", "num_zeros", "params_norm", "seq_length"),
    *("random_ltd_reserved_length", "actual_seq_length"),
    *("skipped_steps", "nan_steps", "samples_per_second", "tokens_per_second_per_device"),
    *("trained_tokens_per_second", "tflops_per_device", "mfu", "hfu", "memory_allocated_bytes"),
    *("experts_max_over_mean", "experts_dropped_share"),
    *("slowest_rank", "own_seconds_fastest", "seconds_left"),
    *("energy_joules", "co2_grams", "cost", "cost_left"),
)


@dataclass(frozen=True)
class IntervalMetrics:
    """Metrics for one log line. Sizes are from the last step, memory is this process's peak, and
    consumed counts are totals since the start of the run.

    Attributes:
        train_iters: iterations for which data are prepared; --train-tokens may end a run earlier.
        losses: means by name over the steps with a finite loss; NaN if no step has one.
        values: values by metric name; None if unknown.
        metrics: definitions of these metrics, by name.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    devices: int
    losses: Mapping[str, float]
    values: dict[str, Any]
    metrics: Mapping[str, RunMetric]

    def line(self) -> str:
        """Return the console line, worded as in Megatron since scripts search for its text."""
        others = (name for name in self.values if name not in METRICS)
        fields = [
            self._position(),
            f"consumed samples: {self.consumed_samples:12d}",
            f"consumed tokens: {self.consumed_tokens:12d}",
            *self._fields(*_BEFORE_LOSSES),
            *self._losses(),
            *self._fields(*_AFTER_LOSSES, *others),
        ]
        return " " + " | ".join(fields) + " |"

    def short_line(self) -> str:
        """Return a shorter, readable console line with the same names. Losses come first, and
        values that hardly change or need an explanation are omitted. :meth:`row` has all values."""
        rate = self.values["tokens_per_second_per_device"] * self.devices
        bad = [name for name in ("skipped_steps", "nan_steps") if self.values[name]]
        fields = [
            self._position(),
            *self._losses(),
            *self._fields("learning_rate"),
            f"consumed samples: {self.consumed_samples}",
            *self._fields("grad_norm", "experts_max_over_mean"),
            *(f"{METRICS[name].label}: {self.values[name]}" for name in bad),
            *self._fields("seconds_per_iteration"),
            f"tokens per second: {rate:,.0f}",
            *self._fields("mfu", "seconds_left"),
        ]
        return " | ".join(fields) + " |"

    def row(self) -> dict[str, float | None]:
        """Return the values by name, for writers. If there is one loss, it is named ``loss``."""
        names = list(METRICS)
        place = names.index("loss") + 1
        names[place:place] = self.losses if len(self.losses) > 1 else ()
        values = {**self.values, **self.losses}
        return {name: values[name] for name in (*names, *self.values) if name in values}

    def _position(self) -> str:
        return f"iteration {self.iteration:8d}/{self.train_iters:8d}"

    def _losses(self) -> Iterator[str]:
        return (f"{name}: {loss:.6E}" for name, loss in self.losses.items())

    def _fields(self, *names: str) -> Iterator[str]:
        for name in names:
            if self.values.get(name) is not None:
                yield self.metrics[name].field(self.values)


class WrittenText(NamedTuple):
    """Text that the model generated for a prompt, and the corresponding text in the data, or "".
    ``ended`` tells whether the model ended the answer by itself."""

    prompt: str
    answer: str
    reference: str
    ended: bool


@dataclass(frozen=True)
class WrittenTexts:
    """Texts that the model generated after ``iteration`` steps."""

    iteration: int
    texts: tuple[WrittenText, ...]
