"""The shapes that are measured: this project's own, those of LLMQ's published benchmarks, and
Megatron's BERT and T5, and a Retro.

LLMQ (https://github.com/IST-DASLab/llmq, benchmarks/H100x1.md) trains Qwen2.5 at sequence 1024 with
524,288 tokens in a step. Only rows of these shapes may be set next to its figures. The shapes from
1.3B on are also those of the estimates (``benchmarks/one_gpu.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contestants.report import shape_of
from contestants.setting import Setting

from megatron.config import ModelConfig, ModelFlags


@dataclass(frozen=True)
class Steps:
    """Number of steps of a measurement: ``warmup``, then ``rounds`` of ``each``; and ``traced``
    ones where there is a trace: one of those with many micro batches, whose traces are large."""

    warmup: int
    rounds: int
    each: int
    traced: int = 2

    @property
    def total(self) -> int:
        """Steps without those that are traced."""
        return self.warmup + self.rounds * self.each


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, the batches that it is trained with, and how it is measured.

    Attributes:
        architecture: gpt2, llama, qwen2 (which has biases on queries, keys and values), bert, t5,
            retro, mixtral or qwen3_moe.
        micro_tokens: tokens of a micro batch.
        step_tokens: tokens of an optimizer step.
        steps: how many are made; a step of LLMQ's shapes takes 9 to 40 s.
        tied: True if the head is the token embedding.
        decoder_length: tokens of a sample in the decoder of a t5; the other tokens are its
            encoder's.
        experts, choices, head_width: as in `contestants.setting.Setting`.
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
    steps: Steps
    tied: bool = False
    decoder_length: int = 0
    experts: int = 0
    choices: int = 0
    head_width: int = 0

    def model(self) -> ModelConfig:
        """Return the complete model of a llama or qwen2."""
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

    def setting(self, seq_length: int | None = None, micro_tokens: int | None = None) -> Setting:
        """Setting of the contestants, at another length or micro batch if one is given."""
        length = seq_length or self.seq_length
        samples = max(1, (micro_tokens or self.micro_tokens) // length)
        return Setting(
            layers=self.layers,
            hidden_size=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn_hidden_size=self.ffn,
            seq_length=length,
            vocab_size=self.vocabulary,
            micro_batch=samples,
            micro_batches=max(1, self.step_tokens // (samples * length)),
            architecture=self.architecture,
            dtype="bf16",
            threads=1,
            warmup=self.steps.warmup,
            steps=self.steps.each,
            tied=self.tied,
            decoder_length=self.decoder_length,
            experts=self.experts,
            choices=self.choices,
            head_width=self.head_width,
        )


def step_flops(setting: Setting, causal: bool = True) -> float:
    """Model FLOPs of a step."""
    samples = setting.micro_batch * setting.micro_batches
    return shape_of(setting).flops_per_step(samples, causal=causal)


def recomputed_flops(setting: Setting, recompute: str | None) -> float:
    """Return the FLOPs of a step that recomputing activations adds to the model's, attention
    counted causally; ``recompute`` as in `TransformerShape.recomputed_flops_per_token`."""
    a_token = shape_of(setting).recomputed_flops_per_token(recompute, causal=True)
    return a_token * setting.tokens_per_step


def products(setting: Setting) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each linear layer of a block, without cross-attention, of an expert
    where there are any, and of the head."""
    mixed = setting.heads * setting.kv_channels
    kv = setting.kv_heads * setting.kv_channels
    inner = setting.ffn_hidden_size
    return {
        "qkv": (setting.hidden_size, mixed + 2 * kv),
        "proj": (mixed, setting.hidden_size),
        "up": (setting.hidden_size, inner * (2 if setting.gated else 1)),
        "down": (inner, setting.hidden_size),
        "head": (setting.hidden_size, setting.vocab_size),
    }


_GPT2: dict[str, Any] = {
    "architecture": "gpt2",
    "seq_length": 1024,
    "vocabulary": 50_304,
    "step_tokens": 65_536,
}

_LLAMA: dict[str, Any] = {"architecture": "llama", "seq_length": 2048, "vocabulary": 32_000}
_QWEN: dict[str, Any] = {"architecture": "qwen2", "seq_length": 1024, "step_tokens": 524_288}
_BERT: dict[str, Any] = {"architecture": "bert", "seq_length": 512, "vocabulary": 30_592}
_T5: dict[str, Any] = {
    "architecture": "t5",
    "seq_length": 512,
    "decoder_length": 128,
    "vocabulary": 32_128,
}

_SPARSE: dict[str, Any] = {"seq_length": 4096, "micro_tokens": 16_384, "step_tokens": 131_072}
"""Layers of published models with experts, as many as fit with 8 bytes a parameter; a small
vocabulary, so that the layers are what is measured."""

