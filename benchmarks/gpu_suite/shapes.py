"""The shapes that are measured: this project's own, those of LLMQ's published benchmarks, and
Megatron's BERT and T5, and a Retro.

LLMQ (https://github.com/IST-DASLab/llmq, benchmarks/H100x1.md) trains Qwen2.5 at sequence 1024 with
524,288 tokens in a step. Only rows of these shapes may be set beside its figures. The shapes from
1.3B on are also those of the estimates (:mod:`megatron.apps.planning.shapes`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from contestants.report import shape_of
from contestants.setting import Setting

from megatron.apps.planning import shapes


@dataclass(frozen=True)
class Steps:
    """How many steps a measurement makes: ``warmup``, then ``rounds`` of ``each``; and ``traced``
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
class Shape(shapes.Shape):
    """A model and how it is measured.

    Attributes:
        steps: how many are made; a step of LLMQ's shapes takes 9 to 40 s.
        decoder_length: tokens of a sample in the decoder of a t5; the other tokens are its
            encoder's.
    """

    steps: Steps
    decoder_length: int = 0

    def setting(self, seq_length: int | None = None, micro_tokens: int | None = None) -> Setting:
        """What the contestants train, at another length or micro batch if one is given."""
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
        )


def step_flops(setting: Setting, causal: bool = True) -> float:
    """Model FLOPs of a step."""
    samples = setting.micro_batch * setting.micro_batches
    return shape_of(setting).flops_per_step(samples, causal=causal)


def recomputed_flops(setting: Setting, recompute: str | None) -> float:
    """What a recomputation of activations adds to the model FLOPs of a step, attention counted
    causally; ``recompute`` as in `TransformerShape.recomputed_flops_per_token`."""
    a_token = shape_of(setting).recomputed_flops_per_token(recompute, causal=True)
    return a_token * setting.tokens_per_step


def products(setting: Setting) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each linear layer of a block, without cross-attention, and of the
    head."""
    mixed = setting.hidden_size
    kv = setting.kv_heads * (setting.hidden_size // setting.heads)
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

_STEPS = {
    "1.3B": Steps(4, 3, 5),
    "3B": Steps(3, 3, 3),
    "7B": Steps(2, 2, 2),
    "Qwen2.5-1.5B": Steps(1, 3, 1, 1),
    "Qwen2.5-3B": Steps(1, 2, 1, 1),
    "Qwen2.5-7B": Steps(1, 2, 1),
}

_BERT: dict[str, Any] = {"architecture": "bert", "seq_length": 512, "vocabulary": 30_592}
_T5: dict[str, Any] = {
    "architecture": "t5",
    "seq_length": 512,
    "decoder_length": 128,
    "vocabulary": 32_128,
}

SHAPES = {
    shape.name: shape
    for shape in (
        *(Shape(**asdict(shape), steps=_STEPS[shape.name]) for shape in shapes.SHAPES),
        Shape(
            name="124M", layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072,
            micro_tokens=32_768, steps=Steps(5, 3, 10), **_GPT2,
        ),
        Shape(
            name="350M", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096,
            micro_tokens=16_384, steps=Steps(5, 3, 10), **_GPT2,
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
            name="T5-770M", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096,
            micro_tokens=8192, step_tokens=65_536, steps=Steps(4, 3, 5), **_T5,
        ),
        Shape(
            name="Retro-350M", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096,
            micro_tokens=16_384, steps=Steps(5, 3, 10), **_GPT2 | {"architecture": "retro"},
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
            name="tiny-qwen", architecture="qwen2", layers=1, hidden=64, heads=2, kv_heads=1,
            ffn=128, vocabulary=512, seq_length=32, tied=True, micro_tokens=128, step_tokens=256,
            steps=Steps(1, 2, 1),
        ),
    )
}  # fmt: skip
