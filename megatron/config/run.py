"""The whole configuration of a run: built from settings, completed, checked, explained."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.curriculum import CurriculumConfig
from megatron.config.data import DataConfig
from megatron.config.derive import Draft, derive
from megatron.config.engine import EngineConfig, LegacyFlags
from megatron.config.fast_paths import FastPathsConfig
from megatron.config.fill_in_the_middle import FimConfig
from megatron.config.flags import ConfigError, Settings, build, flag_of
from megatron.config.instruction import InstructionConfig
from megatron.config.layouts import Layout, check_layout
from megatron.config.logging import LoggingConfig
from megatron.config.masked_data import MaskedDataConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.profiling import ProfilingConfig, check_profiling
from megatron.config.raw_text import RawTextConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run, one part per concern."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fast_paths: FastPathsConfig = field(default_factory=FastPathsConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    raw_text: RawTextConfig = field(default_factory=RawTextConfig)
    instruction: InstructionConfig = field(default_factory=InstructionConfig)
    fill_in_the_middle: FimConfig = field(default_factory=FimConfig)
    masked_data: MaskedDataConfig = field(default_factory=MaskedDataConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The configuration as plain JSON values, one object per part."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, parts: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """The inverse of :meth:`to_dict`; fields that a part lacks keep their defaults."""
        built = {}
        for part, part_class in _parts(cls).items():
            hints = typing.get_type_hints(part_class)
            built[part] = part_class(
                **{
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in parts.get(part, {}).items()
                    if name in hints
                }
            )
        return cls(**built)

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


def _parts(cls: type[RunConfig]) -> dict[str, type]:
    return typing.get_type_hints(cls)


CONFIG_CLASSES: tuple[type, ...] = tuple(_parts(RunConfig).values())
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
    config = RunConfig(
        **{
            part: part_class(**{f.name: draft[f.name] for f in dataclasses.fields(part_class)})
            for part, part_class in _parts(RunConfig).items()
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
    for part, part_class in _parts(RunConfig).items():
        lines.append(f"[{part}]")
        values = getattr(resolved.config, part)
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
