"""The training, validation and test datasets that a configuration describes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config import DataConfig
from megatron.data.blend import normalised_weights, part_samples
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset, GPTRecipe
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.data.mock import MockGPTDataset
from megatron.data.samples import SampleDataset
from megatron.data.split import parse_split, split_documents
from megatron.data.vocabulary import check_vocabulary

logger = logging.getLogger(__name__)

PARTS = ("train", "valid", "test")


class GPTDatasets(NamedTuple):
    """Datasets by part; None where no samples are wanted or the split gives a part nothing."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


@dataclass(frozen=True)
class Blend:
    """What one of the data path flags names."""

    flag: str
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """Shares that sum to 1; None for a single prefix without a weight, which is not blended."""


def parse_data_path(values: Sequence[str], flag: str) -> Blend:
    """Read `PREFIX` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Raises:
        ValueError: the values have neither form, or a weight is not above 0.
    """
    if len(values) == 1:
        return Blend(flag, tuple(values), None)
    weights, prefixes = values[::2], values[1::2]
    try:
        numbers = [float(weight) for weight in weights]
    except ValueError:
        numbers = []
    if not numbers or len(weights) != len(prefixes):
        raise ValueError(
            f"{flag} {' '.join(values)}: give one PREFIX, or WEIGHT PREFIX pairs such as "
            "0.7 data/books_text_document 0.3 data/code_text_document"
        )
    return Blend(flag, tuple(prefixes), tuple(normalised_weights(numbers, flag)))


def build_gpt_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    sample_counts: tuple[int, int, int],
    seed: int,
    vocab_size: int,
    eod_token: int | None = None,
) -> GPTDatasets:
    """Build the datasets; needs neither a GPU nor a process group, so it can be run beforehand.

    Args:
        seq_length: tokens a sample feeds to the model; a sample has one more.
        sample_counts: samples wanted for training, validation and test.
        seed: of the shuffles, and of mock data.
        vocab_size: token ids must be below it.
        eod_token: ends the documents of mock data.

    Raises:
        ValueError, FileNotFoundError: flags or files that cannot be used; the message names them.
    """
    if data.mock_data:
        return GPTDatasets(
            *(
                MockGPTDataset(count, seq_length, vocab_size, seed, part, eod_token)
                if count
                else None
                for part, count in enumerate(sample_counts)
            )
        )
    builder = _Builder(data.data_cache_path, seq_length, seed, vocab_size, {})
    own_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if not data.data_path:
        if sample_counts[0] and not data.train_data_path:
            raise ValueError(
                "no training data: give --data-path or --train-data-path (or --mock-data)"
            )
        return GPTDatasets(
            *(
                builder.whole_files(parse_data_path(paths, f"--{name}-data-path"), name, count)
                if paths and count
                else None
                for name, paths, count in zip(PARTS, own_paths, sample_counts, strict=True)
            )
        )
    if any(own_paths):
        raise ValueError(
            "--data-path (with --split) and --train-data-path, --valid-data-path, "
            "--test-data-path exclude each other: give one or the other"
        )
    blend = parse_data_path(data.data_path, "--data-path")
    shares = parse_split(data.split)
    if sample_counts[0] and not shares[0]:
        raise ValueError(f"--split {data.split} leaves nothing for training")
    return GPTDatasets(
        *(
            builder.split_files(blend, data.split, part, count) if share and count else None
            for part, (share, count) in enumerate(zip(shares, sample_counts, strict=True))
        )
    )


@dataclass(frozen=True)
class _Builder:
    cache_path: str | None
    seq_length: int
    seed: int
    vocab_size: int
    opened: dict[str, IndexedDataset]

    def whole_files(self, blend: Blend, name: str, num_samples: int) -> SampleDataset:
        """A part that has files of its own."""
        documents = [range(len(self._open(blend, prefix))) for prefix in blend.prefixes]
        for prefix, found in zip(blend.prefixes, documents, strict=True):
            if not found:
                raise ValueError(f"{blend.flag}: {prefix} holds no documents")
        return self._blended(blend, documents, name, num_samples)

    def split_files(
        self, blend: Blend, split: str, part: int, num_samples: int
    ) -> SampleDataset | None:
        """A part that has a share of the documents of every file.

        None where the share comes to no document: the default split does that to the test part
        of a small corpus, which is no reason not to train on it.
        """
        documents = []
        for prefix in blend.prefixes:
            total = len(self._open(blend, prefix))
            documents.append(split_documents(split, total)[part])
            if not documents[-1]:
                empty = (
                    f"--split {split} gives {PARTS[part]} no document of {prefix}, which has "
                    f"{total}: give {PARTS[part]} a larger share, or 0 to do without it, or more "
                    "documents"
                )
                if PARTS[part] == "train":
                    raise ValueError(empty)
                logger.warning(empty)
                return None
        return self._blended(blend, documents, PARTS[part], num_samples)

    def _blended(
        self, blend: Blend, documents: list[range], name: str, num_samples: int
    ) -> SampleDataset:
        if blend.weights is None:
            return self._single(blend.prefixes[0], documents[0], name, num_samples)
        parts = [
            self._single(prefix, found, name, part_samples(num_samples, weight))
            for prefix, found, weight in zip(blend.prefixes, documents, blend.weights, strict=True)
        ]
        cache = IndexCache.beside(blend.prefixes[0], self.cache_path)
        return BlendedDataset.build(parts, blend.weights, num_samples, cache, name)

    def _single(self, prefix: str, documents: range, name: str, num_samples: int) -> GPTDataset:
        cache = IndexCache.beside(prefix, self.cache_path)
        recipe = GPTRecipe(self.seq_length, self.seed)
        return recipe.build(self.opened[prefix], documents, num_samples, name, cache)

    def _open(self, blend: Blend, prefix: str) -> IndexedDataset:
        if prefix not in self.opened:
            try:
                indexed = IndexedDataset(prefix)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{blend.flag} {prefix}: {error}") from None
            check_vocabulary(indexed, self.vocab_size, IndexCache.beside(prefix, self.cache_path))
            self.opened[prefix] = indexed
        return self.opened[prefix]
