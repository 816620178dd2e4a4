"""The numbers of a run, each under one name.

The file that computes a number records it: ``record("queue_seconds", seconds, "mean", "s")``. The
log line, the JSON lines and the trackers then show it. :data:`METRICS` lists the numbers whose text
or tag is not the default, in the orders that readers of logs and files rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

Reduce = Literal["last", "mean", "sum", "max", "count", "not finite", "rate"]
"""Over the steps of a log interval: "mean" is of the finite values, "count" a rounded sum, "not
finite" the number of such values, "rate" the sum per second of the interval."""
Show = str | Callable[[Mapping[str, Any]], str]

CLOCKS = ("iteration", "consumed_samples", "consumed_tokens")
"""Position of every row."""
TASK_COSTS = ("examples", "seconds", "tokens_per_second", "share_of_time")
"""Values of rows of the kind ``task`` about the evaluation itself, besides the task's metrics."""


@dataclass(frozen=True)
class RunMetric:
    """A number of training.

    Attributes:
        name: in JSON lines.
        label: on the console; empty for a number that log lines do not show.
        show: format of ``scale`` times the value, or a function of all values of the line.
        tag: in trackers: the name with hyphens if empty, none if None.
        curve: False for a number about speed or schedule, which reports on a model leave out.
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
        """The part of a log line with these values."""
        show = self.show
        text = f"{values[self.name] * self.scale:{show}}" if isinstance(show, str) else show(values)
        return f"{self.label}: {text}"

    @property
    def tracker_tag(self) -> str | None:
        return self.name.replace("_", "-") if self.tag == "" else self.tag


def _money(value: float) -> str:
    return f"{value:.2f}" if value >= 10 else f"{value:.3g}"


def _between_ranks(values: Mapping[str, Any]) -> str:
    fastest, slowest = values["own_seconds_fastest"], values["own_seconds_slowest"]
    return f"{1000 * fastest:.1f} to {1000 * slowest:.1f}"


_TABLE = (
    RunMetric("seq_length", "tokens", "last", "curriculum seqlen", "5.0f", tag=None),
    # Of layers that drop tokens, and in the mean over the layers.
    RunMetric(
        *("random_ltd_reserved_length", "tokens", "last", "random ltd reserved length", "5.0f"),
        tag=None,
    ),
    RunMetric("actual_seq_length", "tokens", "last", "actual seqlen", "5.0f", tag=None),
    RunMetric(
        "trained_tokens_per_second", "1/s", "rate", "trained tokens per second", ".1f", tag=None
    ),
    # Time that ranks needed for a step without waiting for each other.
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
    # Model FLOP/s as a share of the peak of the devices; with recomputed ones.
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
    # Of the layer of experts with the least even use: tokens of the fullest expert, entropy of the
    # shares as a part of the largest, choices beyond the capacity; and experts without tokens.
    RunMetric("experts_max_over_mean", label="experts max/mean", show=".2f"),
    RunMetric("experts_entropy"),
    RunMetric("experts_dropped_share", label="experts dropped", show=".1%"),
    RunMetric("experts_idle", "experts"),
    # Spent over all starts of a run; money in the currency of the price of a device.
    RunMetric("energy_joules", "J", label="energy (kWh)", show=".4g", scale=1 / 3.6e6),
    RunMetric("devices_joules", "J", tag=None),
    RunMetric("processors_joules", "J", tag=None),
    RunMetric("device_seconds", "s", tag=None),
    RunMetric("cost", label="cost", show=lambda values: _money(values["cost"])),
    RunMetric("co2_grams", "g", label="CO2 (kg)", show=".4g", scale=1 / 1000),
    RunMetric("cost_left", label="cost to finish", show=lambda values: _money(values["cost_left"])),
)
METRICS = {metric.name: metric for metric in _TABLE}
"""By name, in the order of the JSON lines; losses that have names follow ``loss``."""
# Numbers that are not listed follow at the end of lines, rows and tags.
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
TAG_ORDER = (
    *("loss", "grad_norm", "num_zeros", "params_norm", "learning_rate", "weight_decay"),
    *("global_batch_size", "loss_scale", "seconds_per_iteration", "samples_per_second"),
    *("tokens_per_second_per_device", "tflops_per_device", "mfu", "hfu"),
    *("memory_allocated_bytes", "memory_reserved_bytes"),
    *("experts_max_over_mean", "experts_entropy", "experts_dropped_share", "experts_idle"),
    *("energy_joules", "co2_grams", "cost", "cost_left", "seconds_left"),
    *("slowest_rank", "own_seconds_slowest", "own_seconds_median", "own_seconds_fastest"),
)


@dataclass(frozen=True)
class IntervalMetrics:
    """The numbers between two log lines. Sizes are those of the last step, memory is the peak of
    this process; consumed counts are since the start of the run.

    Attributes:
        train_iters: iterations that data are prepared for; --train-tokens may end a run earlier.
        losses: means over the steps with a finite loss, NaN if no step has one, by their names.
        values: by name; None if not known.
        metrics: of these names.
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
        """The console line, with the key texts of Megatron that people's scripts look for."""
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
        """The console line for readers: the same names, the losses first, without values that
        hardly change or explain something; :meth:`row` has everything."""
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
        """The values by name, for writers. A single loss is ``loss``."""
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


_MOST_SHOWN = 60
"""Characters of a text on the console."""


class WrittenText(NamedTuple):
    """A text of the model after a prompt, and the text of the data there ("" without one);
    ``ended`` is whether it came to an end by itself."""

    prompt: str
    answer: str
    reference: str
    ended: bool


@dataclass(frozen=True)
class WrittenTexts:
    """The texts of one moment, after ``iteration`` steps."""

    iteration: int
    texts: tuple[WrittenText, ...]

    def line(self) -> str:
        """For the console: the first text, with line breaks as \\n, shortened. The metrics have all
        of them."""
        text = self.texts[0]
        return (
            f"sample 1 of {len(self.texts)} at iteration {self.iteration} | "
            f"prompt: {_short(text.prompt, at_end=True)} | answer: {_short(text.answer)}"
            + ("" if text.ended else " (not ended)")
        )


def _short(text: str, at_end: bool = False) -> str:
    """A text in one line; of a long one its beginning, or ``at_end`` its end."""
    if len(text) > _MOST_SHOWN:
        text = f"...{text[-_MOST_SHOWN:]}" if at_end else f"{text[:_MOST_SHOWN]}..."
    return repr(text)
