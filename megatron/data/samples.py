"""Interfaces between the stages of the data pipeline, and samples shown as text.

documents -> recipe -> samples -> loader: a recipe builds samples of one type (GPT, BERT, T5 ...)
from documents in indexed files, raw text or elsewhere; a blend mixes samples from several sources.

Shape suffixes: S sequence, T = S + 1 tokens of a sample.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache
from megatron.tokenizer import Tokenizer

Sample_co = TypeVar("Sample_co", covariant=True)

TRAINING = "train"
"""Name of the training split."""


class Documents(Protocol):
    """Tokenized documents, each of which has one or more sequences of tokens."""

    prefix: str
    """Path as given by the user, for messages."""
    sequence_lengths: npt.NDArray[np.int32]
    """Number of tokens in each sequence, [n]."""
    document_indices: npt.NDArray[np.int64]
    """Document d has the sequences document_indices[d] to document_indices[d + 1] (exclusive)."""

    @property
    def lengths_digest(self) -> str:
        """Digest of the sequence lengths. Equal digests mean equal lengths."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """Return `length` tokens (default: up to the end) of sequence `index` from `offset` on."""

    def verify(self) -> None:
        """Run the checks that are too slow for every opening. Raises ValueError on damage."""


class Piece(NamedTuple):
    """Range of tokens in a sequence that a sample uses."""

    source: str
    """Prefix or file, as written in the flag."""
    sequence: int
    """Index of the sequence in the source."""
    start: int
    stop: int


class Segment(NamedTuple):
    """Consecutive text that counts in the loss either as a whole or not at all."""

    text: str
    counted: bool


class NeighborText(NamedTuple):
    """Retrieved text that a model reads in addition to a sample, in human-readable form."""

    name: str
    """Name of the text for which the neighbour was retrieved."""
    piece: Piece
    """Location of the neighbour, without its continuation."""
    text: str
    """Text of the neighbour and its continuation."""


class SampleView(NamedTuple):
    """Human-readable sample as the model reads it, or one row of a sample that has several."""

    tokens_S: np.ndarray
    loss_mask_S: np.ndarray
    text: str
    """Text, with [[double brackets]] around the tokens that do not count in the loss."""
    segments: Sequence[Segment] = ()
    """Segments of the text; empty if the text is not that of the tokens."""
    name: str = ""
    """Role of the row in its sample."""
    neighbors: Sequence[NeighborText] = ()


class SampleDataset(Protocol[Sample_co]):
    """Samples by index. Sample i is always the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample_co: ...

    def origin(self, index: int, /) -> Sequence[Piece]:
        """Return the documents and offsets of sample `index`, in the order of its tokens."""


class RenumberedSamples(ABC, Generic[Sample_co]):
    """View of another dataset that reorders its samples. Subclasses map the indices."""

    def __init__(self, dataset: SampleDataset[Sample_co]) -> None:
        self.dataset = dataset

    @abstractmethod
    def number(self, index: int) -> int:
        """Return the index, in the original dataset, of this view's sample `index`."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Sample_co:
        return self.dataset[self.number(index)]

    def origin(self, index: int, /) -> Sequence[Piece]:
        return self.dataset.origin(self.number(index))


class RepeatedSamples(RenumberedSamples[Sample_co]):
    """Samples of a dataset, cycled until there are ``num_samples``."""

    def __init__(self, dataset: SampleDataset[Sample_co], num_samples: int) -> None:
        super().__init__(dataset)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def number(self, index: int) -> int:
        return checked_index(index, len(self)) % len(self.dataset)


class SampleRecipe(Protocol[Sample_co]):
    """Recipe that builds samples of one type from documents: a frozen dataclass of settings."""

    def units(self, documents: Documents) -> int:
        """Return the number of units (documents or sequences) that --split divides."""

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> SampleDataset[Sample_co]:
        """Return at least `num_samples` samples from the given `units`, in an order that the recipe
        determines. `name` is the split's, for messages and cache keys. Raises ValueError if no
        sample can be built from the documents."""


def check_ids(
    tokens: npt.NDArray[np.int64],
    vocab_size: int,
    sample: int,
    origin: Callable[[int], Sequence[Piece]],
) -> None:
    """Check the token ids of a sample, which consists of the pieces of its ``origin``. Raises
    ValueError, which names a file. Files are checked when they are opened, so a wrong id means that
    the file has changed since, or that its tokenizer returned an id outside its vocabulary."""
    # Viewed as unsigned, negative ids are the largest.
    if not len(tokens) or np.maximum.reduce(tokens.view(np.uint64)) < vocab_size:
        return
    first = int(np.argmax(tokens.view(np.uint64) >= vocab_size))
    where, before = "", 0
    for piece in origin(sample):
        before += piece.stop - piece.start
        if first < before:
            where = f"{piece.source}: sequence {piece.sequence} contains "
            break
    raise ValueError(
        f"{where}the token id {tokens[first]}, but the vocabulary has {vocab_size} ids (0 to "
        f"{vocab_size - 1}): the data were changed or damaged since the run began; restore them, "
        f"and resume from the last checkpoint (sample {sample})"
    )


def checked_index(index: int, length: int) -> int:
    """Return the index as an int. Raises IndexError if it is negative or not below `length`."""
    index = operator.index(index)
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of a dataset of {length} samples")
    return index


def checked_range(
    lengths: npt.NDArray[np.integer], index: int, offset: int, length: int | None, name: str
) -> tuple[int, int]:
    """Return a sequence's index, and the end of `length` tokens (default: all) from `offset` on.
    Raises IndexError if `name`, with sequences of `lengths`, does not have these tokens."""
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
    """Sample for a causal model whose document ids and loss mask are explicit, not derived from
    end-of-document tokens. It may be shorter than others in its batch."""

    tokens_T: npt.NDArray[np.int64]
    """Inputs, and, shifted by one, labels."""
    loss_mask_S: npt.NDArray[np.float32]
    """1.0 where the prediction of the next token counts in the loss, else 0.0."""
    document_ids_S: npt.NDArray[np.int64]
    """Document ids, non-decreasing. A token attends to itself and earlier tokens with its id, and
    positions count from the document's start. Padding has the last id."""


