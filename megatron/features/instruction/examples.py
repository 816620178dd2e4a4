"""Instructions and answers as packed samples, with a loss on the answers.

Examples are tokenized once, stored in the cache, and memory-mapped.
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

# Version of the tokenized arrays, part of each cache key, also for preferences. Increment it when
# their meaning changes.
INDEX_VERSION = 2
_AT_ONCE = 1000


class TokenizedExamples(ABC):
    """Tokenized examples of files. Implements `Documents` of megatron/data/samples.py, with
    ``parts`` sequences per document."""

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
        """Return the arrays of the examples of a file, folder or glob. They are read from the cache
        entry ``name``, or computed by ``tokenize`` from what ``read`` yields for each file. The
        default cache is `index-cache/` next to the data. Raises FileNotFoundError if no file
        matches, and ValueError if there is no example."""
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
        """Return `length` tokens of a sequence, starting at token `offset`; None reads to the end.
        Raises IndexError if the sequence does not exist, or the range exceeds it."""
        return self._slice("tokens", index, offset, length)

    def _slice(self, name: str, index: int, offset: int, length: int | None) -> np.ndarray:
        index, stop = checked_range(self.sequence_lengths, index, offset, length, self.prefix)
        start = int(self._offsets[index])
        return self._index[name][start + offset : start + stop]

    @property
    def prompt_hashes(self) -> npt.NDArray[np.uint64]:
        """Hash of the prompt tokens of each document."""
        return self._index["prompt_hashes"]

    @abstractmethod
    def verify(self) -> None:
        """Raise ValueError if the arrays are inconsistent."""

    def part(self, units: range, by_prompt: bool, name: str) -> npt.NDArray[np.int64]:
        """Return the indices of the documents of the split ``name``. Raises ValueError like
        `verify` and `of_prompts`."""
        self.verify()
        if by_prompt:
            return of_prompts(self.prompt_hashes, units, f"{self.prefix}, {name}")
        return np.arange(units.start, units.stop)

    def check(self, name: str, consistent: bool) -> None:
        """Raise ValueError with the name of the cache entry if the offsets do not match the tokens,
        or the other arrays are not ``consistent``."""
        rising = self._offsets[0] == 0 and (np.diff(self._offsets) >= 0).all()
        if not (rising and self._offsets[-1] == len(self._index["tokens"]) and consistent):
            raise ValueError(
                f"the cached examples of {self.prefix} are damaged: delete their entry ({name}-...)"
                " in the folder of --data-cache-path"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix, self._index)


class InstructionExamples(TokenizedExamples):
    """Examples of instruction files, with a loss mask. Each example is a document of one sequence.
    Pickling stores only the path of the cache entry."""

    def __init__(self, prefix: str, index: StoredArrays) -> None:
        super().__init__(prefix, index)
        self.first_counted: npt.NDArray[np.int32] = index["first_counted"]
        """Index of the first token of each example that counts in the loss, or the length of the
        example if none does; int32[n]."""

    @classmethod
    def open(
        cls, path: str, encoder: ExampleEncoder, cache: IndexCache | None = None
    ) -> InstructionExamples:
        """Tokenize the examples of a file, folder or glob, or read them from the cache, by default
        `index-cache/` next to the data. Raises FileNotFoundError if no file matches, and ValueError
        if a record is malformed or there is no example."""
        tokenize = partial(_encoded, encoder=encoder)
        return cls(
            path, cls.stored(path, "instruction", encoder, {}, read_examples, tokenize, cache)
        )

    @cached_property
    def prompt_hashes(self) -> npt.NDArray[np.uint64]:
        """Hash of each example's tokens before the first one in the loss, or of all of its tokens
        if nothing precedes it."""
        firsts = np.where(self.first_counted > 1, self.first_counted, self.sequence_lengths)
        tokens, starts = self._index["tokens"], self._offsets[:-1]
        hashes = (
            hash64(tokens[start : start + first].tobytes())
            for start, first in zip(starts.tolist(), firsts.tolist(), strict=True)
        )
        return np.fromiter(hashes, np.uint64, len(self))

    def counted(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """Return whether each token counts in the loss, as bool. Raises like `get`."""
        return self._slice("counted", index, offset, length)

    def verify(self) -> None:
        counted = len(self._index["counted"]) == len(self._index["tokens"])
        self.check("instruction", counted and len(self.first_counted) == len(self))


def offsets_of(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the start offsets of consecutive items of these lengths, followed by the total
    length."""
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


