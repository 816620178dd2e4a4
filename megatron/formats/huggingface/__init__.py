"""Models of Hugging Face: one table per architecture, read in both directions."""

from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.registry import (
    ARCHITECTURES,
    architecture_named,
    architecture_of,
)

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "architecture_named",
    "architecture_of",
    "write_model",
]
