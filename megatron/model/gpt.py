"""GPT as a list of layers."""

from __future__ import annotations

from functools import partial

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.block import Block
from megatron.model.embedding import InputEmbedding, vocabulary_layers, word_embeddings
from megatron.model.layer_list import LayerSpec
from megatron.model.norm import FinalNorm
from megatron.parallel.tensor_parallel import TensorParallel


def gpt_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel | None = None
) -> list[LayerSpec]:
    """The layers of a GPT: token embedding, positions, blocks, final norm, and the head, for tokens
    or for a reward. ``tp`` is None for a single process."""
    tp = tp or TensorParallel()
    selective = parallel.recompute_granularity == "selective"
    if model.head == "lm":
        words, head = vocabulary_layers(model, parallel, tp)
        heads = [head]
    else:
        from megatron.model.heads import head_layers

        words, heads = word_embeddings(model, tp), head_layers(model, tp)
    return [
        words,
        LayerSpec("embedding", partial(InputEmbedding, model, tp)),
        *(
            LayerSpec(f"layers.{n}", partial(Block, model, n, tp, selective), block=True)
            for n in range(model.num_layers)
        ),
        LayerSpec("final_norm", partial(FinalNorm, model, tp)),
        *heads,
    ]
