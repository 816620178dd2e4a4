"""Section ``data_sampling.dynamic_batching``: batches of about the same number of tokens.

The keys, the batches and the learning-rate factors follow ``variable_batch_size_and_lr`` of
DeepSpeed 0.19, whose engine does not call it. An item of ``--global-batch-size`` is a bin:
consecutive samples with at most ``max_tokens`` tokens in total. The learning rate of a step depends
on the number of samples in its bins. If a sample does not fit into a bin of ``min_batch_size``
samples, only that sample is omitted; DeepSpeed also omits all samples after it, and the last sample
of the order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError, RunConfig
from megatron.features.curriculum.flags import (
    CurriculumConfig,
    data_sampling,
    sampling_sections,
    sequence_lengths,
    token_dropping,
)

_Lengths = npt.NDArray[np.integer]
PATH = "data_efficiency.data_sampling.dynamic_batching"


@dataclass(frozen=True)
class SamplePacking:
    """Settings of the section ``dynamic_batching``. With ``equal``, all bins of a step have the
    same number of samples, as pipelines require."""

    max_tokens: int
    min_samples: int
    max_samples: int | None
    order: str
    scaling: str
    metrics_path: str | None
    seed: int
    passes: int
    verbose: bool
    equal: bool = False

    def rate_factor(self, samples: int, bins: int) -> float:
        """Return the learning-rate factor of a step with ``samples`` samples in ``bins`` bins:
        ``linear`` as in Goyal et al. 2017 (arXiv:1706.02677), ``sqrt`` as in Krizhevsky 2014
        (arXiv:1404.5997)."""
        if self.scaling == "none":
            return 1.0
        return samples / bins if self.scaling == "linear" else math.sqrt(samples / bins)


def packing_of(config: CurriculumConfig, equal: bool = False) -> SamplePacking | None:
    """Return the packing of a run, or None if batches have a fixed number of samples. Raises
    ConfigError if the section is invalid."""
    sections = sampling_sections(config)
    if sections is None:
        return None
    section, sampling = sections
    batching = sampling.section("dynamic_batching")
    if not sampling.enabled or not batching.enabled:
        return None
    batching.only(
        "enabled", "metrics_path", "lr_scaling_method", "min_batch_size", "max_batch_size",
        "sequence_picking_order", "max_tokens", "verbose",
    )  # fmt: skip
    fewest = batching.whole("min_batch_size", default=1)
    most = None
    if batching.values.get("max_batch_size") is not None:
        most = batching.whole("max_batch_size")
        if most < fewest:
            raise batching.wrong("max_batch_size", f"at least min_batch_size {fewest}")
    path = batching.values.get("metrics_path")
    return SamplePacking(
        max_tokens=batching.whole("max_tokens"),
        min_samples=fewest,
        max_samples=most,
        order=batching.choice(
            "sequence_picking_order", "dataloader", "random", "seqlen", default="dataloader"
        ),
        scaling=batching.choice("lr_scaling_method", "linear", "sqrt", "none", default="linear"),
        metrics_path=None if path is None else batching.text("metrics_path", "a folder"),
        seed=section.whole("seed", least=0, default=1234),
        passes=sampling.whole("num_epochs", default=1000),
        verbose=batching.switch("verbose"),
        equal=equal,
    )


class Bins(NamedTuple):
    """Samples in bins: sample numbers of all bins, concatenated, int64 [n]; the end of each bin in
    them, int64 [bins]; and the number of omitted samples."""

    numbers: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    left_out: int


def picked(lengths: _Lengths, packing: SamplePacking) -> npt.NDArray[np.int64]:
    """Return the sample numbers in the order of packing."""
    if packing.order == "seqlen":
        return np.argsort(lengths, kind="stable").astype(np.int64)
    order = list(range(len(lengths)))
    if packing.order == "random":
        random.Random(packing.seed).shuffle(order)
    return np.asarray(order, np.int64)


def packed(lengths: _Lengths, packing: SamplePacking, bins_of_step: int) -> Bins:
    """Pack samples of these lengths into a multiple of ``bins_of_step`` bins. Raises ValueError if
    they do not fill the bins of one step."""
    order = picked(lengths, packing)
    order = order[lengths[order] <= packing.max_tokens]
    together = bins_of_step if packing.equal else 1
    numbers: list[npt.NDArray[np.int64]] = []
    start, sums = 0, _Sums(lengths[order], together)
    while start + together * packing.min_samples <= len(order):
        count = sums.most(start, packing)
        if count < packing.min_samples:
            start += 1
            continue
        rows = order[start : start + count * together].reshape(count, together)
        numbers.extend(rows.T.copy())
        start += count * together
    whole = len(numbers) // bins_of_step * bins_of_step
    if not whole:
        raise ValueError(
            f"data_efficiency.data_sampling.dynamic_batching: {len(lengths)} samples make "
            f"{len(numbers)} bins of {packing.min_samples} samples or more and at most "
            f"max_tokens {packing.max_tokens} tokens, and a step has {bins_of_step} "
            "(--global-batch-size): raise max_tokens, lower min_batch_size, or give more data"
        )
    chosen = np.concatenate(numbers[:whole])
    ends = np.cumsum([len(each) for each in numbers[:whole]], dtype=np.int64)
    return Bins(chosen, ends, len(lengths) - len(chosen))


class _Sums:
    """Cumulative sums of sample lengths, each over every ``together``-th sample."""

    def __init__(self, lengths: _Lengths, together: int) -> None:
        self.together = together
        padded = np.concatenate((np.zeros(together, np.int64), lengths.astype(np.int64)))
        rows = -(-len(padded) // together)
        table = np.zeros(rows * together, np.int64)
        table[: len(padded)] = padded
        # The length of sample i is sums[i + together] - sums[i].
        self.sums = table.reshape(rows, together).cumsum(0).reshape(-1)
        self.count = len(lengths)

    def most(self, start: int, packing: SamplePacking) -> int:
        """Return the number of samples that fit into each of the next ``together`` bins."""
        longest = min((self.count - start) // self.together, packing.max_tokens)
        if packing.max_samples is not None:
            longest = min(longest, packing.max_samples)
        for first in range(start, start + self.together):
            column = self.sums[first :: self.together][: longest + 1]
            fits = np.searchsorted(column, column[0] + packing.max_tokens, side="right") - 1
            longest = min(longest, int(fits))
        return longest


def lengths_of(values: Sequence[int] | _Lengths) -> _Lengths:
    """Return lengths as an array. An empty sample counts as one token, so that bins are finite."""
    return np.maximum(np.asarray(values, np.int64), 1)


def check(config: RunConfig, packing: SamplePacking) -> None:
    """Raise ConfigError if a flag cannot be combined with bins."""
    family = config.model.family
    if family not in ("gpt", "bert"):
        raise ConfigError(
            f"{PATH} packs the samples of GPT and BERT, and this is --model-family {family}: set "
            "enabled to false"
        )
    replaced = next(filter(None, (section.replaces_losses for section in config.sections)), None)
    if replaced is not None:
        raise ConfigError(
            f"{PATH} weighs micro batches by their tokens, and {replaced} computes losses of its "
            "own: set enabled to false"
        )
    curriculum = config.section(CurriculumConfig)
    others = {
        "curriculum_learning": sequence_lengths(curriculum) or data_sampling(curriculum),
        "data_routing.random_ltd": token_dropping(curriculum),
    }
    name = next((name for name, section in others.items() if section is not None), None)
    if name is not None:
        raise ConfigError(
            f"{PATH} packs whole samples in an order of its own, and {name} changes their order or "
            "the tokens that are read of them: enable one of them"
        )
    if any(getattr(section, "epochs", None) is not None for section in config.sections):
        raise ConfigError(
            f"{PATH}: --epochs counts samples, and a step has bins of several: give --train-iters "
            "or --train-samples, the number of bins"
        )
    named = [config.training.length[0] == "tokens" or config.training.tokens_end_the_run]
    named += [unit == "tokens" for unit in config.optimizer.schedule_units("samples")]
    if any(named):
        raise ConfigError(
            f"{PATH}: the tokens of a step are known once its samples are read, and lengths and "
            "rates of this run are in tokens: give --train-iters or --train-samples, and --lr-... "
            "in that unit"
        )
