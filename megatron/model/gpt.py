"""GPT as a list of layers, and its loss."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.block import Block
from megatron.model.embedding import Embedding
from megatron.model.head import FinalNorm, OutputHead
from megatron.model.layer_list import LayerRecipe, LayerStack, Stream
from megatron.parallel.cross_entropy import masked_mean, vocab_parallel_cross_entropy
from megatron.parallel.groups import SINGLE, Group


def _project(embedding: nn.Module, stream: Stream) -> Stream:
    return embedding(stream, project=True)


def gpt_layers(
    model: ModelConfig, parallel: ParallelConfig, group: Group = SINGLE
) -> list[LayerRecipe]:
    """The layers of a GPT: embedding, blocks, final norm, head.

    Args:
        model: shape of the network, with the vocabulary sizes filled in.
        parallel: what is recomputed in the backward pass.
        group: the tensor-parallel group.
    """
    assert model.num_layers is not None
    selective = parallel.recompute_granularity == "selective"
    embed = partial(Embedding, model, group)
    tied_key = "embed" if model.tied else None
    head = (
        LayerRecipe("embedding", embed, tied_key, _project)
        if model.tied
        else LayerRecipe("output_layer", partial(OutputHead, model, group))
    )
    return [
        LayerRecipe("embedding", embed, tied_key),
        *(
            LayerRecipe(f"layers.{n}", partial(Block, model, n, group, selective), block=True)
            for n in range(model.num_layers)
        ),
        LayerRecipe("final_norm", partial(FinalNorm, model)),
        head,
    ]


def build_gpt(
    model: ModelConfig, parallel: ParallelConfig | None = None, group: Group = SINGLE
) -> LayerStack:
    """A GPT as one module, not yet initialised."""
    parallel = parallel or ParallelConfig()
    return LayerStack(gpt_layers(model, parallel, group), parallel)


def gpt_loss(
    logits_BSV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor, vocab_size: int, group: Group
) -> Tensor:
    """Mean cross entropy (nats per token) over the tokens of a micro batch whose mask is 1."""
    loss_BS = vocab_parallel_cross_entropy(logits_BSV, labels_BS, vocab_size, group)
    return masked_mean(loss_BS, loss_mask_BS)
