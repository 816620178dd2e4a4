"""GPT as a list of layers, and its loss."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.block import Block
from megatron.model.embedding import Positions, TokenTable
from megatron.model.layer_list import LayerRecipe, LayerStack, Stream
from megatron.model.norm import FinalNorm
from megatron.parallel.cross_entropy import masked_mean, vocab_parallel_cross_entropy
from megatron.parallel.groups import Group
from megatron.parallel.region import TensorParallel


def _project(softcap: float | None, table: nn.Module, stream: Stream) -> Stream:
    stream = table(stream, project=True)
    if softcap is None:
        return stream
    return stream.with_hidden(softcap * torch.tanh(stream.hidden / softcap))


def gpt_layers(
    model: ModelConfig, parallel: ParallelConfig, region: TensorParallel | None = None
) -> list[LayerRecipe]:
    """The layers of a GPT: token table, positions, blocks, final norm, head.

    Args:
        model: shape of the network, with the vocabulary sizes filled in.
        parallel: what is recomputed in the backward pass.
        region: the tensor-parallel ranks; this process alone without it.
    """
    assert model.num_layers is not None
    region = region or TensorParallel()
    selective = parallel.recompute_granularity == "selective"
    table = partial(TokenTable, model, region)
    project = partial(_project, model.final_logit_softcapping)
    words, tied_key = "embedding.word_embeddings", "embed" if model.tied else None
    return [
        LayerRecipe(words, table, tied_key),
        LayerRecipe("embedding", partial(Positions, model, region)),
        *(
            LayerRecipe(f"layers.{n}", partial(Block, model, n, region, selective), block=True)
            for n in range(model.num_layers)
        ),
        LayerRecipe("final_norm", partial(FinalNorm, model, region)),
        LayerRecipe(words if model.tied else "output_layer", table, tied_key, project),
    ]


def build_gpt(
    model: ModelConfig,
    parallel: ParallelConfig | None = None,
    region: TensorParallel | None = None,
) -> LayerStack:
    """A GPT as one module, not yet initialised."""
    parallel = parallel or ParallelConfig()
    return LayerStack(gpt_layers(model, parallel, region), parallel)


def gpt_loss(
    logits_BSV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor, vocab_size: int, group: Group
) -> Tensor:
    """Mean cross entropy (nats per token) over the tokens of a micro batch whose mask is 1."""
    loss_BS = vocab_parallel_cross_entropy(logits_BSV, labels_BS, vocab_size, group)
    return masked_mean(loss_BS, loss_mask_BS)
