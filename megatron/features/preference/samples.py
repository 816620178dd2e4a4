"""Samples and batches of better and worse answers.

Shape suffixes: R rows, two for each sample; S sequence. A pair has one row for its better answer
and one for its worse answer. A judged answer (kto) has one row for that answer, and one for the
same prompt with the answer to another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import Documents, Piece, checked_index
from megatron.data.texts import ScoredText
from megatron.features.instruction.examples import shuffled_epochs
from megatron.features.preference.records import PreferenceExamples
from megatron.util.digests import digest

Rows = tuple[ScoredText, ScoredText]
"""The two rows of a sample. The context is the prompt; the continuation is the answer, all tokens
of which count."""


class PreferenceSample(NamedTuple):
    """Pair of answers, or a judged answer.

    Attributes:
        reference: log-probabilities of both answers under the reference model; None without one.
        desirable: kto: True if the first answer is good; None for pairs.
        margin: how much better the better answer of a pair is; None if the data do not say.
    """

    rows: Rows
    reference: tuple[float, float] | None = None
    desirable: bool | None = None
    margin: float | None = None

    @property
    def length(self) -> int:
        """Number of tokens of the longer row that the model reads."""
        return max(len(row.context) + len(row.continuation) for row in self.rows) - 1


class PreferenceBatch(NamedTuple):
    """Micro batch of answers with their labels and reference log-probabilities.

    Attributes:
        answers: the rows [R, S] as a batch of the model's family, padded on the right. Only tokens
            of answers are predicted.
        reference_R: log-probability of each answer under the reference model, float32; None
            without one. It is the sum over tokens even if the loss uses means.
        desirable_R: kto: True if the first answer of a sample is good, bool, the same in both of
            its rows; None for pairs.
        margin_R: how much better the better answer of each pair is, float32, the same in both
            rows; None if the data do not say.
        weights_2: weights of the batch within a step, float64: of its loss, and of its tokens in
            the loss. The collator sets sums (1, and the number of tokens). When the whole step is
            known, they are divided by their mean over its micro batches on all ranks.
        others_N: kto in training: log-probability of each second row under the model, float64;
            ``answers`` then contains only the first rows. None if ``answers`` contains all rows.
    """

    answers: Any
    reference_R: Tensor | None = None
    desirable_R: Tensor | None = None
    margin_R: Tensor | None = None
    weights_2: Tensor | None = None
    others_N: Tensor | None = None

    @property
    def tokens_BS(self) -> Tensor:
        """Tokens of the answers' batch that the model reads."""
        return self.answers.tokens_BS

    def lengthened(self, seq_length: int) -> PreferenceBatch:
        """Return the batch with every row padded to ``seq_length`` tokens."""
        return self._replace(answers=self.answers.lengthened(seq_length))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PreferenceBatch:
        return PreferenceBatch._make(
            None if part is None else part.to(device, non_blocking=non_blocking) for part in self
        )


