"""BERT's samples out of TFRecords (`--use-tfrecords`): each record is one, masked already.

Epochs repeat the same masks: --dupe_factor of create_pretraining_data.py is what varies them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.kinds.masked_data.batch import BertSample
from megatron.data.kinds.masked_data.index import INDEX_VERSION, NO_LABEL
from megatron.data.kinds.masked_data.random_state import epoch_rng
from megatron.data.kinds.masked_data.tfrecord_documents import TFRecords
from megatron.data.samples import Documents, Piece, checked_index
from megatron.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class TFRecordRecipe:
    """How BERT's samples are made of TFRecords: shuffled anew in each epoch, else as they are."""

    seq_length: int
    """Tokens of a sample, padding included."""
    seed: int
    pad: int
    vocab_size: int

    @classmethod
    def from_config(cls, tokenizer: Tokenizer, seq_length: int, seed: int) -> TFRecordRecipe:
        """The recipe for `--use-tfrecords`; masks and pairs are those of the records."""
        return cls(seq_length, seed, tokenizer.pad, tokenizer.vocab_size)

    def units(self, documents: Documents) -> int:
        """The number of records."""
        return len(documents)

    def build(
        self,
        documents: Documents,
        units: range,
        num_samples: int,
        name: str,
        cache: IndexCache,
    ) -> TFRecordDataset:
        """`num_samples` samples of the records `units`; see SampleRecipe.

        Raises:
            ValueError: there is no record, or one is too long or of another vocabulary.
        """
        assert isinstance(documents, TFRecords), "TFRecordRecipe makes samples of TFRecords"
        if not units:
            raise ValueError(f"{documents.prefix}: there are no records for {name}")
        documents.check_vocabulary(self.vocab_size)
        longest = units.start + int(documents.sequence_lengths[units.start : units.stop].argmax())
        piece = documents.piece(longest)
        if piece.stop > self.seq_length:
            raise ValueError(
                f"{piece.source}, record {piece.sequence}: it has {piece.stop} tokens, more than "
                f"--seq-length {self.seq_length}: give --seq-length {piece.stop} or more"
            )
        depends_on = {
            "version": INDEX_VERSION,
            "records": [units.start, units.stop],
            "samples": num_samples,
            "seed": self.seed,
            "part": name,
        }
        index = cache.arrays(
            f"tfrecord-{name}",
            depends_on,
            lambda: {"order": _order(units, num_samples, self.seed, name)},
        )
        return TFRecordDataset(documents, self, index)


class TFRecordDataset:
    """Samples of BERT by number; made by TFRecordRecipe.build."""

    def __init__(self, records: TFRecords, recipe: TFRecordRecipe, index: StoredArrays) -> None:
        self.records = records
        self.recipe = recipe
        self._index = index

    def __len__(self) -> int:
        return len(self._index["order"])

    def __getitem__(self, index: int, /) -> BertSample:
        record = self.records.record(self._record(index))
        length, size = self.recipe.seq_length, len(record.tokens_S)
        tokens_S = np.full(length, self.recipe.pad, np.int64)
        tokens_S[:size] = record.tokens_S
        types_S = np.zeros(length, np.int64)
        types_S[:size] = record.types_S
        labels_S = np.full(length, NO_LABEL, np.int64)
        labels_S[record.positions_P] = record.labels_P
        loss_mask_S = np.zeros(length, np.float32)
        loss_mask_S[record.positions_P] = 1.0
        padding_mask_S = np.zeros(length, np.int64)
        padding_mask_S[:size] = 1
        return BertSample(
            tokens_S, types_S, labels_S, record.is_random, loss_mask_S, padding_mask_S
        )

    def origin(self, index: int, /) -> list[Piece]:
        """The record: its file, its number there, all its tokens."""
        return [self.records.piece(self._record(index))]

    def _record(self, index: int) -> int:
        return int(self._index["order"][checked_index(index, len(self))])


def _order(units: range, num_samples: int, seed: int, part: str) -> npt.NDArray[np.integer]:
    """The record of each sample: whole epochs, each shuffled by itself."""
    dtype = np.int32 if units.stop <= np.iinfo(np.int32).max else np.int64
    order: npt.NDArray[np.integer] = np.empty(num_samples, dtype)
    for epoch in range(-(-num_samples // len(units))):
        start = epoch * len(units)
        records = epoch_rng(seed, part, epoch).permutation(len(units))
        order[start : start + len(units)] = units.start + records[: num_samples - start]
    return order
