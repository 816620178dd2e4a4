"""Heads for labelled text: its label, the best of several choices, or a span of it; and for
rewards.

Shapes: B micro batch, C choices of each question, S sequence (a rank's slice of it where the region
is split), H hidden, L labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.layers import Dropout, WholeLinear
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel

IGNORED = -100
"""The label of a sample that does not count."""

POOLER = "pooler"
HEAD_NAMES = {
    "classification": "classification_head",
    "multiple_choice": "multichoice_head",
    "span": "span_head",
    "reward": "score",
}
"""Canonical name of each head's last layer, by `ModelConfig.head`."""


class Pooler(nn.Module):
    """Pools a sample: tanh of a dense layer of its first token."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, width = tp, model.hidden_size
        init = initial(model)
        self.dense = WholeLinear(width, width, bias=model.mlp.bias, init=init, tp=tp.whole)

    def forward(self, state: LayerState) -> LayerState:
        """Hidden states [B, S, H] to ``pooled`` [B, H]."""
        return state.changed(pooled=torch.tanh(self.dense(self.tp.first_token(state.hidden))))


def pooler(model: ModelConfig, tp: TensorParallel) -> LayerSpec:
    """Between the final norm and a head on whole samples."""
    return LayerSpec(POOLER, partial(Pooler, model, tp))


class SampleHead(WholeLinear):
    """Dropout of what stands for a sample, and a linear layer; the same on every rank."""

    def __init__(self, model: ModelConfig, outputs: int, tp: TensorParallel) -> None:
        init = initial(model)
        super().__init__(model.hidden_size, outputs, bias=True, init=init, tp=tp.whole)
        self.dropout = Dropout(model.hidden_dropout, tp.whole)

    def forward(self, state: LayerState) -> LayerState:  # type: ignore[override]
        """``pooled`` [B, H] to logits in its place or, where the state has targets, to a loss."""
        assert state.pooled is not None
        logits = self.arranged(super().forward(self.dropout(state.pooled)), state.batch)
        if state.targets is None:
            return state.changed(pooled=logits)
        loss = label_loss(logits, state.targets.labels_BS)
        return state.changed(pooled=None).with_loss(LM_LOSS, loss)

    def arranged(self, outputs: Tensor, batch: Any) -> Tensor:
        """The logits [B, L] of the layer's outputs."""
        return outputs


class ClassificationHead(SampleHead):
    """The label of a text, or a number where there is one label."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        assert model.num_labels is not None
        super().__init__(model, model.num_labels, tp)


class MultipleChoiceHead(SampleHead):
    """A score of each choice; those of a question are consecutive samples."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(model, 1, tp)

    def arranged(self, outputs: Tensor, batch: Any) -> Tensor:
        """[B x C, 1] to [B, C]."""
        return outputs.view(-1, batch.choices)


class SpanHead(WholeLinear):
    """Scores the places where a span of the text starts and ends: two scores of every token."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        init = initial(model)
        super().__init__(model.hidden_size, 2, bias=True, init=init, tp=tp)

    def forward(self, state: LayerState) -> LayerState:  # type: ignore[override]
        """Hidden states [B, S, H] to logits [B, S, 2] of the whole sequence, or to a loss."""
        logits_BS2 = self.tp.whole_sequence(super().forward(state.hidden))
        if state.targets is None:
            return state.with_hidden(logits_BS2)
        loss = span_loss(logits_BS2, state.targets.labels_BS)
        return state.with_loss(LM_LOSS, loss)


class RewardHead(WholeLinear):
    """Rates a text: a number, of its last token."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        init = initial(model)
        super().__init__(model.hidden_size, 1, bias=False, init=init, tp=tp)

    def forward(self, state: LayerState) -> LayerState:  # type: ignore[override]
        """Hidden states [B, S, H] to a number for every token, [B, S, 1]; where there are targets,
        whose position is that of the last token, to losses of pairs of texts."""
        if state.targets is None:
            return state.with_hidden(self.tp.whole_sequence(super().forward(state.hidden)))
        last_B1 = state.targets.positions_BP
        assert last_B1 is not None and last_B1.shape[1] == 1, "a reward is that of a last token"
        x_BPH, targets = state.targets.taken(state.hidden, self.tp)
        reward_BP = self.tp.whole_part(super().forward(x_BPH))[..., 0]
        # Of a context's ranks one has the last token.
        reward_BP = reward_BP.masked_fill(targets.mask_BS == 0, 0.0)
        reward_B = targets.gathered(reward_BP, self.tp.context)[:, 0]
        margin_B = getattr(state.batch, "margin_R", None)
        for name, loss in reward_losses(reward_B, margin_B).items():
            state = state.with_loss(name, loss)
        return state


