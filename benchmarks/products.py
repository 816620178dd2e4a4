"""The matrix products of a training step alone: forward, and the two of each in the backward pass.

What a step cannot be faster than, short of leaving products out. Nothing is between them: no norms,
no softmax, no loss, no optimizer, and no new memory but for the scores, which are never there as a
whole. Causal attention's two products are made in :data:`PIECES` pieces of the queries, each
against the keys up to its end: (1 + 1 / PIECES) / 2 of the whole products. Logits are those of the
tokens that are to be predicted.

Shapes: T tokens, I inputs, O outputs, G batch x heads, S queries, K keys, D head width.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from megatron.config import ModelConfig

PIECES = 8


class Linear:
    """The three products of a linear layer, or two where its weight is frozen."""

    def __init__(
        self, tokens: int, inputs: int, outputs: int, frozen: bool = False, **how: object
    ) -> None:
        self.frozen = frozen
        self.x_TI, self.y_TO, self.weight_OI = (
            torch.randn(shape, **how)  # type: ignore[call-overload]
            for shape in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
        )
        self.grad_TI, self.grad_OI = torch.empty_like(self.x_TI), torch.empty_like(self.weight_OI)

    def __call__(self) -> None:
        """The output, its gradient to the input and to the weight."""
        torch.mm(self.x_TI, self.weight_OI.t(), out=self.y_TO)
        torch.mm(self.y_TO, self.weight_OI, out=self.grad_TI)
        if not self.frozen:
            torch.mm(self.y_TO.t(), self.x_TI, out=self.grad_OI)


class Attention:
    """Scores and the mix of values, and the two products of each in the backward pass; causally, or
    with all keys."""

    def __init__(
        self, groups: int, queries: int, keys: int, width: int, causal: bool, **how: object
    ) -> None:
        self.q, self.y = (
            torch.randn(groups, queries, width, **how)  # type: ignore[call-overload]
            for _ in range(2)
        )
        self.k, self.v = (
            torch.randn(groups, keys, width, **how)  # type: ignore[call-overload]
            for _ in range(2)
        )
        self.queries, self.keys, self.causal = queries, keys, causal
        self.piece = -(-queries // PIECES) if causal else queries

    def __call__(self) -> None:
        """All pieces."""
        for begin in range(0, self.queries, self.piece):
            end = min(begin + self.piece, self.queries)
            q, y = self.q[:, begin:end], self.y[:, begin:end]
            seen = end if self.causal else self.keys
            k, v = self.k[:, :seen], self.v[:, :seen]
            scores = torch.bmm(q, k.transpose(1, 2))
            torch.bmm(scores, v)
            torch.bmm(y, v.transpose(1, 2))
            torch.bmm(scores.transpose(1, 2), y)
            torch.bmm(scores, k)
            torch.bmm(scores.transpose(1, 2), q)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes of what a micro batch multiplies."""

    samples: int
    length: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    """Inputs of the MLP's second map."""
    gated: bool
    """True if the MLP's first map makes twice as much."""
    vocabulary: int
    causal: bool = True
    predictions: int | None = None
    """Tokens of a sample that are predicted, through a dense layer; None for all, without one."""
    decoder_length: int = 0
    """Tokens of a sample in a decoder of as many blocks, which attend to these too."""
    lora_rank: int | None = None
    """Rank of the additions to the linear layers of blocks, whose weights are frozen."""
    answer: int | None = None
    """Tokens of a sample that are predicted, without a dense layer; None for all."""
    experts: int = 0
    """Experts of a block, of which a token goes through ``choices``, each of them an MLP; every
    expert has its even share of the tokens. 0 for one MLP."""
    choices: int = 0

    @classmethod
    def of(cls, model: ModelConfig, samples: int) -> StepShape:
        """Products of a complete model."""
        return cls(
            samples=samples,
            length=model.seq_length,
            layers=model.num_layers,
            hidden=model.hidden_size,
            heads=model.attention.num_attention_heads,
            kv_heads=model.attention.num_query_groups,
            head_width=model.attention.kv_channels,
            inner=model.mlp.ffn_hidden_size,
            gated=model.mlp.gated,
            vocabulary=model.vocabulary.padded,
        )

    def block(self, dtype: torch.dtype, device: torch.device) -> list[Linear | Attention]:
        """The products of a block, with buffers of their own."""
        how = {"dtype": dtype, "device": device}
        return [*self._attention(self.length, self.causal, how), *self._mlp(self.length, how)]

    def decoder_block(self, dtype: torch.dtype, device: torch.device) -> list[Linear | Attention]:
        """The same of a block of the decoder."""
        how = {"dtype": dtype, "device": device}
        own = self._attention(self.decoder_length, True, how)
        return [*own, *self._cross_attention(how), *self._mlp(self.decoder_length, how)]

    def _attention(
        self, length: int, causal: bool, how: dict[str, Any]
    ) -> list[Linear | Attention]:
        tokens, mixed = self.samples * length, self.heads * self.head_width
        groups = self.samples * self.heads
        kv = self.kv_heads * self.head_width
        return [
            *self._linear(tokens, self.hidden, (mixed, kv, kv), how),
            Attention(groups, length, length, self.head_width, causal, **how),
            *self._linear(tokens, mixed, (self.hidden,), how),
        ]

    def _linear(
        self, tokens: int, inputs: int, outputs: tuple[int, ...], how: dict[str, Any]
    ) -> list[Linear]:
        """Layers with one input that are computed together, and an addition to each."""
        rank = self.lora_rank
        whole = Linear(tokens, inputs, sum(outputs), frozen=rank is not None, **how)
        if rank is None:
            return [whole]
        down = Linear(tokens, inputs, rank * len(outputs), **how)
        return [whole, down, *(Linear(tokens, rank, width, **how) for width in outputs)]

    def _cross_attention(self, how: dict[str, Any]) -> list[Linear | Attention]:
        mixed, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        tokens, encoded = self.samples * self.decoder_length, self.samples * self.length
        groups = self.samples * self.heads
        return [
            Linear(tokens, self.hidden, mixed, **how),
            Linear(encoded, self.hidden, 2 * kv, **how),
            Attention(groups, self.decoder_length, self.length, self.head_width, False, **how),
            Linear(tokens, mixed, self.hidden, **how),
        ]

    def _mlp(self, length: int, how: dict[str, Any]) -> list[Linear | Attention]:
        tokens, router = self.samples * length, []
        if self.experts:
            router = self._linear(tokens, self.hidden, (self.experts,), how)
            tokens = tokens * self.choices // self.experts
        mlps = [
            [
                *self._linear(tokens, self.hidden, (self.inner,) * (2 if self.gated else 1), how),
                *self._linear(tokens, self.inner, (self.hidden,), how),
            ]
            for _ in range(max(1, self.experts))
        ]
        return [*router, *chain.from_iterable(mlps)]

    def head(self, dtype: torch.dtype, device: torch.device) -> list[Linear]:
        """The products of the head, with buffers of their own."""
        how = {"dtype": dtype, "device": device}
        predicted = self.predictions or self.answer or self.decoder_length or self.length
        tokens = self.samples * predicted
        dense = [Linear(tokens, self.hidden, self.hidden, **how)] if self.predictions else []
        frozen = self.lora_rank is not None
        return [*dense, Linear(tokens, self.hidden, self.vocabulary, frozen=frozen, **how)]

    def products(self, dtype: torch.dtype, device: torch.device) -> list[Linear | Attention]:
        """The products of a micro batch, layer by layer."""
        kinds = [self.block, self.decoder_block] if self.decoder_length else [self.block]
        blocks = [kind(dtype, device) for kind in kinds for _ in range(self.layers)]
        return [*(product for block in blocks for product in block), *self.head(dtype, device)]

    def seconds(self, dtype: torch.dtype) -> float:
        """CPU seconds that they take for one micro batch, on this process's threads: each kind is
        timed once and counted as often as there are layers."""
        cpu = torch.device("cpu")
        block = sum(map(cpu_seconds, self.block(dtype, cpu)))
        if self.decoder_length:
            block += sum(map(cpu_seconds, self.decoder_block(dtype, cpu)))
        return self.layers * block + sum(map(cpu_seconds, self.head(dtype, cpu)))


def cpu_seconds(product: Linear | Attention) -> float:
    """CPU seconds of it, the second time that it is done."""
    product()
    start = time.process_time()
    product()
    return time.process_time() - start
