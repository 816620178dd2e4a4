"""How the parameters of old Megatron checkpoints are cut over tensor-parallel ranks.

It is how ours are cut; what BERT has beside the blocks is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.formats.deepspeed_folders.naming import whole_shards
from megatron.parallel.shard import Cut, Shard


def shards_of(model: ModelConfig, present: Mapping[str, Any]) -> dict[str, Shard]:
    """How each parameter of a network is cut, by canonical name, in the order of the layers.

    Args:
        model: shape of the network, with the vocabulary sizes filled in.
        present: what there is, by canonical name, each with a ``shape``; it decides about the
            parameters of BERT only.
    """
    shards = dict(whole_shards(model))
    table = "embedding.tokentype_embeddings.weight"
    if table in present:
        shards[table] = Shard((present[table].shape[0], model.hidden_size))
    return shards | {name: s for name, s in _bert(model).items() if name in present}


def _bert(model: ModelConfig) -> dict[str, Shard]:
    """What BERT has behind the blocks: a pooler and two heads."""
    hidden, rows = model.hidden_size, model.vocabulary.padded
    square, vector = Shard((hidden, hidden)), Shard((hidden,))
    return {
        "pooler.dense.weight": square,
        "pooler.dense.bias": vector,
        "lm_head.dense.weight": square,
        "lm_head.dense.bias": vector,
        "lm_head.layernorm.weight": vector,
        "lm_head.layernorm.bias": vector,
        "lm_head.bias": Shard((rows,), (Cut(0, unpadded=model.vocabulary.size),)),
        "binary_head.weight": Shard((2, hidden)),
        "binary_head.bias": Shard((2,)),
    }
