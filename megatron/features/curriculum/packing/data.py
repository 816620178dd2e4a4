"""Samples in bins of about as many tokens, and what a run does with them.

An item of the training data is a bin: its number is its place in the order of the run, so that
sampler, resume and ``--skip-samples`` count bins. Micro batches have ``--micro-batch-size`` bins,
whose samples are their rows. They differ in their tokens: each loss of a step is the mean over all
tokens that count in it, on all data-parallel ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import Piece, RepeatedSamples, SampleDataset, SequenceLengths
from megatron.features.curriculum.analysis import (
    ANALYSED,
    fingerprint,
    sample_length,
    sample_tokens,
)
from megatron.features.curriculum.metric_files import read_values
from megatron.features.curriculum.packing.section import PATH, SamplePacking, lengths_of, packed
from megatron.util.digests import digest_of_parts
from megatron.util.json_text import parse_json

logger = logging.getLogger(__name__)

VERSION = 1
"""Part of the cache entries' names: raise it when the bins change."""


class Bin(NamedTuple):
    """The samples of an item."""

    samples: list[Any]


class PackedSamples:
    """The bins of a dataset. ``index`` has its samples' numbers, the ends of the bins in them, and
    the tokens before each end."""

    def __init__(self, dataset: SampleDataset[Any], index: StoredArrays) -> None:
        self.dataset, self._index = dataset, index

    def __len__(self) -> int:
        return len(self._index["ends"])

    def _numbers(self, index: int) -> list[int]:
        start = int(self._index["ends"][index - 1]) if index else 0
        return [int(n) for n in self._index["numbers"][start : int(self._index["ends"][index])]]

    def __getitem__(self, index: int, /) -> Bin:
        return Bin([self.dataset[number] for number in self._numbers(index)])

    def origin(self, index: int, /) -> Sequence[Piece]:
        return [piece for number in self._numbers(index) for piece in self.dataset.origin(number)]

    def before(self, items: int) -> tuple[int, int]:
        """Samples and tokens of the first ``items``, which go over all bins again and again."""
        passes, rest = divmod(items, len(self))
        columns = self._index["ends"], self._index["tokens"]
        samples, tokens = (
            passes * int(column[-1]) + (int(column[rest - 1]) if rest else 0) for column in columns
        )
        return samples, tokens


def needed(packing: SamplePacking, seq_length: int, items: int) -> int:
    """Number of samples to make bins of: that in the files of their lengths, or without files as
    many as fill the bins with whole samples. Raises FileNotFoundError or ValueError for files that
    cannot be used."""
    if packing.metrics_path is not None:
        return len(_metric_lengths(packing.metrics_path))
    each = packing.max_tokens // seq_length
    return items * max(1, min(each, packing.max_samples or each))


def _metric_lengths(folder: str) -> npt.NDArray[np.integer]:
    path = Path(folder, "seqlen", "seqlen_sample_to_metric")
    try:
        return read_values(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{PATH}.metrics_path {folder}: there is no {path}.bin with .idx; run "
            "tools/analyze_data.py --analyzing-metric seqlen --save with that folder and the flags "
            "of this run, or leave metrics_path out, and the run measures its samples itself"
        ) from None


def _measured(dataset: SampleDataset[Any]) -> dict[str, np.ndarray]:
    logger.info("%s: measuring the lengths of %d samples, once", PATH, len(dataset))
    samples = (dataset[number] for number in range(len(dataset)))
    lengths = (sample_length(sample, sample_tokens(sample)) for sample in samples)
    return {"lengths": np.fromiter(lengths, np.int64, len(dataset))}


def pack(
    dataset: SampleDataset[Any],
    packing: SamplePacking,
    bins_of_step: int,
    items: int,
    cache: IndexCache,
) -> SampleDataset[Any]:
    """The ``items`` that a run may consume. Raises FileNotFoundError or ValueError if the files of
    their lengths are missing or of other samples, or the samples do not make a step."""
    known = fingerprint(dataset)
    if packing.metrics_path is not None:
        values = _metric_lengths(packing.metrics_path)
        _check_metric(Path(packing.metrics_path, "seqlen"), len(values), len(dataset), known)
    else:
        depends_on = {"version": VERSION, "dataset": known}
        measured = cache.arrays("sample-lengths", depends_on, partial(_measured, dataset))
        values = measured["lengths"]
    lengths = lengths_of(values)

    def build() -> dict[str, np.ndarray]:
        bins = packed(lengths, packing, bins_of_step)
        if bins.left_out:
            logger.warning(
                "%s: %d of %d samples are left out: longer than max_tokens %d, or too few for a "
                "bin of min_batch_size %d or a step of --global-batch-size %d bins",
                PATH, bins.left_out, len(lengths), packing.max_tokens, packing.min_samples,
                bins_of_step,
            )  # fmt: skip
        tokens = np.cumsum(lengths[bins.numbers])[bins.ends - 1]
        return {"numbers": bins.numbers, "ends": bins.ends, "tokens": tokens}

    depends_on = {
        "version": VERSION,
        "lengths": digest_of_parts([lengths.data]),
        "step": bins_of_step,
        **{
            name: getattr(packing, name)
            for name in ("max_tokens", "min_samples", "max_samples", "order", "seed", "equal")
        },
    }
    bins = PackedSamples(dataset, cache.arrays("dynamic-batches", depends_on, build))
    available = packing.passes * len(bins)
    if items > available:
        raise ValueError(
            f"data_efficiency.data_sampling.num_epochs {packing.passes} allows {available} bins, "
            f"{len(bins)} an epoch; the run needs {items}"
        )
    return RepeatedSamples(bins, items)


def _check_metric(folder: Path, values: int, samples: int, known: str) -> None:
    again = "run tools/analyze_data.py --analyzing-metric seqlen again, with the flags of this run"
    theirs: Any = known
    if (folder / ANALYSED).is_file():
        content = parse_json((folder / ANALYSED).read_bytes(), str(folder / ANALYSED), lenient=True)
        theirs = content.get("fingerprint") if isinstance(content, dict) else None
    if values != samples or theirs != known:
        raise ValueError(
            f"{PATH}.metrics_path: {folder} has the lengths of {values} other samples than the "
            f"{samples} of this run: {again}, or leave metrics_path out"
        )


@dataclass(frozen=True)
class BinCollator:
    """Collates the samples of bins by ``collate``, into rows as long as the longest, a multiple of
    ``multiple``, where padding can be left out; and what is in no bin as it was."""

    collate: Callable[[Sequence[Any]], Any]
    multiple: int | None

    def __call__(self, items: Sequence[Any]) -> Any:
        if not isinstance(items[0], Bin):
            return self.collate(items)
        batch = self.collate([sample for item in items for sample in item.samples])
        if self.multiple is not None and hasattr(batch, "without_padding"):
            batch = batch.without_padding(self.multiple)
        if getattr(batch, "weights_2", None) is None:
            rows, counted = len(batch.loss_mask_BS), batch.loss_mask_BS.sum().double()
            batch = batch._replace(weights_2=torch.stack((counted.new_tensor(rows), counted)))
        return batch


class PackedLengths(SequenceLengths):
    """Lengths of a run whose items are bins: their tokens, once they are known, without padding;
    until then those of items of ``seq_length`` tokens."""

    consumed: Callable[[int], int] | None = None
    """Returns the tokens of the first items."""

    def tokens(self, consumed_samples: int) -> int:
        if self.consumed is None:
            return super().tokens(consumed_samples)
        return self.consumed(consumed_samples)
