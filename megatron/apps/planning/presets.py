"""Presets of GPUs and models for the planner. A flag can override every value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig, ModelFlags, Setting, Settings
from megatron.config.flags import shared

# Memory; dense 16-bit peak in TFLOP/s; bandwidth of a GPU within a node and to other nodes, in GB/s
# each way; power in watts, including the GPU's share of the machine; dollars per hour. All but the
# prices are the vendors' numbers (watts: a DGX at full load divided by its GPUs, otherwise 1.4
# times the board). Rental prices differ by a factor of two and change every month.
GPUS: dict[str, tuple[str, float, float, float, float, float]] = {
    "A100-40GB": ("40GiB", 312, 300, 25, 812, 1.3),
    "A100": ("80GiB", 312, 300, 25, 812, 1.8),
    "H100": ("80GB", 989, 450, 50, 1275, 2.5),
    "H200": ("141GB", 989, 450, 50, 1275, 3.0),
    "B200": ("180GB", 2250, 900, 50, 1790, 4.5),
    "GB200": ("186GB", 2500, 900, 50, 1670, 5.0),
    "MI300X": ("192GB", 1307, 448, 50, 1250, 2.5),
    "L40S": ("48GB", 362, 25, 12.5, 500, 1.0),
    "RTX-4090": ("24GB", 165, 25, 3, 600, 0.4),
    "RTX-5090": ("32GB", 210, 50, 3, 750, 0.7),
}

_MACHINE = (
    "gpu_memory", "peak_tflops", "intra_node_bandwidth", "inter_node_bandwidth", "gpu_watts",
    "gpu_hour_price",
)  # fmt: skip

_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def _sizes(
    layers: int, hidden: int, heads: int, ffn: int | None = None, groups: int | None = None,
    *, vocab: int, length: int, base: int = 10_000,
) -> dict[str, Any]:  # fmt: skip
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "seq_length": length,
    }
    values |= {"ffn_hidden_size": ffn} if ffn else {}
    values |= {"num_query_groups": groups} if groups else {}
    return values | ({"rotary_base": base} if base != 10_000 else {})


_QWEN = {**_LLAMA, "add_qkv_bias": True}
_TIED = {"untie_embeddings_and_output_weights": False}
_L2, _L3 = {"vocab": 32_000, "length": 4096}, {"vocab": 128_256, "length": 8192, "base": 500_000}
_Q = {"length": 4096, "base": 1_000_000}

# Flags that describe published models, including their vocabulary sizes.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _sizes(12, 768, 12, vocab=50_257, length=1024),
    "gpt2-medium": _sizes(24, 1024, 16, vocab=50_257, length=1024),
    "gpt2-large": _sizes(36, 1280, 20, vocab=50_257, length=1024),
    "gpt2-xl": _sizes(48, 1600, 25, vocab=50_257, length=1024),
    "gpt3-175b": _sizes(96, 12_288, 96, vocab=50_257, length=2048),
    "llama-7b": _LLAMA | _sizes(32, 4096, 32, 11_008, **_L2),
    "llama-13b": _LLAMA | _sizes(40, 5120, 40, 13_824, **_L2),
    "llama-70b": _LLAMA | _sizes(80, 8192, 64, 28_672, 8, **_L2),
    "llama3-1b": _LLAMA | _TIED | _sizes(16, 2048, 32, 8192, 8, **_L3),
    "llama3-3b": _LLAMA | _TIED | _sizes(28, 3072, 24, 8192, 8, **_L3),
    "llama3-8b": _LLAMA | _sizes(32, 4096, 32, 14_336, 8, **_L3),
    "llama3-70b": _LLAMA | _sizes(80, 8192, 64, 28_672, 8, **_L3),
    "llama3-405b": _LLAMA | _sizes(126, 16_384, 128, 53_248, 8, **_L3),
    "mistral-7b": _LLAMA | _sizes(32, 4096, 32, 14_336, 8, vocab=32_000, length=8192),
    "qwen2.5-0.5b": _QWEN | _TIED | _sizes(24, 896, 14, 4864, 2, vocab=151_936, **_Q),
    "qwen2.5-1.5b": _QWEN | _TIED | _sizes(28, 1536, 12, 8960, 2, vocab=151_936, **_Q),
    "qwen2.5-7b": _QWEN | _sizes(28, 3584, 28, 18_944, 4, vocab=152_064, **_Q),
    "qwen2.5-32b": _QWEN | _sizes(64, 5120, 40, 27_648, 8, vocab=152_064, **_Q),
    "qwen2.5-72b": _QWEN | _sizes(80, 8192, 64, 29_568, 8, vocab=152_064, **_Q),
}


def with_presets(
    settings: Settings, gpu: str, model: str | None, network: ModelConfig | None = None
) -> Settings:
    """Return the settings, completed with values for a GPU and a model. The model is one of
    :data:`MODELS`, or ``network``, the model of ``--load``. The user's flags take precedence."""
    machine = dict(zip(_MACHINE, GPUS[gpu], strict=True))
    values: dict[str, Any] = {name: (value, f"--gpu {gpu}") for name, value in machine.items()}
    if model is not None:
        values |= {name: (value, f"--model {model}") for name, value in MODELS[model].items()}
    if network is not None:
        flags: Mapping[str, Any] = shared(network.flags(), ModelFlags)
        flags = {**flags, "vocab_size": network.vocabulary.size or None}
        for name in ("unpadded_vocab_size", "padded_vocab_size"):
            flags.pop(name)
        values |= {name: (value, "--load") for name, value in flags.items() if value is not None}
    return {name: Setting(*value) for name, value in values.items()} | settings
