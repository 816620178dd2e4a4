"""Tokenized preferences: made once, kept in the cache, mapped into memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import checked_range
from megatron.features.instruction.conversations import Example
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.record_files import example_files
from megatron.features.preference.records import Preference, read_preferences
from megatron.util.digests import digest, hash64
from megatron.util.progress import progress_bar

logger = logging.getLogger(__name__)

# Part of the cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 2
_AT_ONCE = 500


class EncodedPreference(NamedTuple):
    """Token ids, int32 [L] each: prompt + answer is what the model reads."""

    prompt: npt.NDArray[np.int32]
    answers: tuple[npt.NDArray[np.int32], ...]


class PreferenceExamples:
    """The prompts and answers of files of preferences; `Documents` of megatron/data/samples.py. A
    document is a pair (``judged`` False) of three sequences, prompt, better and worse answer, or a
    judged answer of two, prompt and answer. Pickles as the path of its cache entry."""

    def __init__(self, prefix: str, judged: bool, index: StoredArrays) -> None:
        self.prefix, self.judged, self._index = prefix, judged, index
        self._offsets = index["offsets"]
        self.sequence_lengths: npt.NDArray[np.int32] = np.diff(self._offsets).astype(np.int32)
        self.parts = 2 if judged else 3
        """Sequences of a document."""
        self.document_indices: npt.NDArray[np.int64] = np.arange(
            0, len(self) + 1, self.parts, dtype=np.int64
        )
        self.prompt_hashes: npt.NDArray[np.uint64] = index["prompt_hashes"]
        """Of the prompt's tokens, for each document."""
        self.values: npt.NDArray[np.float32] = index["values"]
        """For each document: 1 for a good answer and 0 for a bad one; of a pair its margin, NaN
        where it has none."""

    @classmethod
    def open(
        cls, path: str, encoder: ExampleEncoder, judged: bool, cache: IndexCache | None = None
    ) -> PreferenceExamples:
        """Tokenize the records of a file, folder or glob, or take them from the cache, by default
        `index-cache/` beside the data; with ``judged`` pairs become two judged answers. Raises
        FileNotFoundError; ValueError if a record is malformed or not a pair, or none is found."""
        files = example_files(path)
        depends_on: dict[str, Any] = {
            "version": INDEX_VERSION,
            "files": [file.identity for file in files],
            "encoding": encoder.identity,
            "judged": judged,
        }
        cache = cache or IndexCache.beside(files[0].path, None)

        def arrays() -> dict[str, np.ndarray]:
            logger.info("tokenizing the preferences of %s, once", path)
            records = (pair for f in files for pair in read_preferences(f.path, encoder.columns))
            wanted = _as_wanted(progress_bar("tokenizing", records, unit=" examples"), judged)
            return _arrays(wanted, encoder)

        examples = cls(path, judged, cache.arrays("preference", depends_on, arrays))
        if not len(examples):
            raise ValueError(f"{path} contains no example")
        return examples

    @cached_property
    def lengths_digest(self) -> str:
        return digest(self.sequence_lengths.tobytes())

    @cached_property
    def content_digest(self) -> str:
        """Of everything that the samples depend on."""
        parts = (self._index["tokens"], self._offsets, self.values)
        return digest(b"".join(digest(np.ascontiguousarray(p).data).encode() for p in parts))

    @cached_property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of prompt and answers of each document, [documents, parts]."""
        return self.sequence_lengths.reshape(-1, self.parts).astype(np.int64)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """`length` tokens (default: the rest) of a sequence, from token `offset` on. Raises
        IndexError if there is no such sequence, or the range leaves it."""
        index, stop = checked_range(self.sequence_lengths, index, offset, length, self.prefix)
        start = int(self._offsets[index])
        return self._index["tokens"][start + offset : start + stop]

    def document(self, number: int) -> EncodedPreference:
        """The prompt and the answers of a document."""
        first = number * self.parts
        prompt, *answers = (self.get(index) for index in range(first, first + self.parts))
        return EncodedPreference(prompt, tuple(answers))

    def verify(self) -> None:
        """Raises ValueError where the arrays do not belong together."""
        documents = len(self) // self.parts
        if (
            self._offsets[0] != 0
            or (np.diff(self._offsets) < 0).any()
            or self._offsets[-1] != len(self._index["tokens"])
            or len(self) % self.parts
            or not documents == len(self.prompt_hashes) == len(self.values)
        ):
            raise ValueError(
                f"the cached preferences of {self.prefix} are damaged: delete their entry "
                "(preference-...) in the folder of --data-cache-path"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix, self.judged, self._index)


def _as_wanted(
    records: Iterable[tuple[str, Preference]], judged: bool
) -> Iterator[tuple[str, Preference]]:
    for place, preference in records:
        if judged:
            yield from ((place, each) for each in preference.judged())
        elif preference.good is not None:
            raise ValueError(
                f"{place}: an answer with a label and nothing to compare it with; --preference kto "
                'trains on such answers, the other losses need "chosen" and "rejected"'
            )
        else:
            yield place, preference


def encode_preferences(
    preferences: Sequence[tuple[str, Preference]], encoder: ExampleEncoder
) -> list[EncodedPreference]:
    """Encodes (place, preference) pairs. As in trl (1.16), an answer is everything after the
    prompt: it starts at the first token that differs from those of the prompt alone, in either
    answer, and goes to the end of what the template writes. Raises ValueError, which names the
    place, if one cannot be put into the format or tokenized."""
    conversations = [
        (place, Example((*each.prompt, *answer), each.is_text, each.variables), len(each.prompt))
        for place, each in preferences
        for answer in each.answers
    ]
    continued = iter(encoder.continued(conversations))
    encoded = []
    for _, each in preferences:
        found = [next(continued) for _ in each.answers]
        # Nothing predicts the first token of all.
        start = max(1, min(one.start for one in found))
        answers = tuple(one.tokens[start:] for one in found)
        encoded.append(EncodedPreference(found[0].tokens[:start], answers))
    return encoded


def _arrays(
    preferences: Iterator[tuple[str, Preference]], encoder: ExampleEncoder
) -> dict[str, np.ndarray]:
    tokens: list[np.ndarray] = []
    hashes, values, lengths = [], [], []
    while batch := list(islice(preferences, _AT_ONCE)):
        encoded = encode_preferences(batch, encoder)
        parts = [part for each in encoded for part in (each.prompt, *each.answers)]
        tokens.append(np.concatenate(parts))
        lengths += [len(part) for part in parts]
        hashes += [hash64(each.prompt.tobytes()) for each in encoded]
        for _, each in batch:
            value = each.margin if each.good is None else each.good
            values.append(np.nan if value is None else float(value))
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.array(lengths, np.int64), out=offsets[1:])
    return {
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens]),
        "offsets": offsets,
        "prompt_hashes": np.array(hashes, np.uint64),
        "values": np.array(values, np.float32),
    }
