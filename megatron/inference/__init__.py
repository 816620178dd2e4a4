"""Loading a checkpoint on one process, and generating text with it."""

from megatron.inference.generate import Continuation, KeyValueCache, generate
from megatron.inference.load import load_model, load_tokenizer, model_of
from megatron.inference.request import Sampling

__all__ = [
    "Continuation",
    "KeyValueCache",
    "Sampling",
    "generate",
    "load_model",
    "load_tokenizer",
    "model_of",
]