@dataclass(frozen=True)
class PreferenceCollator:
    """Collator of samples into a :class:`PreferenceBatch`.

    Attributes:
        batch_of: makes a batch of the model's family from texts and the length to pad them to.
        multiple: number that must divide the length of a batch, unless that is ``longest``.
        longest: maximum number of tokens of a row that the model reads.
        whole: True if the model reads all tokens of a row; otherwise the last one is only
            predicted.
    """

    batch_of: Callable[[Sequence[ScoredText], int], Any]
    multiple: int
    longest: int
    whole: bool = False

    def __call__(self, samples: Sequence[PreferenceSample]) -> PreferenceBatch:
        needed = max(sample.length for sample in samples) + self.whole
        length = min(-(-needed // self.multiple) * self.multiple, self.longest)
        rows = [row for sample in samples for row in sample.rows]
        counted = len(rows) if self.whole else sum(len(row.continuation) for row in rows)
        return PreferenceBatch(
            self.batch_of(rows, length),
            _repeated([sample.reference for sample in samples], torch.float32),
            _repeated([sample.desirable for sample in samples], torch.bool),
            _repeated([sample.margin for sample in samples], torch.float32),
            torch.tensor([1.0, counted], dtype=torch.float64),
        )


@dataclass(frozen=True)
class WholeRows:
    """Makes a batch of complete rows. ``batch_of`` gets their token ids, int64 [L] each."""

    batch_of: Callable[[Sequence[np.ndarray], int], Any]

    def __call__(self, texts: Sequence[ScoredText], length: int) -> Any:
        rows = [np.concatenate((text.context, text.continuation)) for text in texts]
        return self.batch_of(rows, length)


def _repeated(values: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    """Return a value for each row, from one or two values per sample; None if all are None."""
    if all(value is None for value in values):
        return None
    known = [0.0 if value is None else value for value in values]
    return torch.tensor(known, dtype=dtype).view(len(known), -1).expand(-1, 2).flatten()


logger = logging.getLogger(__name__)

# Part of the cache key. Increment it whenever the meaning of the arrays changes.
INDEX_VERSION = 1


@dataclass(frozen=True)
class PreferenceRecipe:
    """Recipe for samples of two rows each. Every epoch shuffles the examples; the order depends
    only on the seed, the split and the epoch's number."""

    capacity: int
    """Maximum number of tokens of a row, its prompt and answer."""
    seed: int
    by_prompt: bool = False
    """Split the data by the hash of each prompt, so that all examples of a prompt are in one split,
    instead of by position."""
    skip_long: bool = False
    """Omit examples with a longer row, instead of cutting off the end of the answer."""

    def units(self, documents: Documents) -> int:
        return len(documents.document_indices) - 1

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> PreferenceDataset:
        """Return a dataset of at least `num_samples` samples of the documents `units`. Their order
        may come from the cache. Raises ValueError if the documents are not preferences, or if no
        example fits in a row."""
        if not isinstance(documents, PreferenceExamples):
            raise ValueError(
                f"{documents.prefix} contains documents and no preferences; --preference needs "
                "files of prompts with better and worse answers (JSON, JSON lines, Parquet, CSV)"
            )
        depends_on = {
            "version": INDEX_VERSION,
            "content": documents.content_digest,
            "documents": [units.start, units.stop],
            "part": name,
            "capacity": self.capacity,
            "samples": num_samples,
            "seed": self.seed,
            "split by prompt": self.by_prompt,
            "skip long": self.skip_long,
        }

        def arrays() -> dict[str, np.ndarray]:
            usable = self._usable(documents, documents.part(units, self.by_prompt, name), name)
            others = usable
            if documents.judged:
                others = usable[other_prompts(documents.prompt_hashes[usable])]
            return {
                "usable": usable,
                "others": others,
                "order": shuffled_epochs(len(usable), num_samples, self.seed, name),
            }

        index = cache.arrays(f"preference-{name}", depends_on, arrays)
        return PreferenceDataset(documents, self, index)

    def _usable(
        self, documents: PreferenceExamples, units: npt.NDArray[np.int64], name: str
    ) -> np.ndarray:
        """Return the documents to use. As in trl (1.16), the end of a long answer is cut off, and
        an example is omitted if its prompt leaves no space for an answer."""
        prompts_N1, answers_NK = np.split(documents.document_lengths[units], [1], axis=1)
        is_long = (prompts_N1 + answers_NK > self.capacity).any(1)
        answered = (prompts_N1[:, 0] < self.capacity) & (answers_NK > 0).all(1)
        usable = units[answered & ~is_long if self.skip_long else answered]
        if not len(usable):
            raise ValueError(
                f"{documents.prefix}: none of the {len(units)} examples for {name} has a prompt "
                f"that leaves space for an answer within {self.capacity} tokens (--seq-length)"
            )
        if is_long.any() or not answered.all():
            cut = 0 if self.skip_long else (is_long & answered).sum()
            logger.warning(
                f"{documents.prefix}, {name}: of {len(units)} examples {is_long.sum()} are longer "
                f"than {self.capacity} tokens (--seq-length); {cut} are cut off there, "
                f"{len(units) - len(usable)} left out ({(~answered).sum()} of them without space "
                "for an answer)"
            )
        return usable


class PreferenceDataset:
    """Samples of one split of the data. ``reference``, float32 [documents, 2] in the order of
    ``documents``, has the log-probabilities of both rows under a reference model, for losses that
    need them."""

    def __init__(
        self,
        examples: PreferenceExamples,
        recipe: PreferenceRecipe,
        index: StoredArrays,
        reference: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self.examples, self.recipe, self._index = examples, recipe, index
        self.reference = reference

    @property
    def digest(self) -> str:
        """Digest of the rows of all documents."""
        numbers = digest(np.stack((self.documents, self._index["others"])).data)
        return digest(f"{self.examples.content_digest} {numbers} {self.recipe.capacity}")

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """Numbers of the documents that samples are made from, ascending."""
        return self._index["usable"]

    def __len__(self) -> int:
        return len(self._index["order"])

    def __getitem__(self, index: int, /) -> PreferenceSample:
        place = int(self._index["order"][checked_index(index, len(self))])
        value = float(self.examples.values[self.documents[place]])
        judged = self.examples.judged
        return PreferenceSample(
            self.rows(place),
            None if self.reference is None else tuple(self.reference[place].tolist()),
            value > 0 if judged else None,
            None if judged or np.isnan(value) else value,
        )

    def rows(self, place: int) -> Rows:
        """Return the rows of the document ``documents[place]``, cut to the capacity."""
        capacity = self.recipe.capacity
        prompt, answers = self.examples.document(int(self.documents[place]))
        if self.examples.judged:
            answers += self.examples.document(int(self._index["others"][place])).answers
        first, second = (
            ScoredText(prompt.astype(np.int64), each[: capacity - len(prompt)].astype(np.int64))
            for each in answers
        )
        return first, second

    def origin(self, index: int, /) -> list[Piece]:
        """Return a piece for each row: its answer's document, and the row's number of tokens."""
        place = int(self._index["order"][checked_index(index, len(self))])
        numbers = [int(self._index[name][place]) for name in ("usable", "others")]
        return [
            Piece(self.examples.prefix, number, 0, len(row.context) + len(row.continuation))
            for number, row in zip(numbers, self.rows(place), strict=True)
        ]


def other_prompts(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return for each example the nearest preceding one with another prompt. The examples form a
    ring: the last one precedes the first. If all prompts are equal, it is the preceding example. If
    neighbours have different prompts, this is trl's rotation by one."""
    count = len(hashes)
    before = (np.arange(count) - 1) % count
    if (hashes == hashes[:1]).all():
        return before
    prompts = before.copy()
    # If the predecessor has the same prompt, its result also applies here. Two rounds are needed
    # because the first examples depend on the last.
    for place in [*range(count), *range(count)]:
        if hashes[before[place]] == hashes[place]:
            prompts[place] = prompts[before[place]]
    return prompts
