"""Tokenized examples: made once, kept in the cache, mapped into memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import checked_range
from megatron.features.instruction.conversations import Example, read_examples
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.record_files import example_files
from megatron.util.digests import digest, hash64
from megatron.util.progress import progress_bar

logger = logging.getLogger(__name__)

# Part of the cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 2
_AT_ONCE = 1000


class InstructionExamples:
    """The examples of files of instructions; `Documents` of megatron/data/samples.py, with a loss
    mask. An example is a document of one sequence. Pickles as the path of its cache entry."""

    def __init__(self, prefix: str, index: StoredArrays) -> None:
        self.prefix, self._index = prefix, index
        self._offsets = index["offsets"]
        self.sequence_lengths: npt.NDArray[np.int32] = np.diff(self._offsets).astype(np.int32)
        self.document_indices: npt.NDArray[np.int64] = np.arange(len(self) + 1, dtype=np.int64)
        self.first_counted: npt.NDArray[np.int32] = index["first_counted"]
        """First token of each example that counts in the loss; the example's length where none
        does; int32[n]."""

    @classmethod
    def open(
        cls, path: str, encoder: ExampleEncoder, cache: IndexCache | None = None
    ) -> InstructionExamples:
        """Tokenize the examples of a file, folder or glob, or take them from the cache, by default
        `index-cache/` beside the data. Raises FileNotFoundError; ValueError if a record is
        malformed, or none is found."""
        files = example_files(path)
        depends_on: dict[str, Any] = {
            "version": INDEX_VERSION,
            "files": [file.identity for file in files],
            "encoding": encoder.identity,
        }
        cache = cache or IndexCache.beside(files[0].path, None)

        def arrays() -> dict[str, np.ndarray]:
            logger.info("tokenizing the examples of %s, once", path)
            examples = (pair for f in files for pair in read_examples(f.path, encoder.columns))
            return _encoded(progress_bar("tokenizing", examples, unit=" examples"), encoder)

        examples = cls(path, cache.arrays("instruction", depends_on, arrays))
        if not len(examples):
            raise ValueError(f"{path} contains no example")
        return examples

    @cached_property
    def lengths_digest(self) -> str:
        return digest(self.sequence_lengths.tobytes())

    @cached_property
    def prompt_hashes(self) -> npt.NDArray[np.uint64]:
        """Of each example's tokens before the first that counts in the loss; of all of them where
        no token comes before."""
        firsts = np.where(self.first_counted > 1, self.first_counted, self.sequence_lengths)
        tokens, starts = self._index["tokens"], self._offsets[:-1]
        hashes = (
            hash64(tokens[start : start + first].tobytes())
            for start, first in zip(starts.tolist(), firsts.tolist(), strict=True)
        )
        return np.fromiter(hashes, np.uint64, len(self))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """`length` tokens (default: the rest) of example `index`, from token `offset` on. Raises
        IndexError if there is no such example, or the range leaves it."""
        return self._slice("tokens", index, offset, length)

    def counted(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """bool: whether those tokens count in the loss. Raises as `get`."""
        return self._slice("counted", index, offset, length)

    def verify(self) -> None:
        """Raises ValueError where the arrays do not belong together."""
        tokens, counted = self._index["tokens"], self._index["counted"]
        if (
            self._offsets[0] != 0
            or (np.diff(self._offsets) < 0).any()
            or not self._offsets[-1] == len(tokens) == len(counted)
            or len(self.first_counted) != len(self)
        ):
            raise ValueError(
                f"the cached examples of {self.prefix} are damaged: delete its entry "
                "(instruction-...) in the folder of --data-cache-path"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix, self._index)

    def _slice(self, name: str, index: int, offset: int, length: int | None) -> np.ndarray:
        index, stop = checked_range(self.sequence_lengths, index, offset, length, self.prefix)
        start = int(self._offsets[index])
        return self._index[name][start + offset : start + stop]


def _encoded(
    examples: Iterable[tuple[str, Example]], encoder: ExampleEncoder
) -> dict[str, np.ndarray]:
    tokens, counted, lengths, first = [], [], [], []
    examples = iter(examples)
    while batch := list(islice(examples, _AT_ONCE)):
        encoded = encoder(batch)
        tokens.append(np.concatenate([e.tokens for e in encoded]))
        counted.append(np.concatenate([e.counted for e in encoded]))
        for example in encoded:
            length = len(example.tokens)
            lengths.append(length)
            first.append(int(example.counted.argmax()) if example.counted.any() else length)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.array(lengths, np.int64), out=offsets[1:])
    return {
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens]),
        "counted": np.concatenate([np.empty(0, np.bool_), *counted]),
        "offsets": offsets,
        "first_counted": np.array(first, np.int32),
    }
