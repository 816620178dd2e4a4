"""Samples of models that predict hidden tokens: BERT's masked words, T5's corrupted spans.

How they are made of documents is up to the families; what is read here are BERT's samples in
TFRecords, which are masked already.
"""

from __future__ import annotations

from megatron.data.build import SourceReader
from megatron.data.kinds.masked_data.tfrecord_bert import TFRecordRecipe
from megatron.data.kinds.masked_data.tfrecord_documents import TFRecords
from megatron.data.pipeline import DataKind, DataPipeline


class MaskedData(DataKind):
    """See :class:`DataKind`."""

    def reader(self, data: DataPipeline) -> SourceReader:
        """See :meth:`DataKind.reader`."""
        recipe = TFRecordRecipe.from_config(data.tokenizer, data.seq_length, data.seed)
        return SourceReader(lambda path, source: TFRecords(path, data.cache(path)), recipe)


KIND = MaskedData()
