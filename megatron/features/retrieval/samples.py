"""Samples for the inverse cloze task: a sentence, and the block of sentences that it is from.

A document is divided into blocks of consecutive sentences. A randomly drawn sentence of a block is
the query. It is removed from the block, except in a fraction of the samples (Lee et al. 2019,
arXiv:1906.00300, section 5). A query is ``[CLS] sentence [SEP]``, and its context ``[CLS] title
[SEP] block [SEP]``, as in Megatron.

Shape suffixes: N sentences, D documents, M blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config.features import DOCUMENTS
from megatron.config.flags import ConfigError
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.pipeline import DataPipeline, open_indexed
from megatron.data.samples import (
    Documents,
    Piece,
    SampleDataset,
    SampleView,
    check_ids,
    checked_index,
)
from megatron.data.sources import PARTS
from megatron.features.masked.batch import MockDocuments, MockTokenizer
from megatron.features.masked.heads import LabelledText, collate_labelled
from megatron.features.masked.segments import epoch_rng, sample_rng
from megatron.features.retrieval.flags import BiencoderConfig, IctConfig
from megatron.features.retrieval.layers import RetrieverBatch
from megatron.util.digests import digest

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]
INDEX_VERSION = 1
SPECIAL = 3
"""Number of special tokens in a context."""
LONG_SENTENCE = 512
"""Maximum number of tokens in a sentence. As in Megatron, documents with longer ones are
skipped."""
LENGTHS = 8
"""Number of distinct sequence lengths to which batches are padded. Kernels are compiled for each,
so it is small."""


class IctSample(NamedTuple):
    """Token ids of a query and its context, including special tokens."""

    query: Ids
    context: Ids


def document_blocks(
    starts_N: npt.NDArray[np.int64], target: int, fewest: int
) -> Iterator[tuple[int, int]]:
    """Yield (first, stop), a range of sentences, for each block of a document. ``starts_N`` has the
    token offset of each sentence, and of the document's end. A block ends once it has ``target``
    tokens and ``fewest`` sentences, but extends to the document's end if ``fewest`` or fewer would
    remain."""
    first, last = 0, len(starts_N) - 1
    while first < last:
        stop = int(np.searchsorted(starts_N, starts_N[first] + target))
        stop = max(stop, first + fewest)
        stop = last if stop > last - fewest else stop
        yield first, stop
        first = stop


@dataclass(frozen=True)
class IctRecipe:
    """Recipe for inverse cloze samples from documents that are split into sentences."""

    seq_length: int
    """Maximum number of tokens in a query or a context."""
    seed: int
    query_in_block_prob: float
    fewest: int
    """Minimum number of sentences in a block."""
    cls: int
    sep: int
    vocab_size: int
    titles: Documents | None = field(default=None, compare=False, repr=False)
    """Titles of the documents; None for contexts without titles."""

    def units(self, documents: Documents) -> int:
        return len(documents.document_indices) - 1

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> IctDataset:
        """Implement `SampleRecipe.build`. Raises ValueError if the numbers of titles and documents
        differ, or if no document yields a block."""
        titles_D = self._title_lengths(documents)
        depends_on = {
            "version": INDEX_VERSION,
            "sequence lengths": documents.lengths_digest,
            "document boundaries": digest(documents.document_indices.tobytes()),
            "documents": [units.start, units.stop],
            "title lengths": digest(titles_D.tobytes()),
            "tokens": self.seq_length,
            "fewest sentences": self.fewest,
            "part": name,
        }

        def arrays() -> dict[str, np.ndarray]:
            documents.verify()
            return {"blocks": self._blocks(documents, units, titles_D)}

        index = cache.arrays(f"ict-{name}", depends_on, arrays)
        return IctDataset(documents, self, name, num_samples, index)

    def title(self, document: int) -> Ids:
        """Return a document's title, truncated to half the length of a context."""
        if self.titles is None:
            return np.empty(0, np.int64)
        first, stop = self.titles.document_indices[document : document + 2].tolist()
        parts = [self.titles.get(sequence) for sequence in range(first, stop)]
        return np.concatenate(parts)[: self.longest_title].astype(np.int64)

    @property
    def longest_title(self) -> int:
        return (self.seq_length - SPECIAL) // 2

    def _title_lengths(self, documents: Documents) -> npt.NDArray[np.int64]:
        count = self.units(documents)
        if self.titles is None:
            return np.zeros(count, np.int64)
        bounds = self.titles.document_indices
        if len(bounds) - 1 != count:
            raise ValueError(
                f"--titles-data-path {self.titles.prefix} has {len(bounds) - 1} titles, and "
                f"{documents.prefix} {count} documents: make both of the same file, by "
                "tools/preprocess_data.py --json-keys text title --split-sentences"
            )
        ends = np.concatenate(([0], np.cumsum(self.titles.sequence_lengths, dtype=np.int64)))
        return np.minimum(np.diff(ends[bounds]), self.longest_title)

    def _blocks(
        self, documents: Documents, units: range, titles_D: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return (first sentence, stop sentence, document) for every block, int64 [M, 3]."""
        bounds, lengths_N = documents.document_indices, documents.sequence_lengths
        rows, left_out = [], 0
        for document in units:
            first, last = int(bounds[document]), int(bounds[document + 1])
            own = lengths_N[first:last]
            if len(own) < self.fewest or int(own.max(initial=0)) > LONG_SENTENCE:
                left_out += 1
                continue
            starts = np.concatenate(([0], np.cumsum(own, dtype=np.int64)))
            target = self.seq_length - SPECIAL - int(titles_D[document])
            for begin, stop in document_blocks(starts, target, self.fewest):
                rows.append((first + begin, first + stop, document))
        if not rows:
            raise ValueError(
                f"{documents.prefix}: none of its {len(units)} documents has {self.fewest} "
                f"sentences of at most {LONG_SENTENCE} tokens: preprocess the text with "
                "--split-sentences, or give --use-one-sent-docs for documents of one sentence"
            )
        logger.info(
            "%s: %d blocks of %d documents; %d documents of fewer than %d sentences, or with one "
            "of more than %d tokens, are left out",
            documents.prefix, len(rows), len(units) - left_out, left_out, self.fewest,
            LONG_SENTENCE,
        )  # fmt: skip
        return np.array(rows, np.int64)


class IctDataset:
    """Dataset built by `IctRecipe.build`. Every epoch has all blocks, in a different order and with
    different queries. Sample i does not depend on the number of samples."""

    def __init__(
        self,
        documents: Documents,
        recipe: IctRecipe,
        name: str,
        num_samples: int,
        index: StoredArrays,
    ) -> None:
        self.documents, self.recipe, self.name = documents, recipe, name
        self._count, self._index = num_samples, index
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> IctSample:
        recipe, (first, stop, document) = self.recipe, self._block(index)
        rng = sample_rng(recipe.seed, self.name, index)
        sentences = [self.documents.get(number).astype(np.int64) for number in range(first, stop)]
        check_ids(np.concatenate(sentences), recipe.vocab_size, index, self.origin)
        drawn = int(rng.integers(len(sentences)))
        query = sentences[drawn]
        if rng.random() >= recipe.query_in_block_prob:
            del sentences[drawn]
        title = recipe.title(document)
        head: list[Any] = [] if recipe.titles is None else [title, [recipe.sep]]
        room = recipe.seq_length - 2 - sum(map(len, head))
        block = np.concatenate([*sentences, np.empty(0, np.int64)])[:room]
        return IctSample(
            np.array([recipe.cls, *query[: recipe.seq_length - 2], recipe.sep], np.int64),
            np.concatenate([[recipe.cls], *head, block, [recipe.sep]]).astype(np.int64),
        )

    def origin(self, index: int, /) -> list[Piece]:
        """Return the origin of a sample: the sentences in its block."""
        first, stop, _ = self._block(index)
        lengths, source = self.documents.sequence_lengths, self.documents.prefix
        return [Piece(source, number, 0, int(lengths[number])) for number in range(first, stop)]

    def _block(self, index: int) -> tuple[int, int, int]:
        blocks = self._index["blocks"]
        epoch, place = divmod(checked_index(index, len(self)), len(blocks))
        if epoch not in self._orders:
            # Keep the previous epoch's order, since a batch may have samples from both epochs.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            order = epoch_rng(self.recipe.seed, self.name, epoch).permutation(len(blocks))
            self._orders[epoch] = order
        first, stop, document = blocks[self._orders[epoch][place]].tolist()
        return first, stop, document


@dataclass(frozen=True)
class PairCollator:
    """Collate function for queries and at least as many contexts.

    Attributes:
        length: sequence length to which all texts are padded. None pads to a batch's longest
            text,
            rounded up to a multiple of ``multiple``.
        together: whether queries and contexts are padded to the same length, for a shared
            encoder.
    """

    pad: int
    multiple: int
    length: int | None
    together: bool

    def __call__(self, samples: Sequence[IctSample]) -> RetrieverBatch:
        contexts = [(sample.context, True) for sample in samples]
        return self.batch([sample.query for sample in samples], contexts, range(len(samples)))

    def batch(
        self,
        queries: Sequence[Ids],
        contexts: Sequence[tuple[Ids, bool]],
        labels: Sequence[int],
        lengths: tuple[int, int] | None = None,
    ) -> RetrieverBatch:
        """Build a batch. Each context comes with a flag, which is False for a placeholder, and each
        label is the index of a query's context. Queries and contexts are padded to the two
        ``lengths``, by default to the collator's length."""
        rows = [text(ids, label) for ids, label in zip(queries, labels, strict=True)]
        others = [text(ids, int(counts)) for ids, counts in contexts]
        of_each: Sequence[int | None] = lengths or (self.length, self.length)
        if self.together and (lengths or self.length is None):
            longest = max(lengths or [each.length for each in (*rows, *others)])
            of_each = [-(-longest // self.multiple) * self.multiple] * 2
        make = partial(collate_labelled, pad=self.pad, multiple=self.multiple)
        query, context = (
            make(texts, length=length)
            for texts, length in zip((rows, others), of_each, strict=True)
        )
        return RetrieverBatch(query, context)

    @classmethod
    def of(cls, config: Any, pad: int, longest: int) -> PairCollator:
        """Create the collate function for a run whose texts have at most ``longest`` tokens."""
        parallel, paths = config.parallel, config.fast_paths
        eighth = -(-longest // (LENGTHS * 8)) * 8
        multiple = int(np.lcm(eighth, parallel.length_divisor))
        whole = -(-longest // parallel.length_divisor) * parallel.length_divisor
        fixed = parallel.pipeline_model_parallel_size > 1 or paths.fp8_format is not None
        shared = config.model.part(BiencoderConfig).biencoder_shared_query_context_model
        return cls(pad, multiple, whole if fixed else None, shared)


def text(ids: Ids, label: int = 0) -> LabelledText:
    """Return a query or context as a row of a batch, with token type 0 throughout."""
    return LabelledText((ids,), (np.zeros_like(ids),), label)


class IctData(DataPipeline):
    """Data pipeline for a retriever: documents that are split into sentences, with their titles."""

    takes = frozenset({DOCUMENTS})
    flags = frozenset({"ict"})
    unit = "sentence"

    def recipe(self) -> IctRecipe:
        flags, tokenizer = self.config.section(IctConfig), self.tokenizer
        return IctRecipe(
            self.seq_length,
            self.seed,
            flags.query_in_block_prob,
            1 if flags.use_one_sent_docs else 2,
            tokenizer.cls,
            tokenizer.sep,
            tokenizer.vocab_size,
            self._titles,
        )

    def collator(self) -> Callable[[Sequence[IctSample]], RetrieverBatch]:
        tokenizer = MockTokenizer(self.tokenizer) if self.config.data.mock_data else self.tokenizer
        return PairCollator.of(self.config, tokenizer.pad, self.seq_length)

    def mock(self, num_samples: int, part: int) -> SampleDataset[IctSample]:
        tokenizer = MockTokenizer(self.tokenizer)
        recipe = type(self)(self.config, tokenizer).recipe()
        documents = MockDocuments(tokenizer.plain_ids, self.seq_length, self.seed, part)
        units = range(recipe.units(documents))
        return recipe.build(documents, units, num_samples, PARTS[part], IndexCache(None))

    def view(self, sample: IctSample, length: int) -> SampleView:
        """Implement `DataPipeline.view`: show the query, then its context in double brackets."""
        query, context = (self.tokenizer.detokenize(ids[:length].tolist()) for ids in sample)
        tokens = sample.query[:length]
        return SampleView(tokens, np.ones(len(tokens), np.float32), f"{query}\n[[{context}]]")

    @cached_property
    def _titles(self) -> Documents | None:
        if self.config.data.mock_data:
            return None
        path = self.config.section(IctConfig).titles_data_path
        if path is None:
            raise ConfigError(
                "--titles-data-path is missing: the prefix of the indexed titles, "
                "PREFIX_title_sentence of tools/preprocess_data.py --json-keys text title "
                "--split-sentences"
            )
        if not Path(f"{path}.idx").is_file():
            raise ConfigError(
                f"--titles-data-path {path}: {path}.idx does not exist; name the prefix of the "
                ".bin and .idx files of the titles"
            )
        return open_indexed(path)


def titles_input(path: str) -> dict[str, str]:
    """Describe the titles as an input of a run, by their path and a digest of their files."""
    from megatron.features.inputs.compared import file_input
    from megatron.formats.digests import digest_of_files

    folder = Path(path).parent
    files = [Path(f"{path}.{ending}") for ending in ("bin", "idx")]
    return file_input(path, folder, digest_of_files(folder, files))
