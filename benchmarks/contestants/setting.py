"""Model and data of all contestants: the same for each of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01  # of matrices; biases and norms have none
BETAS = (0.9, 0.999)
EPS = 1e-8
CLIP = 1.0
MASKED = 0.15  # of the tokens of a bert's sample
SEED = 1234
OF_TODAY = ("youtu", "qwen3_5_text", "bamba")
"""Architectures whose blocks have another layer than attention."""


@dataclass(frozen=True)
class Setting:
    """A model, its batches and where its files are."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    """Key and value heads; as many as query heads without grouping."""
    ffn_hidden_size: int
    seq_length: int
    vocab_size: int
    micro_batch: int
    """Samples of a micro batch."""
    micro_batches: int
    """Micro batches of an optimizer step."""
    architecture: str
    """gpt2 (learned positions, LayerNorm, GELU, biases, tied head), llama (rotary positions,
    RMSNorm, SwiGLU, no biases, a head of its own), qwen2 (as llama, with biases on queries, keys
    and values; for this trainer and the matrix products only), bert (post-norm, pairs of segments)
    t5 (1.0: relative positions, RMSNorm, ReLU, no biases, tied head; as many blocks in the
    decoder as in the encoder), retro (gpt2 with neighbours of every chunk of 64 tokens, random
    ones; for this trainer only), or mixtral (as llama, with experts in every block) or qwen3_moe
    (the same, with norms of queries and keys); or, as llama, youtu (latent attention), qwen3_5_text
    (Gated DeltaNet in three of four blocks) and bamba (Mamba-2 in three of four): these for this
    trainer and transformers only."""
    dtype: str
    """bf16 or fp32."""
    threads: int
    """Threads of a process on a CPU."""
    warmup: int
    """Steps of each contestant before anything is measured."""
    steps: int
    """Steps of a round."""
    folder: str = ""
    """Folder of `weights` (a model of Hugging Face) and `samples.npz`; empty if every contestant
    draws both itself, the weights on its device (:mod:`contestants.drawn`)."""
    shared_weights: bool = True
    """True if all start from the weights in the folder; else each draws its own."""
    hf_activation: str = "gelu_new"
    """GELU by tanh as `transformers` has it: gelu_new, GPT2Config's own, in eager operators, or
    gelu_pytorch_tanh, one operator."""
    tied: bool = False
    """True if the head of qwen2 is the embedding."""
    decoder_length: int = 0
    """Tokens of a sample in the decoder of a t5; ``seq_length`` is then the encoder's."""
    experts: int = 0
    """Experts of every block of a mixtral or qwen3_moe, of which a token goes through ``choices``;
    ``ffn_hidden_size`` is the width of one."""
    choices: int = 0
    head_width: int = 0
    """Width of an attention head; 0 for the hidden size over the heads."""
    task: str = "pretrain"
    """pretrain, lora (low-rank additions to all linear layers of frozen weights) or dpo (pairs of
    answers, the reference's log-probabilities computed in advance)."""
    lora_rank: int = 0
    answer_length: int = 0
    """Tokens of an answer of dpo, of the ``seq_length`` of a row; a sample is a pair of rows."""

    @property
    def family(self) -> str:
        """The model's family, as this trainer names it."""
        return self.architecture if self.architecture in ("bert", "t5", "retro") else "gpt"

    @property
    def predictions(self) -> int | None:
        """Tokens of a bert's sample that are predicted, as many as a batch has room for; None for
        all."""
        if self.family != "bert":
            return None
        return -(-round(MASKED * self.seq_length) // 8) * 8

    @property
    def gated(self) -> bool:
        """True if the MLP is SwiGLU."""
        return self.architecture in ("llama", "qwen2", *OF_TODAY) or self.experts > 0

    @property
    def kv_channels(self) -> int:
        """Width of an attention head."""
        return self.head_width or self.hidden_size // self.heads

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.micro_batches * self.rows * (self.seq_length + self.decoder_length)

    @property
    def weights(self) -> Path:
        """Folder of the weights that all start from."""
        return Path(self.folder, "weights")

    @property
    def samples(self) -> Path:
        """File of the samples: arrays [samples, ...] of what :func:`inputs.parts` returns."""
        return Path(self.folder, "samples.npz")

    @property
    def pairs(self) -> Path:
        """File of the pairs of dpo, all of one length."""
        return Path(self.folder, "pairs.jsonl")

    @property
    def rows(self) -> int:
        """Rows of a micro batch."""
        return self.micro_batch * (2 if self.task == "dpo" else 1)

    def to_json(self) -> str:
        """As a contestant's process is given it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """The setting that :meth:`to_json` wrote."""
        return cls(**json.loads(text))
