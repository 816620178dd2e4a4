"""Packing of samples into bins of about the same number of tokens, and training on bins.

An item of the training data is a bin. Its number is its position in the order of the run, so the
sampler, resume and ``--skip-samples`` count bins. A micro batch has ``--micro-batch-size`` bins,
whose samples are its rows. Since micro batches differ in their number of tokens, each loss of a
step is the mean over all tokens of the step that count, on all data-parallel ranks, and the
learning rate depends on the number of samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.sampler import SkippedSamples, position
from megatron.data.samples import Piece, RepeatedSamples, SampleDataset, SequenceLengths
from megatron.features.curriculum.analysis import (
    ANALYSED,
    fingerprint,
    sample_length,
    sample_tokens,
)
from megatron.features.curriculum.metric_files import read_values
from megatron.features.curriculum.packing.section import PATH, SamplePacking, lengths_of, packed
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.training.trainer import Callback, Step, Trainer
from megatron.util.digests import digest_of_parts
from megatron.util.json_text import parse_json

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the packing, part of each cache key. Increment it whenever the bins change."""


class Bin(NamedTuple):
    """Samples of one item of the training data."""

    samples: list[Any]


class PackedSamples:
    """Bins of a dataset. ``index`` has the sample numbers of all bins, concatenated; the end of
    each bin in them; and the number of tokens up to each end."""

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
        """Return the number of samples and of tokens in the first ``items`` items. After the last
        bin, items repeat from the first."""
        passes, rest = divmod(items, len(self))
        columns = self._index["ends"], self._index["tokens"]
        samples, tokens = (
            passes * int(column[-1]) + (int(column[rest - 1]) if rest else 0) for column in columns
        )
        return samples, tokens


def needed(packing: SamplePacking, seq_length: int, items: int) -> int:
    """Return the number of samples to pack into bins: the number in the files of lengths or,
    without such files, enough full-length samples to fill the bins. Raises FileNotFoundError or
    ValueError if the files are missing or damaged."""
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
    """Return the ``items`` bins that a run may consume. Raises FileNotFoundError or ValueError if
    the files of lengths are missing or made of other samples, or if the bins are too few."""
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
    """Collator that applies ``collate`` to the samples of bins. If ``multiple`` is given and the
    batch allows it, rows are as long as the longest sample, rounded up to ``multiple``. Items that
    are not bins are collated as usual."""

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
    """Token counts of a run whose items are bins: ``seq_length`` per item until the bins are known,
    then the number of tokens without padding."""

    consumed: Callable[[int], int] | None = None
    """Function that returns the number of tokens in a number of first items."""

    def tokens(self, consumed_samples: int) -> int:
        if self.consumed is None:
            return super().tokens(consumed_samples)
        return self.consumed(consumed_samples)


def _weighed(forward: Callable[[Any, LayerState], LayerState] | None, module: Any, state: LayerState
             ) -> LayerState:  # fmt: skip
    """Run the last layer. In training, multiply each loss of a micro batch by the micro batch's
    share of the step's tokens or samples."""
    batch = state.batch
    state = module(state) if forward is None else forward(module, state)
    if not module.training or not state.losses:
        return state
    samples, tokens = batch.weights_2
    weights = {name: tokens for name in state.losses if name.startswith((LM_LOSS, "mtp_"))}
    weights |= {name: samples for name in state.losses if name.startswith("sop")}
    losses = {
        name: loss * weights[name].to(loss.dtype) if name in weights else loss
        for name, loss in state.losses.items()
    }
    return state.changed(losses=losses)


def with_weights(spec: ModelSpec) -> ModelSpec:
    """Return a model whose losses are means over the tokens or samples of a whole step."""

    def started(batch: Any) -> LayerState:
        return spec.begin(batch).changed(batch=batch)

    def layers(tp: TensorParallel) -> list[LayerSpec]:
        *others, last = spec.layers(tp)
        return [*others, replace(last, forward=partial(_weighed, last.forward))]

    return replace(spec, begin=started, layers=layers)


class StepsOfBins(Callback):
    """Callback that scales learning rates by the number of samples, and counts tokens."""

    def __init__(self, packing: SamplePacking, context: Any) -> None:
        self.packing, self._context, self._samples = packing, context, 0
        self._bind(context.data, context.plan)

    def _bind(self, data: Any, plan: Any) -> None:
        self._data, dataset = data, data.datasets.train
        self._skipped: tuple[range, ...] = ()
        while dataset is not None and not isinstance(dataset, PackedSamples):
            if isinstance(dataset, SkippedSamples):
                self._skipped = dataset.skipped
            dataset = dataset.dataset
        self._bins = dataset
        if isinstance(plan.lengths, PackedLengths) and dataset is not None:
            plan.lengths.consumed = lambda items: self._before(items)[1]

    def _before(self, items: int) -> tuple[int, int]:
        """Return the number of samples and of tokens in the first ``items`` items of the run."""
        assert self._bins is not None
        reached = position(self._skipped, items)
        samples, tokens = self._bins.before(reached)
        for each in self._skipped:
            if each.start < reached:
                begin, end = self._bins.before(each.start), self._bins.before(each.stop)
                samples, tokens = samples - end[0] + begin[0], tokens - end[1] + begin[1]
        return samples, tokens

    def before_step(self, trainer: Trainer) -> None:
        if trainer.data is not self._data:
            self._bind(trainer.data, trainer.plan)
        first, plan = trainer.consumed_samples, trainer.plan
        bins = plan.batch_size.batch_size(first)
        before, after = self._before(first), self._before(first + bins)
        samples, tokens = (end - start for start, end in zip(before, after, strict=True))
        plan.rate_factor = self.packing.rate_factor(samples, bins)
        self._samples = samples
        if self.packing.verbose:
            logger.info(
                "step %d: %d bins of %d samples and %d tokens, learning rate times %.4g",
                trainer.iteration + 1, bins, samples, tokens, plan.rate_factor,
            )  # fmt: skip

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self._context.report.record("samples_in_bins", float(self._samples))
