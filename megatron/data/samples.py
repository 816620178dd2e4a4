"""The interfaces between the parts of the data pipeline, and samples as text.

documents -> recipe -> samples -> loader: a recipe makes samples of one type (GPT, BERT, T5 ...)
from documents in indexed files, raw text or elsewhere; a blend mixes the samples of several.

Shape suffixes: S sequence, T the S + 1 tokens of a sample.
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
"""The name of the part that is trained on."""


class Documents(Protocol):
    """Tokenized documents: sequences of tokens, each document one or more of them."""

    prefix: str
    """The path as the user gave it, for messages."""
    sequence_lengths: npt.NDArray[np.int32]
    """Tokens in each sequence, [n]."""
    document_indices: npt.NDArray[np.int64]
    """Document d is made of the sequences document_indices[d] up to document_indices[d + 1]."""

    @property
    def lengths_digest(self) -> str:
        """Identifies the sequence lengths: equal if and only if they are equal."""

    def __len__(self) -> int:
        """Number of sequences."""

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """`length` tokens (default: the rest) of sequence `index`, starting at token `offset`."""

    def verify(self) -> None:
        """Run the checks that are too slow for every opening; ValueError names a damaged file."""


class Piece(NamedTuple):
    """A range of tokens of a sequence that a sample uses."""

    source: str
    """Prefix or file, as a flag named it."""
    sequence: int
    """Number of the sequence in the source, from 0."""
    start: int
    stop: int


class Segment(NamedTuple):
    """Consecutive text that counts in the loss, or does not."""

    text: str
    counted: bool


class NeighborText(NamedTuple):
    """Retrieved text that a model reads next to a sample, as human-readable lines."""

    name: str
    """Name of the text whose neighbour it is."""
    piece: Piece
    """Piece that the neighbour is from, without its continuation."""
    text: str
    """With its continuation."""


class SampleView(NamedTuple):
    """One sample, or a row of one that has several, as the model reads it, human-readable."""

    tokens_S: np.ndarray
    loss_mask_S: np.ndarray
    text: str
    """Its text; what the loss does not count is in [[double brackets]]."""
    segments: Sequence[Segment] = ()
    """The same in parts, where the text is that of the tokens."""
    name: str = ""
    """Meaning of the row in its sample."""
    neighbors: Sequence[NeighborText] = ()


class SampleDataset(Protocol[Sample_co]):
    """Samples by number; sample i is always the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample_co: ...

    def origin(self, index: int, /) -> Sequence[Piece]:
        """Return the documents and offsets of sample `index`, in the order of its tokens."""


