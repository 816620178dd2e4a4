"""Models whose speed on one GPU is estimated and measured: Llama's shapes, and Qwen2.5's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config import ModelConfig, ModelFlags


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the batches that it is trained with.

    Attributes:
        architecture: llama, or qwen2, which has biases on queries, keys and values.
        micro_tokens: tokens of a micro batch.
        step_tokens: tokens of an optimizer step.
        tied: whether the head is the token embedding.
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    seq_length: int
    micro_tokens: int
    step_tokens: int
    tied: bool = False

    def model(self) -> ModelConfig:
        """The complete model."""
        assert self.architecture in ("llama", "qwen2"), self.architecture
        flags = ModelFlags(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            num_query_groups=self.kv_heads,
            seq_length=self.seq_length,
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            add_qkv_bias=self.architecture == "qwen2",
            untie_embeddings_and_output_weights=not self.tied,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )
        return flags.resolve().with_vocabulary(self.vocabulary, 1)


_LLAMA: dict[str, Any] = {"architecture": "llama", "seq_length": 2048, "vocabulary": 32_000}
_QWEN: dict[str, Any] = {"architecture": "qwen2", "seq_length": 1024, "step_tokens": 524_288}

SHAPES: tuple[Shape, ...] = (
    # An FFN of 43 x 128, where Llama's rule gives 5440, which is 42.5 x 128.
    Shape(
        name="1.3B", layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5504,
        micro_tokens=16_384, step_tokens=65_536, **_LLAMA,
    ),
    Shape(
        name="3B", layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192,
        micro_tokens=8192, step_tokens=65_536, **_LLAMA,
    ),
    Shape(
        name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11_008,
        micro_tokens=4096, step_tokens=131_072, **_LLAMA,
    ),
    Shape(
        name="Qwen2.5-1.5B", layers=28, hidden=1536, heads=12, kv_heads=2, ffn=8960,
        vocabulary=151_936, tied=True, micro_tokens=16_384, **_QWEN,
    ),
    Shape(
        name="Qwen2.5-3B", layers=36, hidden=2048, heads=16, kv_heads=2, ffn=11_008,
        vocabulary=151_936, tied=True, micro_tokens=8192, **_QWEN,
    ),
    Shape(
        name="Qwen2.5-7B", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18_944,
        vocabulary=152_064, micro_tokens=4096, **_QWEN,
    ),
)  # fmt: skip
"""The sizes of Qwen2.5 are those of the models' config.json."""
