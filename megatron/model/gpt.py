"""GPT as a list of layers."""

from __future__ import annotations

from functools import partial

from torch import nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.block import Block
from megatron.model.embedding import InputEmbedding, TokenEmbedding
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.norm import FinalNorm
from megatron.parallel.tensor_parallel import TensorParallel


def _project(table: nn.Module, state: LayerState) -> LayerState:
    return table(state, project=True)


def gpt_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel | None = None
) -> list[LayerSpec]:
    """The layers of a GPT: token embedding, positions, blocks, final norm, head. ``tp`` is None for
    a single process."""
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
