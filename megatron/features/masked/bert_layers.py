"""BERT as a list of layers: an encoder with two heads, or with one for labelled text.

Pre-norm blocks make it Megatron's BERT. With ``--apply-residual-connection-post-layernorm`` it is
the original: the first block's first norm is that of the embeddings, the others follow the sums.

Shapes: B batch, S sequence (a rank's slice of it where the region is split), H hidden.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.block import Block
from megatron.model.embedding import InputEmbedding, vocabulary_layers, word_embeddings
from megatron.model.heads import head_layers, pooler
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.mlp import ACTIVATIONS
from megatron.model.norm import FinalNorm, build_norm
from megatron.parallel.layers import WholeLinear
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel

SOP_LOSS = "sop loss"
"""Name of the second head's loss, whether its task is sentence order or next sentence."""

NO_ORDER = -1
"""Label of a sample that has no order to predict."""


class BinaryHead(WholeLinear):
    """Whether the second segment of a sample is random, or the two are swapped."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        init = initial(model)
        super().__init__(model.hidden_size, 2, bias=model.mlp.bias, init=init, tp=tp.whole)

    def forward(self, state: LayerState) -> LayerState:  # type: ignore[override]
        """``pooled`` [B, H] to logits [B, 2], or, where the state has targets, to a loss."""
        assert state.pooled is not None
        logits_B2 = super().forward(state.pooled)
        if state.targets is None:
            return state.changed(pooled=logits_B2)
        loss = order_loss(logits_B2, state.batch.is_random_B)
        return state.changed(pooled=None).with_loss(SOP_LOSS, loss)


def order_loss(logits_B2: Tensor, labels_B: Tensor) -> Tensor:
    """Mean cross entropy of the samples whose label is not :data:`NO_ORDER`, zero without such
    samples: a scalar, float32 or float64."""
    logits_B2 = logits_B2.to(torch.promote_types(logits_B2.dtype, torch.float32))
    total = F.cross_entropy(logits_B2, labels_B, ignore_index=NO_ORDER, reduction="sum")
    return total / (labels_B != NO_ORDER).sum().clamp(min=1)


class LMTransform(nn.Module):
    """What hidden states pass before the output head: a dense layer, its activation and a norm.
    Where there are targets, only those of the predicted tokens are used: they are a seventh
    of all, and nothing is computed for the others."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        width, init = model.hidden_size, initial(model)
        self.tp = tp
        self.activation = ACTIVATIONS[model.head_activation]
        self.dense = WholeLinear(width, width, bias=model.mlp.bias, init=init, tp=tp)
        self.norm = build_norm(model, tp)

    def forward(self, state: LayerState) -> LayerState:
        """Hidden states [B, S, H] to [B, S, H] or, with their targets, [B, P, H]."""
        if state.targets is not None:
            positions_BP = state.batch.positions_BP
            missing = -positions_BP.shape[1] % self.tp.slices
            targets = state.targets.at(positions_BP).padded(missing)
            hidden = self.tp.take(state.hidden, F.pad(positions_BP, (0, missing)))
            state = state.changed(hidden=hidden, targets=targets)
        return state.with_hidden(self.norm(self.activation(self.dense(state.hidden))))


def bert_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel | None = None
) -> list[LayerSpec]:
    """The layers of a BERT: embeddings, blocks, final norm, and the heads: the second as the model
    has one and the masked-LM head, or one for labelled text. ``tp`` is None for a single
    process."""
    tp = tp or TensorParallel()
    selective = parallel.recompute_granularity == "selective"
    if model.head == "lm":
        words, head = vocabulary_layers(model, parallel, tp, head_bias=True)
        second_head = [
            pooler(model, tp),
            LayerSpec("binary_head", partial(BinaryHead, model, tp)),
        ]
        heads = [
            *(second_head if model.bert_binary_head else ()),
            LayerSpec("lm_head", partial(LMTransform, model, tp)),
            head,
        ]
    else:
        words, heads = word_embeddings(model, tp), head_layers(model, tp)
    return [
        words,
        LayerSpec("embedding", partial(InputEmbedding, model, tp, model.token_types)),
        *(
            LayerSpec(f"layers.{n}", partial(Block, model, n, tp, selective, "full"), block=True)
            for n in range(model.num_layers)
        ),
        LayerSpec("final_norm", partial(FinalNorm, model, tp)),
        *heads,
    ]