class RenumberedSamples(ABC, Generic[Sample_co]):
    """Samples of another dataset under other numbers."""

    def __init__(self, dataset: SampleDataset[Sample_co]) -> None:
        self.dataset = dataset

    @abstractmethod
    def number(self, index: int) -> int:
        """The number of sample `index` in the original dataset."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Sample_co:
        return self.dataset[self.number(index)]

    def origin(self, index: int, /) -> Sequence[Piece]:
        return self.dataset.origin(self.number(index))


class RepeatedSamples(RenumberedSamples[Sample_co]):
    """The samples of a dataset over and over, ``num_samples`` in all."""

    def __init__(self, dataset: SampleDataset[Sample_co], num_samples: int) -> None:
        super().__init__(dataset)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def number(self, index: int) -> int:
        return checked_index(index, len(self)) % len(self.dataset)


class MadeSamples(Generic[Sample_co]):
    """Samples that ``make`` makes of items of a list when they are read; of no indexed file."""

    def __init__(self, items: Sequence[Any], make: Callable[[Any], Sample_co]) -> None:
        self.items, self.make = items, make

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int, /) -> Sample_co:
        return self.make(self.items[index])

    def origin(self, index: int, /) -> Sequence[Piece]:
        return ()


class SampleRecipe(Protocol[Sample_co]):
    """Construction of samples of one type from documents; a frozen dataclass of its settings."""

    def units(self, documents: Documents) -> int:
        """Number of documents, or of sequences, that --split divides."""

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> SampleDataset[Sample_co]:
        """At least `num_samples` samples of some of the `units(documents)`, in an order fixed by
        the recipe; `name` is that of the part, for messages and the cache. Raises ValueError if no
        sample can be made from the documents."""


def check_ids(
    tokens: npt.NDArray[np.int64],
    vocab_size: int,
    sample: int,
    origin: Callable[[int], Sequence[Piece]],
) -> None:
    """Checks the token ids of a sample, which come from the pieces of its ``origin``; ValueError
    names a file. All ids of a file are checked when it is opened, so that it was changed since, or
    its tokenizer gives ids that it does not have."""
    # As unsigned numbers negative ids are the largest.
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
    """The number of a sample; IndexError if it is not below `length`."""
    index = operator.index(index)
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of a dataset of {length} samples")
    return index


def checked_range(
    lengths: npt.NDArray[np.integer], index: int, offset: int, length: int | None, name: str
) -> tuple[int, int]:
    """A sequence's number, and the token after `length` (default: the rest) from `offset` on;
    IndexError if there is no such sequence, or the range leaves it. `lengths` are the tokens in
    each sequence of `name`."""
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
    """A sample of a causal model with explicit document ids and loss mask, which do not follow from
    end-of-document tokens. It may be shorter than others of its batch."""

    tokens_T: npt.NDArray[np.int64]
    """Inputs and, shifted by one, labels."""
    loss_mask_S: npt.NDArray[np.float32]
    """1.0 where the prediction of the next token counts."""
    document_ids_S: npt.NDArray[np.int64]
    """Non-decreasing. A token attends to earlier ones with the same id, and its position counts
    from the first of them. Padding has the last id."""


def segments_of(
    tokenizer: Tokenizer, tokens: npt.NDArray[np.integer], counted: npt.NDArray[np.bool_]
) -> Iterator[Segment]:
    """The text of tokens, [n], in runs that count or do not."""
    changes = np.flatnonzero(np.diff(counted)) + 1
    for part in np.split(np.arange(len(tokens)), changes):
        if len(part):
            yield Segment(tokenizer.detokenize(tokens[part].tolist()), bool(counted[part[0]]))


def bracketed(segments: Sequence[Segment]) -> str:
    """Text with [[double brackets]] around what does not count; line breaks between documents stand
    alone."""
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
    """A row of which each token is predicted from those before it; documents that attention keeps
    apart are on separate lines. Of ``answers`` the last label is shown too."""
    starts = np.empty(0, np.int64)
    if document_ids_S is not None:
        starts = np.flatnonzero(np.diff(document_ids_S)) + 1
    # Position i of the mask is about token i + 1; the first token ends the previous sample.
    predicted_S = np.concatenate((loss_mask_S[:1], loss_mask_S[:-1])) > 0
    shown_S = tokens_S
    if answers and loss_mask_S[-1] > 0:
        # The end of the last answer is predicted, and never read.
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
    """Tokens of a sample at each step, here always the same; features have others.

    Attributes:
        grows: whether they grow over the run.
        stages: (number of steps before, tokens of a sample from then on), ascending from step 0.
        folds: number of samples of a micro batch that are folded into more rows; None for none.
    """

    grows = False
    folds: int | None = None

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        self.stages: Sequence[tuple[int, int]] = ((0, seq_length),)

    def at(self, iteration: int) -> int:
        """Tokens of a sample in the step after ``iteration`` steps."""
        return self.seq_length

    def shown(self, iteration: int) -> dict[str, int]:
        """Further lengths of the step after ``iteration`` steps, by the names of their metrics."""
        return {}

    def shorter(self, iteration: int) -> tuple[int, int] | None:
        """Number of blocks that read fewer tokens than the others in that step, and of their
        tokens; None where all read the same."""
        return None

    def tokens(self, consumed_samples: int) -> int:
        """Tokens of the first samples of the run."""
        return consumed_samples * self.seq_length

    def samples(self, tokens: int) -> int:
        """The fewest samples with at least that many tokens."""
        return -(-tokens // self.seq_length)

    def cut(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        """Batches cut, one at a time, to the length of the step after ``iteration`` steps."""
        return batches
