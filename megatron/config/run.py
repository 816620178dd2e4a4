"""The whole configuration of a run: built from settings, completed, checked, explained."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.derive import Draft, derive
from megatron.config.engine import EngineConfig, LegacyFlags
from megatron.config.fast_paths import FastPathsConfig
from megatron.config.flags import ConfigError, Settings, build, flag_of
from megatron.config.kinds import KindConfig, kind_classes
from megatron.config.layouts import Layout, check_layout
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.profiling import ProfilingConfig, check_profiling
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig

Kind = TypeVar("Kind", bound=KindConfig)


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run, one part per concern.

    Attributes:
        kinds: the flags of every kind of data, in the order of :func:`kind_classes`; those left out
            have their defaults. :meth:`kind` gives one by its class.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fast_paths: FastPathsConfig = field(default_factory=FastPathsConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    kinds: tuple[KindConfig, ...] = ()
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        given = {type(kind): kind for kind in self.kinds}
        kinds = tuple(given.pop(cls) if cls in given else cls() for cls in kind_classes().values())
        assert not given, given
        object.__setattr__(self, "kinds", kinds)

    def kind(self, cls: type[Kind]) -> Kind:
        """The flags of one kind of data."""
        return next(kind for kind in self.kinds if type(kind) is cls)  # type: ignore[return-value]

    def with_kind(self, kind: KindConfig) -> RunConfig:
        """The same run with other flags of one kind of data."""
        others = (other for other in self.kinds if type(other) is not type(kind))
        return dataclasses.replace(self, kinds=(kind, *others))

    def part(self, name: str) -> Any:
        """A part by its name, that of its section in a saved configuration."""
        cls = kind_classes().get(name)
        return getattr(self, name) if cls is None else self.kind(cls)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The configuration as plain JSON values, one object per part."""
        return {name: dataclasses.asdict(self.part(name)) for name in PARTS}

    @classmethod
    def from_dict(cls, parts: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """The inverse of :meth:`to_dict`; fields that a part lacks keep their defaults."""
        built = {}
        for part, part_class in PARTS.items():
            hints = typing.get_type_hints(part_class)
            built[part] = part_class(
                **{
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in parts.get(part, {}).items()
                    if name in hints
                }
            )
        return cls.of(built)

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> RunConfig:
        """The configuration that has these parts, by their names."""
        kinds = tuple(parts[name] for name in kind_classes())
        return cls(**{n: part for n, part in parts.items() if n not in kind_classes()}, kinds=kinds)

    def with_vocabulary(self, vocab_size: int) -> RunConfig:
        """Fills in the size of the token table, padded so that every rank holds equal shares."""
        multiple = (
            self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        )
        padded = -(-vocab_size // multiple) * multiple
        return dataclasses.replace(
            self,
            model=dataclasses.replace(
                self.model, unpadded_vocab_size=vocab_size, padded_vocab_size=padded
            ),
        )


def _parts() -> Iterator[tuple[str, type]]:
    for name, cls in typing.get_type_hints(RunConfig).items():
        yield from kind_classes().items() if name == "kinds" else ((name, cls),)


PARTS: Mapping[str, type] = types.MappingProxyType(dict(_parts()))
"""The class of each part of a :class:`RunConfig` by the part's name."""

CONFIG_CLASSES: tuple[type, ...] = tuple(PARTS.values())
"""The config classes of a training run, in the order in which --help shows their groups."""

FLAG_CLASSES: tuple[type, ...] = (*CONFIG_CLASSES, LegacyFlags)
"""All classes whose fields are flags of the training commands."""


@dataclass(frozen=True)
class Resolved:
    """A complete configuration with the origin of every value.

    Attributes:
        config: the configuration.
        origins: origin of each field by name: ``default``, ``flag --x``, ``file.json: key``,
            ``derived: how`` or ``checkpoint``.
        notes: lines for the user about flags that have another effect than they might expect.
    """

    config: RunConfig
    origins: Mapping[str, str]
    notes: tuple[str, ...]


def resolve(settings: Settings, world_size: int) -> Resolved:
    """Completes and checks the settings of a run.

    Args:
        settings: values from flags, the DeepSpeed JSON and a checkpoint, by field name.
        world_size: number of processes.

    Raises:
        ConfigError: a required value is missing, values contradict each other, or there is no such
            layout.
    """
    fields = {f.name: f for cls in CONFIG_CLASSES for f in dataclasses.fields(cls)}
    draft = Draft(
        values={
            name: settings[name].value if name in settings else f.default
            for name, f in fields.items()
        },
        origins={
            name: settings[name].origin
            if name in settings
            else "derived"
            if f.metadata.get("internal")
            else "default"
            for name, f in fields.items()
        },
        flags={name: flag_of(f) for name, f in fields.items()},
    )
    derive(draft, world_size)
    check_profiling(draft, world_size)
    config = RunConfig.of(
        {
            part: part_class(**{f.name: draft[f.name] for f in dataclasses.fields(part_class)})
            for part, part_class in PARTS.items()
        }
    )
    check_layout(Layout.of(config))
    notes = [
        f"{flag_of(f)} is accepted and not used: {f.metadata['note']}"
        for f in dataclasses.fields(LegacyFlags)
        if f.name in settings
    ]
    return Resolved(config, types.MappingProxyType(draft.origins), (*notes, *draft.notes))


def explain(resolved: Resolved) -> str:
    """Every value with its origin, grouped like --help, one per line."""
    lines = []
    for part, part_class in PARTS.items():
        lines.append(f"[{part}]")
        values = resolved.config.part(part)
        for f in dataclasses.fields(part_class):
            value = getattr(values, f.name)
            lines.append(f"  {f.name:<40} {json.dumps(value):<28} {resolved.origins[f.name]}")
    return "\n".join(lines)


__all__ = [
    "CONFIG_CLASSES",
    "FLAG_CLASSES",
    "ConfigError",
    "Resolved",
    "RunConfig",
    "build",
    "explain",
    "resolve",
]
