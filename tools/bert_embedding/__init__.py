"""Vectors of texts by a BERT, by the names of Megatron-LM's package.

Needs the extra "retro".
"""

from megatron.apps.retro.embedding.disk import DiskEmbedder as DiskDataParallelEmbedder
from megatron.apps.retro.embedding.disk import embedder_of as BertEmbedder
from megatron.apps.retro.embedding.disk import stored_vectors

__all__ = ["BertEmbedder", "DiskDataParallelEmbedder", "stored_vectors"]