REWARD_LOSS = "reward loss"
REWARD_LOSSES = {
    REWARD_LOSS: 1.0, "rewards/chosen": 0.0, "rewards/rejected": 0.0, "rewards/margins": 0.0,
    "rewards/accuracies": 0.0,
}  # fmt: skip
"""The loss of a reward model and what is reported next to it: means over pairs."""


def reward_losses(reward_B: Tensor, margin_B: Tensor | None = None) -> dict[str, Tensor]:
    """The numbers of :data:`REWARD_LOSSES`, float32 or float64, of texts in pairs, of which the
    first is the better one: -log sigmoid of the difference (Ouyang et al. 2022, equation 1), less a
    margin where pairs have one, in both of their places (Touvron et al. 2023, equation 2)."""
    better, worse = _precise(reward_B).view(-1, 2).unbind(1)
    difference = better - worse
    wanted = difference if margin_B is None else difference - margin_B[0::2]
    right = (difference > 0).to(difference.dtype)
    seen = [each.detach() for each in (better, worse, difference, right)]
    numbers = (-F.logsigmoid(wanted), *seen)
    return {name: each.mean() for name, each in zip(REWARD_LOSSES, numbers, strict=True)}


def label_loss(logits_BL: Tensor, labels_B: Tensor) -> Tensor:
    """Mean over the samples that count, a scalar, float32 or float64: cross entropy or, of numbers,
    the squared error."""
    logits_BL = _precise(logits_BL)
    if labels_B.is_floating_point():
        return F.mse_loss(logits_BL.squeeze(-1), labels_B.to(logits_BL.dtype))
    return _cross_entropy(logits_BL, labels_B, IGNORED)


def span_loss(logits_BS2: Tensor, labels_B2: Tensor) -> Tensor:
    """Mean of the cross entropies of starts and ends, a scalar, float32 or float64. A place after
    the sequence does not count; one before it is its first token."""
    length = logits_BS2.shape[1]
    labels_B2 = labels_B2.clamp(0, length)
    start_BS, end_BS = _precise(logits_BS2).unbind(-1)
    losses = (
        _cross_entropy(logits_BS, labels_B2[:, part], length)
        for part, logits_BS in enumerate((start_BS, end_BS))
    )
    return sum(losses) / 2  # type: ignore[return-value]


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _cross_entropy(logits_BL: Tensor, labels_B: Tensor, ignored: int) -> Tensor:
    """The mean over labels that are not ``ignored``; zero without any."""
    total = F.cross_entropy(logits_BL, labels_B, ignore_index=ignored, reduction="sum")
    return total / (labels_B != ignored).sum().clamp(min=1)


_HEADS: dict[str, Callable[[ModelConfig, TensorParallel], WholeLinear]] = {
    "classification": ClassificationHead,
    "multiple_choice": MultipleChoiceHead,
    "span": SpanHead,
    "reward": RewardHead,
}


def head_layers(model: ModelConfig, tp: TensorParallel) -> list[LayerSpec]:
    """Return the layers after the final norm of a model with another head than a language
    model's."""
    head = LayerSpec(HEAD_NAMES[model.head], partial(_HEADS[model.head], model, tp))
    return [head] if model.head in ("span", "reward") else [pooler(model, tp), head]


def with_rewards(spec: ModelSpec) -> ModelSpec:
    """The model with the head that gives a text its reward."""
    return replace(
        spec,
        losses=REWARD_LOSSES,
        no_perplexity=frozenset(REWARD_LOSSES),
        head_parts=("output_layer.", f"{HEAD_NAMES['reward']}."),
    )


def head_flops(model: ModelConfig) -> float:
    """Forward FLOPs of one text in the layers after the final norm, with another head than a
    language model's."""
    width = model.hidden_size
    if model.head == "span":
        return 2.0 * model.seq_length * width * 2
    if model.head == "reward":
        return 2.0 * width
    return 2.0 * width**2 + 2.0 * width * (model.num_labels or 1)