def segments_of(
    tokenizer: Tokenizer, tokens: npt.NDArray[np.integer], counted: npt.NDArray[np.bool_]
) -> Iterator[Segment]:
    """Yield the text of tokens [n], divided where `counted` changes."""
    changes = np.flatnonzero(np.diff(counted)) + 1
    for part in np.split(np.arange(len(tokens)), changes):
        if len(part):
            yield Segment(tokenizer.detokenize(tokens[part].tolist()), bool(counted[part[0]]))


def bracketed(segments: Sequence[Segment]) -> str:
    """Return the text with [[double brackets]] around what does not count in the loss. Line breaks
    between documents are outside the brackets."""
    return "".join(
        segment.text if segment.counted or segment.text == "\n" else f"[[{segment.text}]]"
        for segment in segments
    )


def causal_view(
    tokenizer: Tokenizer,
    tokens_S: np.ndarray,
    labels_S: np.ndarray,
    loss_mask_S: np.ndarray,
    document_ids_S: np.ndarray | None,
    answers: bool,
) -> SampleView:
    """Return a row in which each token is predicted from those before it. Documents that do not
    attend to each other are on separate lines. ``answers`` also shows a last label that counts."""
    starts = np.empty(0, np.int64)
    if document_ids_S is not None:
        starts = np.flatnonzero(np.diff(document_ids_S)) + 1
    # Mask position i is for token i + 1. The first token is not predicted in this row.
    predicted_S = np.concatenate((loss_mask_S[:1], loss_mask_S[:-1])) > 0
    shown_S = tokens_S
    if answers and loss_mask_S[-1] > 0:
        # The last token of an answer at the end is predicted but is not an input.
        shown_S = np.append(tokens_S, labels_S[-1])
        predicted_S = np.append(predicted_S, True)
    segments: list[Segment] = []
    for tokens, predicted in zip(
        np.split(shown_S, starts), np.split(predicted_S, starts), strict=True
    ):
        segments += [Segment("\n", False)] * bool(segments)
        segments += segments_of(tokenizer, tokens, predicted)
    return SampleView(tokens_S, loss_mask_S, bracketed(segments), segments)


class SequenceLengths:
    """Sequence length of each step, in tokens. It is constant here; subclasses in features vary it.

    Attributes:
        grows: whether the length grows during the run.
        stages: (first step, sequence length from then on) for each stage, ascending from step 0.
        folds: number of samples of a micro batch that are folded into more rows; None for none.
    """

    grows = False
    folds: int | None = None

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        self.stages: Sequence[tuple[int, int]] = ((0, seq_length),)

    def at(self, iteration: int) -> int:
        """Return the sequence length of the step after ``iteration`` steps."""
        return self.seq_length

    def shown(self, iteration: int) -> dict[str, int]:
        """Return additional lengths to log for the step after ``iteration`` steps, by name."""
        return {}

    def shorter(self, iteration: int) -> tuple[int, int] | None:
        """Return (number of blocks that read fewer tokens than the others, number of tokens that
        they read) for the step after ``iteration`` steps, or None if all blocks read all tokens."""
        return None

    def tokens(self, consumed_samples: int) -> int:
        """Return the number of tokens in the first ``consumed_samples`` samples of the run."""
        return consumed_samples * self.seq_length

    def samples(self, tokens: int) -> int:
        """Return the smallest number of samples with at least ``tokens`` tokens."""
        return -(-tokens // self.seq_length)

    def cut(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        """Yield batches cut to the sequence length of the step after ``iteration`` steps."""
        return batches
