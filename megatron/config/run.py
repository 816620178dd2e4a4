"""Configuration of a run: resolved from settings, checked, and explained to users."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.config.axes import ParallelFlags
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.engine import (
    EngineConfig,
    EngineFlags,
    FastPathsConfig,
    check_fast_paths,
    resolve_engine,
)
from megatron.config.features import FlagSection, KindConfig, features, section_classes
from megatron.config.flags import (
    ConfigResolver,
    Setting,
    Settings,
    build,
    check_value,
    option,
    type_hints,
)
from megatron.config.layouts import Layout, check_layout
from megatron.config.model import ModelConfig, ModelFlags, resolve_model
from megatron.config.optimizer import OptimizerConfig, OptimizerFlags, resolve_optimizer
from megatron.config.output import CheckpointConfig, LoggingConfig, resolve_logging
from megatron.config.parallel import ParallelConfig, resolve_parallel
from megatron.config.training import (
    PrecisionConfig,
    TrainingConfig,
    TrainingFlags,
    resolve_training,
)
from megatron.util.files import read_sections

Own = TypeVar("Own", bound=FlagSection)


@dataclass(frozen=True)
class RunConfig:
    """Complete configuration of a run, one part per concern.

    ``sections`` contains the flags of every feature, in the order of :func:`section_classes`.
    Sections that are not passed are added with their defaults.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fast_paths: FastPathsConfig = field(default_factory=FastPathsConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sections: tuple[FlagSection, ...] = ()

    def __post_init__(self) -> None:
        given = {type(section): section for section in self.sections}
        complete = tuple(
            given.pop(cls) if cls in given else cls() for cls in section_classes().values()
        )
        assert not given, given
        object.__setattr__(self, "sections", complete)

    def section(self, cls: type[Own]) -> Own:
        """Return the flags of a feature, given their class."""
        return next(s for s in self.sections if type(s) is cls)  # type: ignore[return-value]

    @property
    def kinds(self) -> tuple[KindConfig, ...]:
        """Flags of each kind of data."""
        return tuple(section for section in self.sections if isinstance(section, KindConfig))

    def with_sections(self, *sections: FlagSection) -> RunConfig:
        """Return a copy of the configuration with these sections replaced."""
        changed = {type(section) for section in sections}
        others = (other for other in self.sections if type(other) not in changed)
        return dataclasses.replace(self, sections=(*sections, *others))

    def part(self, name: str) -> Any:
        """Return a part by its name in a saved configuration, including the features' sections."""
        cls = section_classes().get(name)
        return getattr(self, name) if cls is None else self.section(cls)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the configuration as JSON values, one object per part; the model as its flags."""
        parts = {name: self.part(name) for name in PARTS} | {"model": self.model.flags()}
        return {name: dataclasses.asdict(part) for name, part in parts.items()}

    @classmethod
    def from_dict(cls, parts: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """Build the configuration from the result of :meth:`to_dict`. Missing fields get defaults
        and unknown fields are ignored. Raises ConfigError if a value is of the wrong type or none
        of a field's choices, or if the model's values contradict each other."""
        classes = {**PARTS, "model": ModelFlags}
        built = {name: _from_json(part, parts.get(name, {})) for name, part in classes.items()}
        model = built["model"].resolve()
        return cls.of(built | {"model": model})

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> RunConfig:
        """Return a configuration made of these parts and sections, by name."""
        own = section_classes()
        sections = tuple(parts[name] for name in own if name in parts)
        return cls(**{n: part for n, part in parts.items() if n not in own}, sections=sections)

    def with_vocabulary(self, vocab_size: int) -> RunConfig:
        """Return a copy whose token embedding is sized and padded for ``vocab_size`` tokens."""
        model = self.model.with_vocabulary(vocab_size, self.parallel.tensor_model_parallel_size)
        return dataclasses.replace(self, model=model)

    def layout(self, content: Mapping[str, Any] | None = None) -> Layout:
        """Return the run's layout. Offloading is read from the DeepSpeed JSON ``content``."""
        parallel, precision = self.parallel, self.precision
        zero = (content or {}).get("zero_optimization") or {}
        return Layout(
            tensor=parallel.tensor_model_parallel_size,
            sequence=parallel.sequence_parallel,
            pipeline=parallel.pipeline_model_parallel_size,
            schedule=parallel.pipeline_schedule,
            chunks=parallel.num_virtual_stages_per_pipeline_rank,
            data=parallel.data_parallel_size,
            zero=self.engine.zero_stage,
            precision="fp16" if precision.fp16 else "bf16" if precision.bf16 else "fp32",
            grads_in_fp32=precision.accumulate_allreduce_grads_in_fp32,
            states=precision.states,
            recompute=parallel.recomputed[0],
            mlp_act="mlp_act" in parallel.recomputed_modules,
            offload_optimizer=_device(zero, "offload_optimizer"),
            offload_param=_device(zero, "offload_param"),
            micro_batches=self._micro_batches(),
            float8=self.fast_paths.in_8_bits,
            expert=parallel.expert_model_parallel_size,
            expert_tensor=parallel.expert_tensor_parallel_size,
            context=parallel.context_parallel_size,
            comm=() if parallel.cp_comm_type == ("p2p",) else parallel.cp_comm_type,
            exchanging=(*parallel.hierarchical_context_parallel_sizes, 1)[0],
        )

    def _micro_batches(self) -> tuple[int, ...]:
        training = self.training
        if training.skip_train:
            return ()
        each = training.micro_batch_size * self.parallel.data_parallel_size
        # Sizes that do not divide are refused elsewhere.
        return tuple(size // each for size in training.batch_sizes if size % each == 0)


def _device(zero: Mapping[str, Any], key: str) -> str | None:
    device = (zero.get(key) or {}).get("device")
    return None if device in (None, "none") else device


def _from_json(cls: type, values: Mapping[str, Any]) -> Any:
    """Build a part from saved values. In older files, null stands for values that are derived."""
    known = {field.name: field for field in dataclasses.fields(cls)}
    part = cls(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in known and (value is not None or known[name].default is None)
        }
    )
    for name in values.keys() & known.keys():
        check_value(known[name], type_hints(cls)[name], Setting(getattr(part, name), name))
    return part


ACCEPTED = Path(__file__).with_name("accepted_flags.txt")
"""File that lists flags accepted from other trainers' scripts, each with what happens instead."""


def _unused(words: str, note: str) -> tuple[str, Any, Any]:
    """Return a field for ``make_dataclass``. ``words`` consists of a flag and its aliases, or of a
    flag and its value type: INT, FLOAT, STR, STR+, or choices separated by ``|``."""
    flag, *others = words.split()
    name = flag[2:].replace("-", "_").lower()
    if others and not others[0].startswith("-"):
        if others[0] == "STR+":
            return name, tuple[str, ...], option((), flag=flag, note=note)
        kind = {"INT": int, "FLOAT": float}.get(others[0], str)
        choices = [word for word in others[0].split("|") if word] if "|" in others[0] else None
        return name, kind | None, option(None, flag=flag, choices=choices, note=note)
    return name, bool, option(False, flag=flag, aliases=others, note=note)


LegacyFlags = make_dataclass(
    "LegacyFlags",
    [_unused(words, note) for words, note in read_sections(ACCEPTED)["accepted"].items()],
    frozen=True,
    namespace={
        "__doc__": "Accepted from other trainers' scripts, and not used.",
        "__module__": __name__,
    },
)


def _parts() -> Iterator[tuple[str, type]]:
    for name, cls in type_hints(RunConfig).items():
        if name != "sections":
            yield name, cls
            yield from (own for own in section_classes().items() if own[1].after == name)


PARTS: Mapping[str, type] = types.MappingProxyType(dict(_parts()))
"""Class of each part of a :class:`RunConfig`, by name."""


_FLAGS: dict[type, type] = {
    ModelConfig: ModelFlags,
    ParallelConfig: ParallelFlags,
    TrainingConfig: TrainingFlags,
    OptimizerConfig: OptimizerFlags,
    EngineConfig: EngineFlags,
}
"""Flag classes of the parts whose flags must be resolved first."""

PART_FLAGS: dict[str, type] = {name: _FLAGS.get(part, part) for name, part in PARTS.items()}
"""Flag class of each part, by name, in the order of the groups in --help."""

FLAG_CLASSES: tuple[type, ...] = (*PART_FLAGS.values(), LegacyFlags)
"""Classes whose fields are the flags of the training commands."""
FLAG_FIELDS = {
    field.name: (field, types[field.name])
    for part in FLAG_CLASSES
    for types in (type_hints(part),)
    for field in dataclasses.fields(part)
}
"""Field and type of each flag, by field name."""


@dataclass(frozen=True)
class Resolved:
    """Complete configuration with the origin of every value: ``default``, ``flag --x``,
    ``file.json: key``, ``derived: how`` or ``checkpoint``. ``notes`` are lines for the user about
    flags whose effect is unexpected or missing."""

    config: RunConfig
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    notes: tuple[str, ...]

    def with_vocabulary(self, vocab_size: int) -> Resolved:
        """Return a copy with the token embedding's sizes; see :meth:`RunConfig.with_vocabulary`."""
        config = self.config.with_vocabulary(vocab_size)
        rows = {"padded_vocab_size": config.model.vocabulary.padded}
        values = {**self.values, "unpadded_vocab_size": vocab_size, **rows}
        return dataclasses.replace(self, config=config, values=values)


def resolve(settings: Settings, world_size: int) -> Resolved:
    """Resolve and check the settings of a run with ``world_size`` processes. Raises ConfigError if
    a required value is missing, values contradict each other, or the layout is not supported."""
    resolver = ConfigResolver(tuple(PART_FLAGS.values()), settings)
    model = resolve_model(build(ModelFlags, settings), resolver)
    parallel = resolve_parallel(build(ParallelFlags, settings), model, world_size, resolver)
    training = resolve_training(
        build(TrainingFlags, settings), parallel.data_parallel_size, resolver
    )
    precision = build(PrecisionConfig, settings)
    parts: dict[str, Any] = {
        name: build(cls, settings) for name, cls in PARTS.items() if cls not in _FLAGS
    } | {"model": model, "parallel": parallel, "training": training}
    parts["optimizer"] = resolve_optimizer(build(OptimizerFlags, settings), training, resolver)
    parts["logging"] = resolve_logging(parts["logging"], parts["checkpoint"].save, resolver)
    for feature in features().values():
        feature.resolve(parts, world_size, resolver)
    parts["engine"] = resolve_engine(build(EngineFlags, settings), precision, resolver)
    config = RunConfig.of(parts)
    _check(config, world_size, resolver)
    notes = [
        f"{settings[f.name].origin.removeprefix('flag ')} is accepted and not used: "
        f"{f.metadata['note']}"
        for f in dataclasses.fields(LegacyFlags)
        if f.name in settings
    ]
    return Resolved(
        config,
        types.MappingProxyType(resolver.values),
        types.MappingProxyType(resolver.origins),
        (*notes, *resolver.notes),
    )


def _check(config: RunConfig, world_size: int, resolver: ConfigResolver) -> None:
    """Check that parts do not contradict each other. Raises ConfigError if they do."""
    config.precision.check(config.engine.zero_stage, resolver)
    config.data.check(resolver)
    config.checkpoint.check(resolver)
    for feature in features().values():
        feature.check(config, world_size, resolver)
    check_fast_paths(config.fast_paths, config.model, config.parallel, resolver)
    check_layout(config.layout())
    resolver.check_needs()


def explain(resolved: Resolved) -> str:
    """Return the text for ``--explain-config``: one line per value with its origin, by part."""
    lines = []
    for part, cls in PART_FLAGS.items():
        lines.append(f"[{part}]")
        for f in dataclasses.fields(cls):
            value = json.dumps(resolved.values[f.name])
            lines.append(f"  {f.name:<40} {value:<28} {resolved.origins[f.name]}")
    return "\n".join(lines)
