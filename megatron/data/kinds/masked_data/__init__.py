"""Samples of models that predict hidden tokens: BERT's masked words, T5's corrupted spans.

The families make them from documents; the kind of data that is read here is TFRecords of BERT
samples, which are masked already.
"""

from __future__ import annotations

from megatron.data.build import SourceReader
from megatron.data.kinds.masked_data.tfrecord import TFRecordRecipe, TFRecords
from megatron.data.pipeline import DataKind, DataPipeline


class MaskedData(DataKind):
    def reader(self, data: DataPipeline) -> SourceReader:
        tokenizer = data.tokenizer
        recipe = TFRecordRecipe(data.seq_length, data.seed, tokenizer.pad, tokenizer.vocab_size)
        return SourceReader(lambda path, source: TFRecords(path, data.cache(path)), recipe)


KIND = MaskedData()
