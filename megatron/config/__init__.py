"""Frozen dataclasses, one per concern, that generate the command-line flags."""

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.engine import EngineConfig, LegacyFlags
from megatron.config.flags import ConfigError, FlagParser, Setting, Settings, parse_configs
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import (
    CONFIG_CLASSES,
    FLAG_CLASSES,
    Resolved,
    RunConfig,
    explain,
    resolve,
)
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig

__all__ = [
    "CONFIG_CLASSES",
    "FLAG_CLASSES",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EngineConfig",
    "FlagParser",
    "LegacyFlags",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "Resolved",
    "RunConfig",
    "Setting",
    "Settings",
    "TokenizerConfig",
    "TrainingConfig",
    "explain",
    "parse_configs",
    "resolve",
]
