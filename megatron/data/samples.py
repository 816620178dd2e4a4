"""What the parts of the data pipeline know of one another.

documents -> recipe -> samples -> loader: a recipe makes samples of one kind (GPT, BERT, T5 ...) out
of documents that lie in indexed files, in raw text or elsewhere; a blend takes samples of several.

Shape suffixes: S sequence, T the S + 1 tokens of a sample.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache

Sample_co = TypeVar("Sample_co", covariant=True)


class Documents(Protocol):
    """Tokenized documents: sequences of tokens, each document one or more of them."""

    prefix: str
    """Names them to the user: the path that a flag gave."""
    sequence_lengths: npt.NDArray[np.int32]
    """Tokens in each sequence, [n]."""
    document_indices: npt.NDArray[np.int64]
    """Document d holds the sequences document_indices[d] up to document_indices[d + 1]."""

    @property
    def lengths_digest(self) -> str:
        """Identifies the sequence lengths: equal when those are equal."""

    def __len__(self) -> int:
        """Number of sequences."""

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """`length` tokens (default: the rest) of sequence `index`, from token `offset` on."""

    def verify(self) -> None:
        """Check what is too long to check whenever the documents are opened.

        Raises:
            ValueError: they are damaged; the message names the file.
        """


class Piece(NamedTuple):
    """Where tokens of a sample come from."""

    source: str
    """Prefix or file, as a flag named it."""
    sequence: int
    """Number of the sequence there, from 0."""
    start: int
    """First token of the sequence that is used."""
    stop: int
    """One behind the last token that is used."""


class SampleDataset(Protocol[Sample_co]):
    """Samples by number; sample i is the same whenever and wherever it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample_co: ...

    def origin(self, index: int, /) -> Sequence[Piece]:
        """Where sample `index` comes from, in the order of its tokens."""


class SampleRecipe(Protocol[Sample_co]):
    """How samples of one kind are made of documents; a frozen dataclass of its settings."""

    def units(self, documents: Documents) -> int:
        """What --split shares out: the number of documents, or of sequences."""

    def build(
        self,
        documents: Documents,
        units: range,
        num_samples: int,
        name: str,
        cache: IndexCache,
    ) -> SampleDataset[Sample_co]:
        """At least `num_samples` samples of some of the documents, in an order fixed by the recipe.

        Args:
            units: those to read, of `units(documents)`.
            num_samples: samples wanted.
            name: of the part ("train" ...), for messages and the cache.
            cache: where index arrays are kept; their entry's name hashes all that they depend on.

        Raises:
            ValueError: no sample can be made of the documents.
        """


def checked_index(index: int, length: int) -> int:
    """The number of a sample of a dataset of `length`.

    Raises:
        IndexError: there is no such sample.
    """
    index = operator.index(index)
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of a dataset of {length} samples")
    return index


def checked_range(
    lengths: npt.NDArray[np.integer], index: int, offset: int, length: int | None, name: str
) -> tuple[int, int]:
    """A sequence's number, and the token after `length` (default: the rest) from `offset` on.

    Args:
        lengths: tokens in each sequence of `name`.

    Raises:
        IndexError: no such sequence, or the range leaves it.
    """
    index = operator.index(index)
    if not 0 <= index < len(lengths):
        raise IndexError(f"sequence {index} of {name}, which has {len(lengths)}")
    available = int(lengths[index])
    stop = available if length is None else offset + length
    if not 0 <= offset <= stop <= available:
        raise IndexError(
            f"tokens {offset} to {stop} of sequence {index} of {name}, which has {available} tokens"
        )
    return index, stop


class PackedSample(NamedTuple):
    """A sample of a causal model whose documents and losses are known by themselves, not by
    end-of-document tokens."""

    tokens_T: npt.NDArray[np.int64]
    """Inputs and, shifted by one, labels."""
    loss_mask_S: npt.NDArray[np.float32]
    """1.0 where the prediction of the next token counts."""
    document_ids_S: npt.NDArray[np.int64]
    """A token attends to earlier ones of the same number, and its position is counted from the
    first of them; numbers rise along the sample. Padding has the last number."""
