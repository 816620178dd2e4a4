"""Batches of better and worse answers.

Shape suffixes: R rows, two for each sample. A pair is a prompt with its better answer and then with
its worse one. A judged answer (kto) is a prompt with that answer and then with the answer to
another prompt. S sequence.
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
"""The two rows of a sample: the context is the prompt, every token of the continuation counts."""


class PreferenceSample(NamedTuple):
    """One sample.

    Attributes:
        reference: log-probabilities of both answers under the reference model; None without one.
        desirable: kto: True if the first answer is good; None for pairs.
        margin: by how much the better answer of a pair is better; None if not in the data.
    """

    rows: Rows
    reference: tuple[float, float] | None = None
    desirable: bool | None = None
    margin: float | None = None

    @property
    def length(self) -> int:
        """Tokens that the model reads of the longer row."""
        return max(len(row.context) + len(row.continuation) for row in self.rows) - 1


class PreferenceBatch(NamedTuple):
    """Answers with their labels and reference log-probabilities.

    Attributes:
        answers: the rows [R, S] as a batch of the model's family, padded on the right, in which the
            tokens of the answers are predicted.
        reference_R: log-probability of each answer under the reference model, float32; None without
            one. For a loss of means over tokens it is the sum, too.
        desirable_R: kto: whether the first answer of each two rows is good, bool, the same in both;
            None for pairs.
        margin_R: by how much the better answer of each pair is better, float32, the same in both
            rows; None where the data do not say.
        weights_2: of the batch among those of a step, float64: of its loss, which is 1, and of its
            tokens whose loss counts. As collated they are sums; once the whole step is known,
            relative to the mean over its micro batches on all ranks.
        others_N: kto, in training: log-probability of each second row under the model, float64;
            ``answers`` are then the first rows only. None with all rows in ``answers``.
    """

    answers: Any
    reference_R: Tensor | None = None
    desirable_R: Tensor | None = None
    margin_R: Tensor | None = None
    weights_2: Tensor | None = None
    others_N: Tensor | None = None

    @property
    def tokens_BS(self) -> Tensor:
        """All that the model reads."""
        return self.answers.tokens_BS

    def lengthened(self, seq_length: int) -> PreferenceBatch:
        """With padding after every row, up to ``seq_length`` tokens."""
        return self._replace(answers=self.answers.lengthened(seq_length))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PreferenceBatch:
        return PreferenceBatch._make(
            None if part is None else part.to(device, non_blocking=non_blocking) for part in self
        )


@dataclass(frozen=True)
class PreferenceCollator:
    """Stacks samples into a PreferenceBatch.

    Attributes:
        batch_of: makes a batch of the model's family of texts and the length to pad them to.
        multiple: of which a batch's length is a multiple, except the longest that there is.
        longest: tokens of a row that the model reads at most.
        whole: the model reads all tokens of a row; else those before the last, which it predicts.
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
    """Makes a batch of rows by a function of their token ids, int64 [L] each, and a length."""

    batch_of: Callable[[Sequence[np.ndarray], int], Any]

    def __call__(self, texts: Sequence[ScoredText], length: int) -> Any:
        rows = [np.concatenate((text.context, text.continuation)) for text in texts]
        return self.batch_of(rows, length)


def _repeated(values: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    """Values of samples, one or two each, as one for each row; None where no sample has one."""
    if all(value is None for value in values):
        return None
    known = [0.0 if value is None else value for value in values]
    return torch.tensor(known, dtype=dtype).view(len(known), -1).expand(-1, 2).flatten()


logger = logging.getLogger(__name__)

# Part of the cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1


@dataclass(frozen=True)
class PreferenceRecipe:
    """Samples of two rows each. Every epoch shuffles the examples; its order is a function of seed,
    part and the epoch's number."""

    capacity: int
    """Most tokens of a row: prompt and answer."""
    seed: int
    by_prompt: bool = False
    """Parts have whole prompts, drawn by their hash, and not consecutive examples."""
    skip_long: bool = False
    """Leave out examples with a longer row, instead of cutting the end of the answer off."""

    def units(self, documents: Documents) -> int:
        return len(documents.document_indices) - 1

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> PreferenceDataset:
        """At least `num_samples` samples of the documents `units`, or their order from the cache.
        Raises ValueError if the documents are not preferences, or none has answers within a row."""
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
        """As in trl (1.16) the end of a long answer is cut off, and an example is left out whose
        prompt leaves no space for it."""
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
    """The samples of a part. ``reference``, float32 [documents, 2] in the order of ``documents``,
    are log-probabilities of both rows under a reference model, where the loss needs them."""

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
        """Identifies the rows of all documents."""
        numbers = digest(np.stack((self.documents, self._index["others"])).data)
        return digest(f"{self.examples.content_digest} {numbers} {self.recipe.capacity}")

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """Numbers of the documents, ascending, that samples are made of."""
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
        """The rows of the document at a place of ``documents``, cut to what the model reads."""
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
        """Return a piece for each row: the document of its answer, and its number of tokens."""
        place = int(self._index["order"][checked_index(index, len(self))])
        numbers = [int(self._index[name][place]) for name in ("usable", "others")]
        return [
            Piece(self.examples.prefix, number, 0, len(row.context) + len(row.continuation))
            for number, row in zip(numbers, self.rows(place), strict=True)
        ]


def other_prompts(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """For each example the nearest one before it with another prompt, the last following on the
    first; the one before where all prompts are equal. Where neighbours have different prompts, that
    is trl's rotation by one."""
    count = len(hashes)
    before = (np.arange(count) - 1) % count
    if (hashes == hashes[:1]).all():
        return before
    prompts = before.copy()
    # One whose predecessor has the same prompt takes what that takes; twice around, for the first
    # ones depend on the last.
    for place in [*range(count), *range(count)]:
        if hashes[before[place]] == hashes[place]:
            prompts[place] = prompts[before[place]]
    return prompts