SHAPES = {
    shape.name: shape
    for shape in (
        # Sizes of Qwen2.5 are those of the models' config.json.
        # An FFN of 43 x 128, where Llama's rule gives 5440, which is 42.5 x 128.
        Shape(
            name="1.3B", layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5504,
            micro_tokens=16_384, step_tokens=65_536, steps=Steps(4, 3, 5), **_LLAMA,
        ),
        # Layers of the first, to measure operators by.
        Shape(
            name="1.3B-layers-333M", layers=4, hidden=2048, heads=16, kv_heads=16, ffn=5504,
            micro_tokens=16_384, step_tokens=65_536, steps=Steps(3, 3, 5), **_LLAMA,
        ),
        Shape(
            name="3B", layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192,
            micro_tokens=8192, step_tokens=65_536, steps=Steps(3, 3, 3), **_LLAMA,
        ),
        Shape(
            name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11_008,
            micro_tokens=4096, step_tokens=131_072, steps=Steps(2, 2, 2), **_LLAMA,
        ),
        Shape(
            name="Qwen2.5-1.5B", layers=28, hidden=1536, heads=12, kv_heads=2, ffn=8960,
            vocabulary=151_936, tied=True, micro_tokens=16_384, steps=Steps(1, 2, 1, 1), **_QWEN,
        ),
        Shape(
            name="Qwen2.5-3B", layers=36, hidden=2048, heads=16, kv_heads=2, ffn=11_008,
            vocabulary=151_936, tied=True, micro_tokens=8192, steps=Steps(1, 2, 1, 1), **_QWEN,
        ),
        Shape(
            name="Qwen2.5-7B", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18_944,
            vocabulary=152_064, micro_tokens=4096, steps=Steps(1, 2, 1), **_QWEN,
        ),
        Shape(
            name="124M", layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072,
            micro_tokens=32_768, steps=Steps(5, 3, 10), **_GPT2,
        ),
        Shape(
            name="BERT-345M", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096,
            micro_tokens=16_384, step_tokens=65_536, steps=Steps(5, 3, 10), **_BERT,
        ),
        Shape(
            name="T5-220M", layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072,
            micro_tokens=16_384, step_tokens=65_536, steps=Steps(5, 3, 10), **_T5,
        ),
        Shape(
            name="Retro-350M", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096,
            micro_tokens=16_384, steps=Steps(5, 3, 10), **_GPT2 | {"architecture": "retro"},
        ),
        # 128 experts of which 8 are chosen, as in Qwen3-30B-A3B; 8 and 2, as in Mixtral-8x7B.
        Shape(
            name="Qwen3-MoE-3.8B", architecture="qwen3_moe", layers=6, hidden=2048, heads=32,
            kv_heads=4, head_width=128, ffn=768, experts=128, choices=8, vocabulary=32_768,
            steps=Steps(2, 2, 2), **_SPARSE,
        ),
        Shape(
            name="Mixtral-4.6B", architecture="mixtral", layers=3, hidden=4096, heads=32,
            kv_heads=8, ffn=14_336, experts=8, choices=2, vocabulary=32_000, steps=Steps(2, 2, 2),
            **_SPARSE,
        ),
        # Llama 3's, and layers of its 8B; each at the lengths of their cells.
        Shape(
            name="Llama3-1.24B", architecture="llama", layers=16, hidden=2048, heads=32, kv_heads=8,
            ffn=8192, vocabulary=128_256, tied=True, seq_length=131_072, micro_tokens=131_072,
            step_tokens=131_072, steps=Steps(1, 1, 1),
        ),
        Shape(
            name="Llama3-8B", architecture="llama", layers=32, hidden=4096, heads=32, kv_heads=8,
            ffn=14_336, vocabulary=128_256, seq_length=131_072, micro_tokens=131_072,
            step_tokens=131_072, steps=Steps(1, 1, 1),
        ),
        Shape(
            name="Llama3-8B-layers-1.5B", architecture="llama", layers=2, hidden=4096, heads=32,
            kv_heads=8, ffn=14_336, vocabulary=128_256, seq_length=524_288, micro_tokens=524_288,
            step_tokens=524_288, steps=Steps(1, 1, 1),
        ),
        # For a trial on a CPU.
        Shape(
            name="tiny", architecture="llama", layers=2, hidden=64, heads=2, kv_heads=1, ffn=128,
            vocabulary=512, seq_length=32, micro_tokens=128, step_tokens=256, steps=Steps(2, 2, 2),
        ),
        Shape(
            name="tiny-bert", architecture="bert", layers=1, hidden=64, heads=2, kv_heads=2,
            ffn=128, vocabulary=512, seq_length=32, micro_tokens=128, step_tokens=256,
            steps=Steps(1, 2, 1),
        ),
        Shape(
            name="tiny-t5", architecture="t5", layers=1, hidden=64, heads=2, kv_heads=2,
            ffn=128, vocabulary=512, seq_length=32, decoder_length=16, micro_tokens=128,
            step_tokens=256, steps=Steps(1, 2, 1),
        ),
        Shape(
            name="tiny-retro", architecture="retro", layers=2, hidden=64, heads=2, kv_heads=2,
            ffn=128, vocabulary=512, seq_length=128, micro_tokens=256, step_tokens=512,
            steps=Steps(1, 2, 1),
        ),
        Shape(
            name="tiny-experts", architecture="qwen3_moe", layers=1, hidden=64, heads=2, kv_heads=1,
            ffn=32, experts=8, choices=2, vocabulary=512, seq_length=32, micro_tokens=128,
            step_tokens=256, steps=Steps(1, 2, 1),
        ),
        Shape(
            name="tiny-qwen", architecture="qwen2", layers=1, hidden=64, heads=2, kv_heads=1,
            ffn=128, vocabulary=512, seq_length=32, tied=True, micro_tokens=128, step_tokens=256,
            steps=Steps(1, 2, 1),
        ),
    )
}  # fmt: skip
