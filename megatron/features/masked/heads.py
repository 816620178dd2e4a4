"""Labelled texts, and the heads for them: classification, multiple choice and span prediction.

Shapes: B micro batch, C choices of each question, S sequence (a rank's slice of it in a
sequence-parallel region), H hidden, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.data.loader import mapped
from megatron.model.embedding import LM_LOSS, precise
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.parallel.collectives import start_all_reduce
from megatron.parallel.layers import Dropout, WholeLinear
from megatron.parallel.mesh import Group
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel

Label = int | float | tuple[int, int]
"""Index of a class or of the right choice; a float for regression; or the positions of the first
and last token of a span."""


class LabelledText(NamedTuple):
    """Labelled sample: token ids and token types of one text or, for a multiple-choice question, of
    one text per choice, without padding. ``identity`` labels the sample in predictions."""

    tokens: tuple[npt.NDArray[np.int64], ...]
    types: tuple[npt.NDArray[np.int64], ...]
    label: Label
    identity: str | int = 0

    @property
    def length(self) -> int:
        """Number of tokens of the longest text."""
        return max(map(len, self.tokens))


class LabelledBatch(NamedTuple):
    """Micro batch of labelled texts. The choices of a question are consecutive rows."""

    tokens_BS: Tensor
    """Token ids with special tokens, then padding; int64."""
    types_BS: Tensor
    """Token types; 0 for padding; int64."""
    padding_mask_BS: Tensor
    """1 for tokens, 0 for padding, which is excluded from attention; int64."""
    labels_B: Tensor
    """Labels: int64, float32 for regression, and [B, 2] for spans."""
    choices: int = 1
    padded: bool = True
    """True if the batch contains padding."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LabelledBatch:
        return mapped(self, Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def collate_labelled(
    samples: Sequence[LabelledText], length: int | None = None, *, pad: int, multiple: int = 8
) -> LabelledBatch:
    """Stack samples with the same number of texts, padded with the token ``pad`` to ``length``. If
    ``length`` is None, the longest text is rounded up to a multiple of ``multiple``."""
    longest, choices = max(sample.length for sample in samples), len(samples[0].tokens)
    if length is None:
        length = -(-longest // multiple) * multiple
    assert longest <= length, f"a text of {longest} tokens in a batch of {length}"
    assert all(len(sample.tokens) == choices for sample in samples), "questions differ in choices"
    texts = [text for sample in samples for text in zip(sample.tokens, sample.types, strict=True)]
    tokens_BS = np.full((len(texts), length), pad, np.int64)
    types_BS, padding_mask_BS = (np.zeros_like(tokens_BS) for _ in range(2))
    for row, (tokens, types) in enumerate(texts):
        size = len(tokens)
        tokens_BS[row, :size], types_BS[row, :size] = tokens, types
        padding_mask_BS[row, :size] = 1
    return LabelledBatch(
        torch.from_numpy(tokens_BS),
        torch.from_numpy(types_BS),
        torch.from_numpy(padding_mask_BS),
        torch.tensor([sample.label for sample in samples]),
        choices,
        padded=not bool(padding_mask_BS.all()),
    )


IGNORED = -100
"""Label of a sample that is excluded from the loss."""

POOLER = "pooler"
HEAD_NAMES = {
    "classification": "classification_head",
    "multiple_choice": "multichoice_head",
    "span": "span_head",
}
"""Canonical name of each head's last layer, by the value of `ModelConfig.head`."""


class _FirstToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        first = x[:, 0].clone() if group.rank == 0 else torch.zeros_like(x[:, 0])
        return start_all_reduce(first, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.new_zeros(ctx.shape)
        if ctx.group.rank == 0:
            whole[:, 0] = grad
        return whole, None


def first_token(tp: TensorParallel, x_BSH: Tensor) -> Tensor:
    """Return the first token of the whole sequence, [B, H], on every rank. All ranks must compute
    the same from it, because its gradient is used only on the rank that has the token."""
    x_BH = _FirstToken.apply(x_BSH, tp.group) if tp.split else x_BSH[:, 0]
    if tp.context.size == 1:
        return x_BH
    # Other ranks multiply by zero instead of skipping, so that their backward passes take part in
    # the same collectives.
    return tp.context.sum(x_BH * float(tp.context.rank == 0))


class Pooler(nn.Module):
    """Pooler of a sample: tanh of a linear projection of its first token."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, width = tp, model.hidden_size
        init = initial(model)
        self.dense = WholeLinear(width, width, bias=model.mlp.bias, init=init, tp=tp.whole)

    def forward(self, state: LayerState) -> LayerState:
        """Pool hidden states [B, S, H] into ``pooled`` [B, H]."""
        return state.changed(pooled=torch.tanh(self.dense(first_token(self.tp, state.hidden))))


def pooler(model: ModelConfig, tp: TensorParallel) -> LayerSpec:
    """Return the layer between the final norm and a head that classifies whole samples."""
    return LayerSpec(POOLER, partial(Pooler, model, tp))


class SampleHead(WholeLinear):
    """Dropout and linear layer on the pooled sample, replicated on every rank."""

    def __init__(self, model: ModelConfig, outputs: int, tp: TensorParallel) -> None:
        init = initial(model)
        super().__init__(model.hidden_size, outputs, bias=True, init=init, tp=tp.whole)
        self.dropout = Dropout(model.hidden_dropout, tp.whole)

    def forward(self, state: LayerState) -> LayerState:  # type: ignore[override]
        """Replace ``pooled`` [B, H] with logits, or with a loss if the state has targets."""
        assert state.pooled is not None
        logits = self.arranged(super().forward(self.dropout(state.pooled)), state.batch)
        if state.targets is None:
            return state.changed(pooled=logits)
        loss = label_loss(logits, state.targets.labels_BS)
        return state.changed(pooled=None).with_loss(LM_LOSS, loss)

    def arranged(self, outputs: Tensor, batch: Any) -> Tensor:
        """Arrange the layer's outputs as logits [B, L]."""
        return outputs


class ClassificationHead(SampleHead):
    """Head that predicts the label of a text, or a number if there is only one label."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        assert model.num_labels is not None
        super().__init__(model, model.num_labels, tp)


class MultipleChoiceHead(SampleHead):
    """Head that scores each choice of a question. The choices are consecutive rows of the batch."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(model, 1, tp)

    def arranged(self, outputs: Tensor, batch: Any) -> Tensor:
        """Reshape scores from [B x C, 1] to [B, C]."""
        return outputs.view(-1, batch.choices)


class SpanHead(WholeLinear):
    """Head that predicts the start and end of a span of the text, with two scores per token."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        init = initial(model)
        super().__init__(model.hidden_size, 2, bias=True, init=init, tp=tp)

    def forward(self, state: LayerState) -> LayerState:  # type: ignore[override]
        """Compute logits [B, S, 2] of the whole sequence from hidden states [B, S, H], or the loss
        if the state has targets."""
        logits_BS2 = self.tp.whole_sequence(super().forward(state.hidden))
        if state.targets is None:
            return state.with_hidden(logits_BS2)
        loss = span_loss(logits_BS2, state.targets.labels_BS)
        return state.with_loss(LM_LOSS, loss)


def label_loss(logits_BL: Tensor, labels_B: Tensor) -> Tensor:
    """Return the mean loss over samples without the label :data:`IGNORED`, a scalar, float32 or
    float64. It is the cross entropy or, for float labels, the squared error."""
    logits_BL = precise(logits_BL)
    if labels_B.is_floating_point():
        return F.mse_loss(logits_BL.squeeze(-1), labels_B.to(logits_BL.dtype))
    return _cross_entropy(logits_BL, labels_B, IGNORED)


def span_loss(logits_BS2: Tensor, labels_B2: Tensor) -> Tensor:
    """Return the mean of the cross entropies of span starts and ends, a scalar, float32 or float64.
    Positions beyond the end of the sequence are ignored; negative positions count as 0."""
    length = logits_BS2.shape[1]
    labels_B2 = labels_B2.clamp(0, length)
    start_BS, end_BS = precise(logits_BS2).unbind(-1)
    losses = (
        _cross_entropy(logits_BS, labels_B2[:, part], length)
        for part, logits_BS in enumerate((start_BS, end_BS))
    )
    return sum(losses) / 2  # type: ignore[return-value]


def _cross_entropy(logits_BL: Tensor, labels_B: Tensor, ignored: int) -> Tensor:
    """Return the mean cross entropy over labels other than ``ignored``, or zero without such
    labels."""
    total = F.cross_entropy(logits_BL, labels_B, ignore_index=ignored, reduction="sum")
    return total / (labels_B != ignored).sum().clamp(min=1)


_HEADS: dict[str, Callable[[ModelConfig, TensorParallel], WholeLinear]] = {
    "classification": ClassificationHead,
    "multiple_choice": MultipleChoiceHead,
    "span": SpanHead,
}


def head_layers(model: ModelConfig, tp: TensorParallel) -> list[LayerSpec]:
    """Return the layers after the final norm of a model for labelled text."""
    head = LayerSpec(HEAD_NAMES[model.head], partial(_HEADS[model.head], model, tp))
    return [head] if model.head == "span" else [pooler(model, tp), head]


def head_flops(model: ModelConfig) -> float:
    """Return the forward FLOPs per text of the layers after the final norm, for a head for labelled
    text."""
    width = model.hidden_size
    if model.head == "span":
        return 2.0 * model.seq_length * width * 2
    return 2.0 * width**2 + 2.0 * width * (model.num_labels or 1)
