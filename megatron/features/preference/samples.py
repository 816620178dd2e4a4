"""Samples of preferences, epoch after epoch: pairs, or judged answers with another to compare."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import Documents, Piece, checked_index
from megatron.data.texts import ScoredText
from megatron.features.instruction.held_out import of_prompts
from megatron.features.preference.batch import PreferenceSample, Rows
from megatron.features.preference.examples import PreferenceExamples
from megatron.util.digests import digest

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
            documents.verify()
            numbers = np.arange(units.start, units.stop)
            if self.by_prompt:
                numbers = of_prompts(documents.prompt_hashes, units, f"{documents.prefix}, {name}")
            usable = self._usable(documents, numbers, name)
            others = usable
            if documents.judged:
                others = usable[other_prompts(documents.prompt_hashes[usable])]
            return {
                "usable": usable,
                "others": others,
                "order": self._order(len(usable), num_samples, name),
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

    def _order(self, count: int, num_samples: int, name: str) -> np.ndarray:
        """Places in the usable documents."""
        epochs = [
            np.random.default_rng([self.seed, zlib.crc32(name.encode()), epoch]).permutation(count)
            for epoch in range(-(-num_samples // count))
        ]
        return np.concatenate(epochs)


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
        """A piece for each row: the document of its answer, and how many tokens it has."""
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
    found = before.copy()
    # One whose predecessor has the same prompt takes what that takes; twice around, for the first
    # ones depend on the last.
    for place in [*range(count), *range(count)]:
        if hashes[before[place]] == hashes[place]:
            found[place] = found[before[place]]
    return found
