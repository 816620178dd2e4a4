"""Configuration of curriculum learning, from DeepSpeed's JSON.

The section ``curriculum_learning`` sets the sequence length, and ``data_efficiency`` the sampling.
The configuration stores both as text, which :func:`sequence_lengths` and :func:`data_sampling`
parse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.features import KindConfig
from megatron.config.flags import ConfigError, nearest, option
from megatron.util.json_text import parse_json

SEQUENCE_METRIC = "seqlen_truncate"
"""Metric of ``data_efficiency`` that truncates samples to a length, as in Megatron-DeepSpeed."""
FOLDING_METRIC = "seqlen_reshape"
"""Metric of ``data_efficiency`` that folds samples into rows of a length."""

_SCHEDULE_KEYS = ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
_METRIC_KEYS = (
    "index_to_sample_path", "index_to_metric_path", "difficulty_type", "clustering_type",
    *_SCHEDULE_KEYS,
)  # fmt: skip
LENGTH_MULTIPLE = 8
"""Divisor of all sequence lengths, required by tensor cores."""


@dataclass(frozen=True)
class CurriculumConfig(KindConfig):
    """Curriculum learning: sequence length and difficulty of samples over a run."""

    curriculum_learning: str | None = option(None)
    """Schedule of the sequence length: section "curriculum_learning" of DeepSpeed's JSON."""
    data_efficiency: str | None = option(None)
    """Sampling by difficulty: section "data_efficiency" of DeepSpeed's JSON. It names files of
    tools/analyze_data.py."""

    @property
    def acts(self) -> bool:
        return self.curriculum_learning is not None or self.data_efficiency is not None

    def __post_init__(self) -> None:
        sampling = data_sampling(self)
        sequence_lengths(self)
        both = _enabled(self.curriculum_learning, "curriculum_learning") and sampling
        if both and sampling and sampling.lengths:
            raise ConfigError(
                f"curriculum_learning and the metric {sampling.lengths.name.rpartition('.')[2]} of "
                "data_efficiency both set the sequence length; give one of them"
            )


@dataclass(frozen=True)
class DifficultySchedule:
    """Difficulty as a function of the iteration. ``name`` is the schedule's path in the JSON.

    ``kind`` is ``fixed_linear``, ``fixed_root`` or ``fixed_discrete``. The first two grow from
    ``lowest`` to ``highest`` in ``steps`` steps, in multiples of ``increment``. The growth is the
    fraction of steps done, to the power of 1 / ``root``. A discrete schedule has the values
    ``difficulties``; ``last_steps`` has the last step, from 1, of each value except the last.
    """

    name: str
    kind: str
    lowest: int
    highest: int
    steps: int = 0
    increment: int = 1
    root: float = 1.0
    difficulties: tuple[int, ...] = ()
    last_steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Metric:
    """Metric for the difficulty of samples, with the schedule of its upper limit. The paths are
    prefixes of files: the samples of each value, by ascending value, and these values, which are
    not needed for percentiles."""

    name: str
    schedule: DifficultySchedule
    percentile: bool
    index_to_sample_path: str
    index_to_metric_path: str | None


@dataclass(frozen=True)
class DataSampling:
    """Sampling by difficulty. A sample must be within the limits of all ``metrics``. ``lengths`` is
    the schedule of the sequence length, or None."""

    seed: int
    num_epochs: int
    metrics: tuple[Metric, ...]
    lengths: DifficultySchedule | None


def sequence_lengths(config: CurriculumConfig) -> DifficultySchedule | None:
    """Return the schedule of the sequence length, or None if it is always ``--seq-length``. Raises
    ConfigError if a section is invalid."""
    section = _enabled(config.curriculum_learning, "curriculum_learning")
    if section is None:
        sampling = data_sampling(config)
        return None if sampling is None else sampling.lengths
    section.only("enabled", "curriculum_type", *_SCHEDULE_KEYS)
    section.choice("curriculum_type", "seqlen", default="seqlen")
    return _lengths(section)


