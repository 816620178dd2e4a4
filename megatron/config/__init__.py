"""Configuration of a run: frozen dataclasses, one per concern, whose fields are the flags."""

from megatron.config.axes import ParallelFlags
from megatron.config.blocks import NormConfig
from megatron.config.command_line import FlagParser, parse_configs
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.engine import EngineConfig
from megatron.config.flags import ConfigError, Setting, Settings
from megatron.config.model import ModelConfig, ModelFlags, Vocabulary
from megatron.config.optimizer import OptimizerConfig, OptimizerFlags
from megatron.config.output import CheckpointConfig, LoggingConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import (
    FLAG_CLASSES,
    FLAG_FIELDS,
    PART_FLAGS,
    LegacyFlags,
    Resolved,
    RunConfig,
    explain,
    resolve,
)
from megatron.config.training import PrecisionConfig, TrainingConfig, TrainingFlags

__all__ = [
    "FLAG_CLASSES",
    "FLAG_FIELDS",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EngineConfig",
    "FlagParser",
    "LegacyFlags",
    "LoggingConfig",
    "NormConfig",
    "Vocabulary",
    "ModelConfig",
    "ModelFlags",
    "PART_FLAGS",
    "OptimizerConfig",
    "OptimizerFlags",
    "ParallelConfig",
    "ParallelFlags",
    "PrecisionConfig",
    "Resolved",
    "RunConfig",
    "Setting",
    "Settings",
    "TokenizerConfig",
    "TrainingConfig",
    "TrainingFlags",
    "explain",
    "parse_configs",
    "resolve",
]
