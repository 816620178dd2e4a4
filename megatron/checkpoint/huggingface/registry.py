"""Which architecture a model is: a new one is a file and a name here."""

from __future__ import annotations

from megatron.checkpoint.huggingface.gpt2 import GPT2
from megatron.checkpoint.huggingface.llama import LLAMA
from megatron.checkpoint.huggingface.table import Architecture
from megatron.config import ModelConfig

ARCHITECTURES: tuple[Architecture, ...] = (GPT2, LLAMA)
"""The known architectures."""


def architecture_of(model: ModelConfig) -> Architecture:
    """The architecture that a configuration fits.

    Raises:
        ValueError: it fits none; names what each of them would need.
    """
    misfits = {known.title: known.misfits(model) for known in ARCHITECTURES}
    for known in ARCHITECTURES:
        if not misfits[known.title]:
            return known
    needs = "".join(f"\n  {title} needs {', '.join(wanted)}" for title, wanted in misfits.items())
    raise ValueError(
        f"a model with {_shape(model)} fits no architecture of Hugging Face that is known here:"
        + needs
    )


def _shape(model: ModelConfig) -> str:
    """The flags that the architectures differ in, as the model has them."""
    given = [
        f"--position-embedding-type {model.position_embedding_type}",
        f"--normalization {model.normalization}",
        f"--hidden-size {model.hidden_size}",
        f"--num-attention-heads {model.num_attention_heads}",
        f"--num-query-groups {model.num_query_groups}",
        f"--kv-channels {model.kv_channels}",
    ]
    if model.position_embedding_type == "rope":
        given.append(f"--rotary-percent {model.rotary_percent}")
    switches = {
        "--swiglu": model.swiglu,
        "--squared-relu": model.squared_relu,
        "--disable-bias-linear": not model.add_bias_linear,
        "--add-qkv-bias": model.add_qkv_bias,
    }
    return " ".join([*given, *(flag for flag, on in switches.items() if on)])
