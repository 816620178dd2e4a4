"""Samples of models that predict hidden tokens: BERT's masked words, T5's corrupted spans.

The families make them from documents; the kind of data that is read here is TFRecords of BERT
samples, which are masked already.
"""

from __future__ import annotations

from megatron.config import ConfigError
from megatron.data.build import SourceReader
from megatron.data.pipeline import DataKind, DataPipeline
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.tfrecord import TFRecordRecipe, TFRecords


class MaskedData(DataKind):
    def reader(self, data: DataPipeline) -> SourceReader:
        tokenizer, config = data.tokenizer, data.config
        if config.section(MaskedDataConfig).bert_packing:
            raise ConfigError(
                "--bert-packing packs samples that are made from documents; those of TFRecord "
                "files are complete: leave it out, or give indexed files"
            )
        if config.model.token_types == 1:
            raise ConfigError(
                "--num-tokentypes 1 is less than the two segments of samples in TFRecord files; "
                "give 2 or more, or 0 for none"
            )
        recipe = TFRecordRecipe(data.seq_length, data.seed, tokenizer.pad, tokenizer.vocab_size)
        return SourceReader(lambda path, source: TFRecords(path, data.cache(path)), recipe)


KIND = MaskedData()