def data_sampling(config: CurriculumConfig) -> DataSampling | None:
    """Return the settings of sampling by difficulty, or None if samples have Megatron's order.
    Raises ConfigError if the section is invalid or requires something unavailable."""
    sections = sampling_sections(config)
    if sections is None:
        return None
    section, sampling = sections
    learning = sampling.section("curriculum_learning")
    if not sampling.enabled or not learning.enabled:
        return None
    learning.only("enabled", "data_cluster_path", "curriculum_metrics")
    metrics = learning.section("curriculum_metrics")
    if not metrics.values:
        raise ConfigError(f"{metrics.path}: name at least one metric")
    read = {name: metrics.section(name) for name in metrics.values}
    if {SEQUENCE_METRIC, FOLDING_METRIC} <= read.keys():
        raise ConfigError(
            f"{metrics.path}: {SEQUENCE_METRIC} and {FOLDING_METRIC} both set the sequence length; "
            "give one of them"
        )
    lengths = read.pop(SEQUENCE_METRIC, None) or read.pop(FOLDING_METRIC, None)
    parsed = [_metric(name, metric) for name, metric in read.items()]
    return DataSampling(
        seed=section.whole("seed", least=0, default=1234),
        num_epochs=sampling.whole("num_epochs", default=1000),
        metrics=tuple(metric for metric in parsed if metric is not None),
        lengths=None if lengths is None else _length_metric(lengths),
    )


def sampling_sections(config: CurriculumConfig) -> tuple[Section, Section] | None:
    """Return the section ``data_efficiency`` and its ``data_sampling``, or None if
    ``data_efficiency`` is disabled. Raises ConfigError for unknown keys."""
    section = _enabled(config.data_efficiency, "data_efficiency")
    if section is None:
        return None
    section.only("enabled", "seed", "data_sampling", "data_routing")
    sampling = section.section("data_sampling")
    # DeepSpeed's keys for workers and pinned memory only affect speed. Use --num-workers instead.
    sampling.only(
        "enabled", "num_epochs", "num_workers", "pin_memory", "curriculum_learning",
        "dynamic_batching",
    )  # fmt: skip
    return section, sampling


def token_dropping(config: CurriculumConfig) -> Section | None:
    """Return the section of random layerwise token dropping, or None if it or an enclosing section
    is disabled. Raises ConfigError if an enclosing section is invalid."""
    section = _enabled(config.data_efficiency, "data_efficiency")
    routing = None if section is None else section.section("data_routing")
    if routing is None or not routing.enabled:
        return None
    routing.only("enabled", "random_ltd")
    dropping = routing.section("random_ltd")
    return dropping if dropping.enabled else None


def without_sampling(config: CurriculumConfig) -> CurriculumConfig:
    """Return the configuration without sampling by difficulty; sequence lengths remain."""
    sampling = data_sampling(config)
    if sampling is None or sampling.lengths is None:
        return replace(config, data_efficiency=None)
    section = json.loads(config.data_efficiency or "")
    learning = section["data_sampling"]["curriculum_learning"]
    metric = learning["curriculum_metrics"][sampling.lengths.name.rpartition(".")[2]]
    lengths = {"enabled": True} | {key: metric[key] for key in _SCHEDULE_KEYS}
    return CurriculumConfig(curriculum_learning=json.dumps(lengths, sort_keys=True))


def _enabled(text: str | None, path: str) -> Section | None:
    if text is None:
        return None
    section = Section.parse(text, path)
    return section if section.enabled else None


def _metric(name: str, metric: Section) -> Metric | None:
    metric.only(*_METRIC_KEYS)
    schedule = _schedule(metric)
    percentile = metric.choice("difficulty_type", "value", "percentile") == "percentile"
    if metric.choice("clustering_type", "schedule_based", "single_cluster") == "single_cluster":
        return None
    file = "the path of a file of tools/analyze_data.py, without .bin or .idx"
    values = None if percentile else metric.text("index_to_metric_path", file)
    return Metric(name, schedule, percentile, metric.text("index_to_sample_path", file), values)


def _length_metric(metric: Section) -> DifficultySchedule:
    metric.only(*_METRIC_KEYS)
    # Clustering does not apply, because the length does not select samples.
    metric.choice("clustering_type", "single_cluster", default="single_cluster")
    metric.choice("difficulty_type", "value", default="value")
    return _lengths(metric)


def _lengths(section: Section) -> DifficultySchedule:
    schedule = _schedule(section)
    section.whole("min_difficulty")  # raises an error if it is 0
    if schedule.kind == "fixed_discrete":
        used = {f"schedule_config.difficulty {n}": n for n in schedule.difficulties}
    else:
        if schedule.highest % schedule.increment:
            right = f"a multiple of difficulty_step {schedule.increment}"
            raise section.wrong("max_difficulty", right)
        used = {
            f"schedule_config.difficulty_step {schedule.increment}": schedule.increment,
            f"max_difficulty {schedule.highest}": schedule.highest,
        }
    for key, length in used.items():
        if length % LENGTH_MULTIPLE:
            raise ConfigError(
                f"{section.path}.{key} must be a multiple of {LENGTH_MULTIPLE}, as tensor cores "
                "require"
            )
    return schedule