# Version of the packing, part of each cache key. Increment it when the arrays' meaning changes.
PACKING_VERSION = 1


@dataclass(frozen=True)
class InstructionRecipe:
    """Recipe for samples of seq_length + 1 tokens, made of whole examples and padding.

    Every epoch shuffles the examples, packs them in that order, and shuffles the samples. The order
    depends only on the seed, the split and the epoch."""

    seq_length: int
    """Number of input tokens of a sample."""
    seed: int
    pad_token: int
    """Padding token, which never counts in the loss."""
    packing: bool = False
    skip_long: bool = False
    """Leave out examples of more than seq_length + 1 tokens, instead of truncating them."""
    pads: bool = True
    """True if the dataset pads samples, False if the collator pads them to the batch's longest."""
    by_prompt: bool = False
    """Split the data by the hash of each prompt, so that all examples of a prompt are in the same
    split, instead of into consecutive ranges of examples."""

    @classmethod
    def from_config(
        cls, config: InstructionConfig, seq_length: int, seed: int, tokenizer: Tokenizer
    ) -> InstructionRecipe:
        """Create the recipe from the flags; see :func:`padding_token` for the padding."""
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
        """Return a dataset of at least `num_samples` samples of the examples `units`, whose order
        may come from the cache. Raises ValueError if the documents are not examples, or if no
        example has an answer within seq_length + 1 tokens."""
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
        """Return a sample: its examples, each as a separate document, followed by padding."""
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
            # The first token of a document never counts, so no document predicts the next one.
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
    """Return at least ``num_samples`` indices into ``count`` examples, in whole epochs. Their order
    depends only on the seed, the split ``name`` and the epoch."""
    epochs = [
        np.random.default_rng([seed, zlib.crc32(name.encode()), epoch]).permutation(count)
        for epoch in range(max(1, -(-num_samples // count)))
    ]
    return np.concatenate(epochs)


def of_prompts(hashes: npt.NDArray[np.uint64], units: range, part: str) -> npt.NDArray[np.int64]:
    """Return the indices of the examples of a split, ascending, if the data is split by prompt.

    All examples are sorted by the hash of their prompt, and the split gets the prompts that begin
    at the positions `units`. All examples of a prompt are in the same split as the first of them,
    so a split may have somewhat more or fewer examples than `units`. The order of examples in the
    files does not matter, and adding examples moves only a few to another split.

    Raises ValueError if no prompt begins at these positions. `part` identifies the split in the
    error.
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
    """Kind of data that is read from record files instead of .bin/.idx.

    Attributes:
        flag: flag by which a run reads this kind.
        contents: name of the contents for error messages.
    """

    flag: str
    contents: str

    def records(
        self, data: DataPipeline, recipe: Any, opened: Callable[..., Documents]
    ) -> SourceReader:
        """Return the reader that builds samples by ``recipe``. ``opened`` is called with a path, an
        encoder and the cache. Raises ConfigError if there is a sequence length curriculum. The
        reader raises ConfigError if it is given a .bin/.idx file."""
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
    """Kind of data: files of instructions and answers."""

    flag, contents = "--sft, or the type instruction,", "instructions and answers"

    def reader(self, data: DataPipeline) -> SourceReader:
        config = data.config.section(InstructionConfig)
        recipe = InstructionRecipe.from_config(config, data.seq_length, data.seed, data.tokenizer)
        return self.records(data, recipe, InstructionExamples.open)

    def collator(
        self, data: DataPipeline, collate: Callable[[Sequence[Any]], Any]
    ) -> ExampleCollator:
        """Return the collator for examples, which wraps ``collate``, the one for plain
        documents."""
        flags, paths = data.config.section(InstructionConfig), data.config.fast_paths
        padding = None
        if flags.pads_batches:
            padding = Padding(padding_token(data.tokenizer), data.length_multiple)
        # Compute all positions if CUDA graphs need fixed shapes, or if cached results must remain
        # valid for other batches in later epochs.
        every = paths.torch_compile_mode in GRAPH_MODES or data.identifies
        multiple = None if every else HEAD_POSITIONS
        return ExampleCollator(collate, padding, flags.weigh_by, multiple)

    def conversation(self, config: RunConfig, path: str) -> Example | None:
        columns = RecordColumns.of(config.section(InstructionConfig))
        examples = read_examples(example_files(path)[0].path, columns)
        return next((example for _, example in examples), None)


KIND = Instruction()
