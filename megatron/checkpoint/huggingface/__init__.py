"""Hugging Face's form of a model: one table per architecture, read in both directions."""

from megatron.checkpoint.huggingface.export import write_model
from megatron.checkpoint.huggingface.gpt2 import GPT2
from megatron.checkpoint.huggingface.llama import LLAMA
from megatron.checkpoint.huggingface.registry import ARCHITECTURES, architecture_of
from megatron.checkpoint.huggingface.table import Architecture, Entry, Parameter, Requirement

__all__ = [
    "ARCHITECTURES",
    "GPT2",
    "LLAMA",
    "Architecture",
    "Entry",
    "Parameter",
    "Requirement",
    "architecture_of",
    "write_model",
]
