"""Hugging Face's form of a model: one table per architecture, read in both directions."""

from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.registry import (
    ARCHITECTURES,
    architecture_named,
    architecture_of,
)
from megatron.formats.huggingface.table import Architecture, Entry, Parameter

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Entry",
    "Parameter",
    "architecture_named",
    "architecture_of",
    "write_model",
]
