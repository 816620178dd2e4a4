"""Hugging Face's form of a model: one table per architecture, read in both directions."""

from megatron.checkpoint.huggingface.export import write_model
from megatron.checkpoint.huggingface.registry import (
    ARCHITECTURES,
    architecture_named,
    architecture_of,
)
from megatron.checkpoint.huggingface.table import Architecture, Entry, Parameter

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Entry",
    "Parameter",
    "architecture_named",
    "architecture_of",
    "write_model",
]
