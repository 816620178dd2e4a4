"""The matrix products of a training step alone: forward, and the two of each in the backward pass.

What a step cannot be faster than, short of leaving products out. Nothing is between them: no norms,
no softmax, no loss, no optimizer, and no new memory but for the scores, which are never there as a
whole. The attention's two products are made causally, in :data:`PIECES` pieces of the queries, each
against the keys up to its end: (1 + 1 / PIECES) / 2 of the whole products.

Shapes: T tokens, I inputs, O outputs, G batch x heads, S sequence, D head width.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megatron.config import ModelConfig

PIECES = 8


class Linear:
    """The three products of a linear layer."""

    def __init__(self, tokens: int, inputs: int, outputs: int, **how: object) -> None:
        self.x_TI, self.y_TO, self.weight_OI = (
            torch.randn(shape, **how)  # type: ignore[call-overload]
            for shape in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
        )
        self.grad_TI, self.grad_OI = torch.empty_like(self.x_TI), torch.empty_like(self.weight_OI)

    def __call__(self) -> None:
        """The output, its gradient to the input and to the weight."""
        torch.mm(self.x_TI, self.weight_OI.t(), out=self.y_TO)
        torch.mm(self.y_TO, self.weight_OI, out=self.grad_TI)
        torch.mm(self.y_TO.t(), self.x_TI, out=self.grad_OI)


class Attention:
    """Scores and the mix of values, causally, and the two products of each in the backward pass."""

    def __init__(self, groups: int, length: int, width: int, **how: object) -> None:
        self.q, self.k, self.v, self.y = (
            torch.randn(groups, length, width, **how)  # type: ignore[call-overload]
            for _ in range(4)
        )
        self.length, self.piece = length, -(-length // PIECES)

    def __call__(self) -> None:
        """All pieces."""
        for begin in range(0, self.length, self.piece):
            end = min(begin + self.piece, self.length)
            q, y = self.q[:, begin:end], self.y[:, begin:end]
            k, v = self.k[:, :end], self.v[:, :end]
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
    """What goes into the MLP's second map."""
    gated: bool
    """Whether the MLP's first map makes twice as much."""
    vocabulary: int

    @classmethod
    def of(cls, model: ModelConfig, samples: int) -> StepShape:
        """Of a complete model."""
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
        tokens, mixed = self.samples * self.length, self.heads * self.head_width
        return [
            Linear(tokens, self.hidden, mixed + 2 * self.kv_heads * self.head_width, **how),
            Attention(self.samples * self.heads, self.length, self.head_width, **how),
            Linear(tokens, mixed, self.hidden, **how),
            Linear(tokens, self.hidden, self.inner * (2 if self.gated else 1), **how),
            Linear(tokens, self.inner, self.hidden, **how),
        ]

    def head(self, dtype: torch.dtype, device: torch.device) -> Linear:
        """The products of the head, with buffers of their own."""
        tokens = self.samples * self.length
        return Linear(tokens, self.hidden, self.vocabulary, dtype=dtype, device=device)

    def products(self, dtype: torch.dtype, device: torch.device) -> list[Linear | Attention]:
        """The products of a micro batch, layer by layer."""
        blocks = [self.block(dtype, device) for _ in range(self.layers)]
        return [*(product for block in blocks for product in block), self.head(dtype, device)]

    def seconds(self, dtype: torch.dtype) -> float:
        """CPU seconds that they take for one micro batch, on this process's threads: each kind is
        timed once and counted as often as there are layers."""
        cpu = torch.device("cpu")
        block = sum(map(cpu_seconds, self.block(dtype, cpu)))
        return self.layers * block + cpu_seconds(self.head(dtype, cpu))


def cpu_seconds(product: Linear | Attention) -> float:
    """CPU seconds of it, the second time that it is done."""
    product()
    start = time.process_time()
    product()
    return time.process_time() - start
