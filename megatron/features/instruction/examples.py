"""Instructions and answers as packed samples with a loss on the answers.

Examples are tokenized once, kept in the cache and mapped into memory.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError, RunConfig
from megatron.config.engine import GRAPH_MODES
from megatron.data.build import SourceReader
from megatron.data.gpt_batch import best_fit
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.indexed import idx_path
from megatron.data.pipeline import DataKind, DataPipeline, sequence_lengths
from megatron.data.samples import Documents, PackedSample, Piece, checked_index, checked_range
from megatron.data.sources import DataSource
from megatron.features.instruction.batches import (
    HEAD_POSITIONS,
    ExampleCollator,
    Padding,
    padding_token,
)
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import Example, read_examples
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.record_files import example_files
from megatron.tokenizer import Tokenizer
from megatron.util.digests import digest, hash64
from megatron.util.progress import progress_bar

logger = logging.getLogger(__name__)

# Part of the names of cache entries, of preferences too: raise it when the meaning of the arrays
# changes.
INDEX_VERSION = 2
_AT_ONCE = 1000


class TokenizedExamples(ABC):
    """The examples of files; `Documents` of megatron/data/samples.py, ``parts`` sequences each."""

    def __init__(self, prefix: str, index: StoredArrays, parts: int = 1) -> None:
        self.prefix, self.parts, self._index = prefix, parts, index
        self._offsets = index["offsets"]
        self.sequence_lengths: npt.NDArray[np.int32] = np.diff(self._offsets).astype(np.int32)
        self.document_indices: npt.NDArray[np.int64] = np.arange(
            0, len(self) + 1, parts, dtype=np.int64
        )

    @staticmethod
    def stored(
        path: str,
        name: str,
        encoder: ExampleEncoder,
        identity: Mapping[str, Any],
        read: Callable[[str, RecordColumns], Iterable[tuple[str, Any]]],
        tokenize: Callable[[Iterator[tuple[str, Any]]], dict[str, np.ndarray]],
        cache: IndexCache | None,
    ) -> StoredArrays:
        """Return arrays of the examples of a file, folder or glob: ``tokenize`` applied to what
        ``read`` returns for each file, or the cache entry of this name, by default in
        `index-cache/` next to the data. Raises FileNotFoundError; ValueError if there is no
        example."""
        files = example_files(path)
        depends_on = {
            "version": INDEX_VERSION,
            "files": [file.identity for file in files],
            "encoding": encoder.identity,
            **identity,
        }

        def arrays() -> dict[str, np.ndarray]:
            logger.info("tokenizing %s (%s), once", path, name)
            records = (pair for file in files for pair in read(file.path, encoder.columns))
            return tokenize(iter(progress_bar("tokenizing", records, unit=" examples")))

        cache = cache or IndexCache.next_to(files[0].path, None)
        index = cache.arrays(name, depends_on, arrays)
        if len(index["offsets"]) == 1:
            raise ValueError(f"{path} contains no example")
        return index

    @cached_property
    def lengths_digest(self) -> str:
        return digest(self.sequence_lengths.tobytes())

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """`length` tokens (default: the rest) of a sequence, from token `offset` on. Raises
        IndexError if there is no such sequence, or the range leaves it."""
        return self._slice("tokens", index, offset, length)

    def _slice(self, name: str, index: int, offset: int, length: int | None) -> np.ndarray:
        index, stop = checked_range(self.sequence_lengths, index, offset, length, self.prefix)
        start = int(self._offsets[index])
        return self._index[name][start + offset : start + stop]

    @property
    def prompt_hashes(self) -> npt.NDArray[np.uint64]:
        """Hashes of the tokens of the prompt of each document."""
        return self._index["prompt_hashes"]

    @abstractmethod
    def verify(self) -> None:
        """Raises ValueError where the arrays do not belong together."""

    def part(self, units: range, by_prompt: bool, name: str) -> npt.NDArray[np.int64]:
        """Numbers of the documents of a part. Raises ValueError as `verify` and `of_prompts`."""
        self.verify()
        if by_prompt:
            return of_prompts(self.prompt_hashes, units, f"{self.prefix}, {name}")
        return np.arange(units.start, units.stop)

    def check(self, name: str, consistent: bool) -> None:
        """Raises ValueError, which names a cache entry, unless the offsets fit the tokens, and
        the other arrays are ``consistent``."""
        rising = self._offsets[0] == 0 and (np.diff(self._offsets) >= 0).all()
        if not (rising and self._offsets[-1] == len(self._index["tokens"]) and consistent):
            raise ValueError(
                f"the cached examples of {self.prefix} are damaged: delete their entry ({name}-...)"
                " in the folder of --data-cache-path"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix, self._index)


class InstructionExamples(TokenizedExamples):
    """The examples of files of instructions, with a loss mask. An example is a document of one
    sequence. Pickles as the path of its cache entry."""

    def __init__(self, prefix: str, index: StoredArrays) -> None:
        super().__init__(prefix, index)
        self.first_counted: npt.NDArray[np.int32] = index["first_counted"]
        """First token of each example that counts in the loss; the example's length where none
        does; int32[n]."""

    @classmethod
    def open(
        cls, path: str, encoder: ExampleEncoder, cache: IndexCache | None = None
    ) -> InstructionExamples:
        """Tokenize the examples of a file, folder or glob, or take them from the cache, by default
        `index-cache/` next to the data. Raises FileNotFoundError; ValueError if a record is
        malformed, or none is found."""
        tokenize = partial(_encoded, encoder=encoder)
        return cls(
            path, cls.stored(path, "instruction", encoder, {}, read_examples, tokenize, cache)
        )

    @cached_property
    def prompt_hashes(self) -> npt.NDArray[np.uint64]:
        """Return hashes of each example's tokens before the first that counts in the loss, or of
        all tokens without one before it."""
        firsts = np.where(self.first_counted > 1, self.first_counted, self.sequence_lengths)
        tokens, starts = self._index["tokens"], self._offsets[:-1]
        hashes = (
            hash64(tokens[start : start + first].tobytes())
            for start, first in zip(starts.tolist(), firsts.tolist(), strict=True)
        )
        return np.fromiter(hashes, np.uint64, len(self))

    def counted(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """Return bool: True for tokens that count in the loss. Raises like `get`."""
        return self._slice("counted", index, offset, length)

    def verify(self) -> None:
        counted = len(self._index["counted"]) == len(self._index["tokens"])
        self.check("instruction", counted and len(self.first_counted) == len(self))


def offsets_of(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Begins of parts of these lengths, and the end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))])


def _encoded(
    examples: Iterator[tuple[str, Example]], encoder: ExampleEncoder
) -> dict[str, np.ndarray]:
    tokens, counted, lengths, first = [], [], [], []
    while batch := list(islice(examples, _AT_ONCE)):
        encoded = encoder(batch)
        tokens.append(np.concatenate([e.tokens for e in encoded]))
        counted.append(np.concatenate([e.counted for e in encoded]))
        for example in encoded:
            length = len(example.tokens)
            lengths.append(length)
            first.append(int(example.counted.argmax()) if example.counted.any() else length)
    return {
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens]),
        "counted": np.concatenate([np.empty(0, np.bool_), *counted]),
        "offsets": offsets_of(lengths),
        "first_counted": np.array(first, np.int32),
    }


# Part of the cache entry's name: raise it when the meaning of the arrays changes.
PACKING_VERSION = 1


@dataclass(frozen=True)
class InstructionRecipe:
    """Samples of seq_length + 1 tokens: whole examples and padding. Every epoch shuffles the
    examples, packs them in that order, and shuffles the samples; its order is a function of seed,
    part and the epoch's number."""

    seq_length: int
    """Tokens a sample feeds to the model."""
    seed: int
    pad_token: int
    """Fills up samples; it never counts in the loss."""
    packing: bool = False
    skip_long: bool = False
    """Leave out examples of more than seq_length + 1 tokens, instead of cutting their end off."""
    pads: bool = True
    """True if samples are filled up here, or with the others of their batch."""
    by_prompt: bool = False
    """Parts have whole prompts, drawn by their hash, and not consecutive examples."""

    @classmethod
    def from_config(
        cls, config: InstructionConfig, seq_length: int, seed: int, tokenizer: Tokenizer
    ) -> InstructionRecipe:
        """See :func:`padding_token`."""
        pad = padding_token(tokenizer)
        skip = config.on_long_example == "skip"
        return cls(
            seq_length,
            seed,
            pad,
            config.packing,
            skip,
            pads=not config.pads_batches,
            by_prompt=config.split_by == "prompt",
        )

    def units(self, documents: Documents) -> int:
        return len(documents)

    def build(
        self,
        documents: Documents,
        units: range,
        num_samples: int,
        name: str,
        cache: IndexCache,
    ) -> InstructionDataset:
        """At least `num_samples` samples of the examples `units`, or their order from the cache.
        Raises ValueError if the documents are not examples, or none has an answer within seq_length
        + 1 tokens."""
        if not isinstance(documents, InstructionExamples):
            raise ValueError(
                f"{documents.prefix} contains documents without a loss mask; --sft needs files of "
                "instructions and answers (JSON, JSON lines, Parquet, CSV)"
            )
        depends_on = {
            "version": PACKING_VERSION,
            "lengths": documents.lengths_digest,
            "counted": digest(documents.first_counted.tobytes()),
            "examples": [units.start, units.stop],
            "part": name,
            "seq length": self.seq_length,
            "samples": num_samples,
            "seed": self.seed,
            "packing": self.packing,
            "skip long": self.skip_long,
        }

        if self.by_prompt:
            depends_on["split by prompt"] = True

        def arrays() -> dict[str, np.ndarray]:
            usable = self._usable(documents, documents.part(units, self.by_prompt, name), name)
            return self._order(documents, usable, num_samples, name)

        index = cache.arrays(f"instruction-{name}", depends_on, arrays)
        return InstructionDataset(documents, self, index)

    def _usable(
        self, documents: InstructionExamples, units: npt.NDArray[np.int64], name: str
    ) -> np.ndarray:
        capacity = self.seq_length + 1
        lengths = documents.sequence_lengths[units]
        answered = documents.first_counted[units] < np.minimum(lengths, capacity)
        is_long = lengths > capacity
        usable = units[answered & ~is_long if self.skip_long else answered]
        if not len(usable):
            raise ValueError(
                f"{documents.prefix}: none of the {len(units)} examples for {name} has an answer "
                f"within --seq-length {self.seq_length}; a longer one is needed, or examples and "
                "a chat template that writes their answers (tools/show_batch.py shows them)"
            )
        if is_long.any() or not answered.all():
            cut = 0 if self.skip_long else (is_long & answered).sum()
            logger.warning(
                f"{documents.prefix}, {name}: of {len(units)} examples {is_long.sum()} are longer "
                f"than --seq-length {self.seq_length}; {cut} are cut off there, "
                f"{len(units) - len(usable)} left out ({(~answered).sum()} of them without an "
                "answer before that)"
            )
        return usable

    def _order(
        self, documents: InstructionExamples, usable: np.ndarray, num_samples: int, name: str
    ) -> dict[str, np.ndarray]:
        capacity = self.seq_length + 1
        lengths = np.minimum(documents.sequence_lengths, capacity)
        examples, sizes = [], []
        samples = epoch = 0
        while samples < num_samples:
            rng = np.random.default_rng([self.seed, zlib.crc32(name.encode()), epoch])
            order = rng.permutation(usable)
            sample_of = np.arange(len(order))
            if self.packing:
                packed = best_fit(lengths, order, capacity)
                sample_of = np.argsort(rng.permutation(packed.max() + 1))[packed]
            examples.append(order[np.argsort(sample_of, kind="stable")])
            sizes.append(np.bincount(sample_of))
            samples += len(sizes[-1])
            epoch += 1
        padding = 1 - lengths[usable].sum() / (len(sizes[0]) * capacity)
        logger.info(
            f"{documents.prefix}, {name}: {len(usable)} examples in {len(sizes[0])} samples an "
            f"epoch, {100 * padding:.1f} % of their tokens padding"
        )
        bounds = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
        return {"examples": np.concatenate(examples), "bounds": bounds}


