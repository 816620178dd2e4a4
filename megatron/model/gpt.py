"""GPT as a list of layers."""

from __future__ import annotations

from functools import partial

from torch import nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.block import Block
from megatron.model.embedding import InputEmbedding, TokenEmbedding
from megatron.model.layer_list import LayerSpec, LayerStack
from megatron.model.norm import FinalNorm
from megatron.model.state import LayerState
from megatron.parallel.tensor_parallel import TensorParallel


def _project(table: nn.Module, state: LayerState) -> LayerState:
    return table(state, project=True)


def gpt_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel | None = None
) -> list[LayerSpec]:
    """The layers of a GPT: token table, positions, blocks, final norm, head.

    Args:
        model: shape of the network, with the vocabulary sizes filled in.
        parallel: what is recomputed in the backward pass, and how large logits may become.
        region: the tensor-parallel ranks; this process alone without it.
    """
    tp = tp or TensorParallel()
    selective = parallel.recompute_granularity == "selective"
    chunk = parallel.logits_chunk_mib
    table = partial(TokenEmbedding, model, tp, None if chunk is None else chunk * 2**20)
    words, tied_key = "embedding.word_embeddings", "embed" if model.embedding.tied else None
    return [
        LayerSpec(words, table, tied_key),
        LayerSpec("embedding", partial(InputEmbedding, model, tp)),
        *(
            LayerSpec(f"layers.{n}", partial(Block, model, n, tp, selective), block=True)
            for n in range(model.num_layers)
        ),
        LayerSpec("final_norm", partial(FinalNorm, model, tp)),
        LayerSpec(words if model.embedding.tied else "output_layer", table, tied_key, _project),
    ]


def build_gpt(
    model: ModelConfig,
    parallel: ParallelConfig | None = None,
    tp: TensorParallel | None = None,
) -> LayerStack:
    """A GPT as one module, not yet initialised."""
    parallel = parallel or ParallelConfig()
    return LayerStack(gpt_layers(model, parallel, tp), parallel)
