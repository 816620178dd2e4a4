"""Frozen dataclasses, one per concern, that generate the command-line flags."""

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.command_line import FlagParser, parse_configs
from megatron.config.data import DataConfig
from megatron.config.embedding import Vocabulary
from megatron.config.engine import EngineConfig, LegacyFlags
from megatron.config.flags import ConfigError, Setting, Settings
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig, ModelFlags
from megatron.config.norm import NormConfig
from megatron.config.optimizer import OptimizerConfig, OptimizerFlags, PrecisionConfig
from megatron.config.parallel import ParallelConfig, ParallelFlags
from megatron.config.run import (
    FLAG_CLASSES,
    PART_FLAGS,
    Resolved,
    RunConfig,
    explain,
    resolve,
)
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig, TrainingFlags

__all__ = [
    "FLAG_CLASSES",
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