class InstructionDataset:
    def __init__(
        self, examples: InstructionExamples, recipe: InstructionRecipe, index: StoredArrays
    ) -> None:
        self.examples, self.recipe, self._index = examples, recipe, index

    def __len__(self) -> int:
        return len(self._index["bounds"]) - 1

    def __getitem__(self, index: int, /) -> PackedSample:
        """Return its examples, each a separate document, then padding."""
        pieces = self.origin(index)
        capacity = self.recipe.seq_length + 1
        if not self.recipe.pads:
            capacity = sum(piece.stop for piece in pieces)
        tokens_T = np.full(capacity, self.recipe.pad_token, np.int64)
        counted_T = np.zeros(capacity, np.float32)
        documents_T = np.full(capacity, len(pieces), np.int64)
        start = 0
        for number, piece in enumerate(pieces):
            stop = start + piece.stop
            tokens_T[start:stop] = self.examples.get(piece.sequence, 0, piece.stop)
            # The first token never counts, so no document predicts the next.
            counted_T[start:stop] = self.examples.counted(piece.sequence, 0, piece.stop)
            documents_T[start:stop] = number
            start = stop
        return PackedSample(tokens_T, counted_T[1:].copy(), documents_T[:-1].copy())

    def origin(self, index: int, /) -> list[Piece]:
        index = checked_index(index, len(self))
        capacity = self.recipe.seq_length + 1
        first, last = self._index["bounds"][index : index + 2].tolist()
        return [
            Piece(
                self.examples.prefix,
                example,
                0,
                min(int(self.examples.sequence_lengths[example]), capacity),
            )
            for example in self._index["examples"][first:last].tolist()
        ]