def _schedule(section: Section) -> DifficultySchedule:
    kinds = ("fixed_linear", "fixed_root", "fixed_discrete")
    if section.values.get("schedule_type") == "custom":
        raise ConfigError(
            f"{section.path}.schedule_type custom is a function that a program passes to "
            f"DeepSpeed's engine; use {' or '.join(kinds)}"
        )
    kind = section.choice("schedule_type", *kinds)
    lowest, highest = section.whole("min_difficulty", least=0), section.whole("max_difficulty")
    if lowest > highest:
        raise section.wrong("min_difficulty", f"at most max_difficulty {highest}")
    values = section.section("schedule_config")
    if kind == "fixed_discrete":
        return _discrete(section, values, lowest, highest)
    root = ("root_degree",) * (kind == "fixed_root")
    values.only("total_curriculum_step", "difficulty_step", *root)
    return DifficultySchedule(
        section.path,
        kind,
        lowest,
        highest,
        steps=values.whole("total_curriculum_step"),
        increment=values.whole("difficulty_step"),
        root=values.positive("root_degree") if root else 1.0,
    )


def _discrete(section: Section, values: Section, lowest: int, highest: int) -> DifficultySchedule:
    values.only("difficulty", "max_step")
    difficulties, last_steps = values.rising("difficulty"), values.rising("max_step")
    if len(difficulties) != len(last_steps) + 1:
        raise values.wrong(
            "max_step", f"the last step of each of the {len(difficulties)} difficulties but one"
        )
    if difficulties[0] < lowest or difficulties[-1] > highest:
        raise values.wrong(
            "difficulty", f"within min_difficulty {lowest}, max_difficulty {highest}"
        )
    return DifficultySchedule(
        section.path,
        "fixed_discrete",
        lowest,
        highest,
        difficulties=difficulties,
        last_steps=last_steps,
    )


class Section:
    """JSON object that is read key by key. ``path`` is its dotted path. Raises ConfigError if
    ``values`` is not an object. Methods raise ConfigError if a value is invalid."""

    def __init__(self, values: Any, path: str) -> None:
        self.path = path
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is {_show(values)}; it must be an object")
        self.values: Mapping[str, Any] = values

    @classmethod
    def parse(cls, text: str, path: str) -> Section:
        try:
            values = parse_json(text, f"{path}: {text[:200]!r}")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return cls(values, path)

    def only(self, *keys: str) -> None:
        for key in self.values:
            if key not in keys:
                hint = nearest(key, keys, "; the nearest known key is {}")
                raise ConfigError(f"{self.path} has no key {key}{hint}")

    def section(self, key: str) -> Section:
        return Section(self.values.get(key, {}), f"{self.path}.{key}")

    @property
    def enabled(self) -> bool:
        return self.switch("enabled")

    def switch(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def choice(self, key: str, *choices: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if value not in choices:
            raise self.wrong(key, " or ".join(choices))
        return str(value)

    def text(self, key: str, what: str) -> str:
        """Return a string. In the error message, ``what`` describes it."""
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, what)
        return value

    def whole(self, key: str, least: int = 1, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or value < least:
            raise self.wrong(key, f"an integer of at least {least}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.wrong(key, "a positive number")
        return float(value)

    def rising(self, key: str) -> tuple[int, ...]:
        values = self.values.get(key)
        if not _rises(values):
            raise self.wrong(key, "a list of increasing positive integers")
        return tuple(values)  # type: ignore[arg-type]

    def wrong(self, key: str, right: str) -> ConfigError:
        """Return the error for an invalid value. ``right`` describes valid ones."""
        value = self.values.get(key)
        return ConfigError(f"{self.path}.{key} is {_show(value)}; it must be {right}")


def _rises(values: Any) -> bool:
    if not isinstance(values, Sequence) or not values or any(type(v) is not int for v in values):
        return False
    return values[0] > 0 and all(a < b for a, b in zip(values, values[1:], strict=False))


def _show(value: Any) -> str:
    return "missing" if value is None else json.dumps(value)
