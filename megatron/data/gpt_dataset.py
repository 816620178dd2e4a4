"""GPT samples: S + 1 tokens out of one stream of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron.data.array_file import Blocks
from megatron.data.gpt_index import GPTIndex
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import Documents, Piece, checked_index

# Part of every cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1


@dataclass(frozen=True)
class GPTRecipe:
    """Samples of seq_length + 1 tokens, in Megatron's order.

    A document is one sequence of the file here, as in Megatron.
    """

    seq_length: int
    """Tokens a sample feeds to the model."""
    seed: int
    """Of the shuffles."""

    def units(self, documents: Documents) -> int:
        """What --split shares out: the number of sequences."""
        return len(documents)

    def build(
        self,
        documents: Documents,
        units: range,
        num_samples: int,
        name: str,
        cache: IndexCache,
    ) -> GPTDataset:
        """Build the sample order of the sequences `units`, or take it from the cache.

        Args:
            num_samples: samples wanted; the dataset has at least as many.
            name: of the part ("train" ...), for messages and the cache.

        Raises:
            ValueError: the documents hold no tokens, or their index is damaged.
        """
        lengths = documents.sequence_lengths
        if not lengths[units.start : units.stop].any():
            raise ValueError(
                f"{documents.prefix}: the {len(units)} documents for {name} hold no tokens"
            )
        depends_on = {
            "version": INDEX_VERSION,
            "sequence lengths": documents.lengths_digest,
            "documents": [units.start, units.stop],
            "seq length": self.seq_length,
            "samples": num_samples,
            "seed": self.seed,
        }
        index = GPTIndex.of(lengths, units, self.seq_length, num_samples, self.seed)

        def arrays() -> Iterator[tuple[str, np.ndarray | Blocks]]:
            documents.verify()
            return index.arrays()

        stored = cache.arrays(f"gpt-{name}", depends_on, arrays, index.layout)
        return GPTDataset(documents, self.seq_length, stored)


class GPTDataset:
    """Samples of seq_length + 1 tokens, int64[S + 1], out of documents; a `GPTRecipe` makes it."""

    def __init__(self, documents: Documents, seq_length: int, index: StoredArrays) -> None:
        self.documents = documents
        self.seq_length = seq_length
        self._index = index

    def __len__(self) -> int:
        return len(self._index["shuffle_index"])

    def __getitem__(self, index: int, /) -> np.ndarray:
        index = checked_index(index, len(self))
        tokens_T = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        for sequence, start, length in self._parts(index):
            tokens_T[filled : filled + length] = self.documents.get(sequence, start, length)
            filled += length
        return tokens_T

    def origin(self, index: int, /) -> list[Piece]:
        """Where sample `index` comes from, in the order of its tokens."""
        index = checked_index(index, len(self))
        return [
            Piece(self.documents.prefix, sequence, start, start + length)
            for sequence, start, length in self._parts(index)
        ]

    def _parts(self, index: int) -> list[tuple[int, int, int]]:
        """(sequence, first token there, number of tokens) of each part of a sample; they make
        seq_length + 1 tokens.

        Raises:
            ValueError: the index is damaged where opening it did not look.
        """
        samples, order = self._index["sample_index"], self._index["document_index"]
        lengths = self.documents.sequence_lengths
        row = int(self._index["shuffle_index"][index])
        parts, wanted = [], self.seq_length + 1
        if 0 <= row < len(samples) - 1:
            (position, start), (last, stop) = samples[row].tolist(), samples[row + 1].tolist()
            while wanted > 0 and 0 <= position <= last < len(order):
                sequence = int(order[position])
                if not 0 <= sequence < len(lengths):
                    break
                end = stop + 1 if position == last else int(lengths[sequence])
                if not 0 <= start <= end <= lengths[sequence]:
                    break
                if end > start:
                    parts.append((sequence, start, end - start))
                wanted -= end - start
                position, start = position + 1, 0
                if position > last and wanted == 0:
                    return parts
        raise self._index.damaged(f"sample {index} does not come to {self.seq_length + 1} tokens")