def shuffled_epochs(count: int, num_samples: int, seed: int, name: str) -> npt.NDArray[np.int64]:
    """Return at least ``num_samples`` places among ``count`` examples, in whole epochs. Their order
    is a function of the seed, the part's name and the epoch's number."""
    epochs = [
        np.random.default_rng([seed, zlib.crc32(name.encode()), epoch]).permutation(count)
        for epoch in range(max(1, -(-num_samples // count)))
    ]
    return np.concatenate(epochs)


def of_prompts(hashes: npt.NDArray[np.uint64], units: range, part: str) -> npt.NDArray[np.int64]:
    """The numbers, ascending, of a part's examples: those whose prompts come in the places `units`
    of all examples sorted by the hash of their prompt. Examples of one prompt are all in the part
    in which the first of them is, so that a part may have somewhat more or fewer than `units`. The
    order of the examples in the files has no influence, and further examples change the part of
    few.

    Raises ValueError, which names the `part`, if no prompt begins in its places.
    """
    order = np.argsort(hashes, kind="stable")
    sorted_hashes = hashes[order]
    first = np.searchsorted(sorted_hashes, sorted_hashes)
    rows = np.sort(order[(first >= units.start) & (first < units.stop)])
    if not len(rows):
        raise ValueError(
            f"{part}: --split-by prompt leaves no prompt for the {len(units)} of {len(hashes)} "
            f"examples of this part ({len(np.unique(hashes))} different prompts): give it a larger "
            "share in --split, or --split-by order"
        )
    return rows


class RecordFiles(DataKind):
    """Files of records instead of .bin/.idx.

    Attributes:
        flag: that a run reads them by.
        contents: what the files have, as error messages name it.
    """

    flag: str
    contents: str

    def records(
        self, data: DataPipeline, recipe: Any, opened: Callable[..., Documents]
    ) -> SourceReader:
        """The reader of samples by a recipe; ``opened`` gets a path, an encoder and the cache.
        Raises ConfigError for a curriculum of lengths, and later for a file of tokens."""
        if sequence_lengths(data.config).grows:
            raise ConfigError(
                f"a curriculum of sequence lengths cuts samples, and would cut {self.contents}: "
                "use one or the other"
            )

        def open_files(path: str, source: DataSource) -> Documents:
            if idx_path(path).is_file() and not Path(path).exists():
                raise ConfigError(
                    f"{path} is the prefix of a .bin and an .idx; {self.flag} reads files of "
                    f"{self.contents} (JSON, JSON lines, Parquet, CSV)"
                )
            options = data.config.section(InstructionConfig)
            encoder = ExampleEncoder(options, data.tokenizer, data.config.tokenizer)
            return opened(path, encoder, cache=data.cache(path))

        return SourceReader(open_files, recipe)


class Instruction(RecordFiles):
    """Files of instructions and answers."""

    flag, contents = "--sft, or the type instruction,", "instructions and answers"

    def reader(self, data: DataPipeline) -> SourceReader:
        config = data.config.section(InstructionConfig)
        recipe = InstructionRecipe.from_config(config, data.seq_length, data.seed, data.tokenizer)
        return self.records(data, recipe, InstructionExamples.open)

    def collator(
        self, data: DataPipeline, collate: Callable[[Sequence[Any]], Any]
    ) -> ExampleCollator:
        """The collator of the samples of a run that reads examples, made from that of documents."""
        flags, paths = data.config.section(InstructionConfig), data.config.fast_paths
        padding = None
        if flags.pads_batches:
            padding = Padding(padding_token(data.tokenizer), data.length_multiple)
        # The head computes all positions for graphs of one shape, and for a cache that later epochs
        # read, in other batches.
        every = paths.torch_compile_mode in GRAPH_MODES or data.identifies
        multiple = None if every else HEAD_POSITIONS
        return ExampleCollator(collate, padding, flags.weigh_by, multiple)

    def conversation(self, config: RunConfig, path: str) -> Example | None:
        columns = RecordColumns.of(config.section(InstructionConfig))
        examples = read_examples(example_files(path)[0].path, columns)
        return next((example for _, example in examples), None)


KIND = Instruction()
