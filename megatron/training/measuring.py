"""Numbers of every sample of a data set, on any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.samples import SampleDataset
from megatron.data.texts import ScoredText
from megatron.engine.train_engine import ModelEngine
from megatron.families import family_of
from megatron.model.spec import TEXT_SCORES, Measure
from megatron.tokenizer import Tokenizer

ROUNDS = 8
"""Micro batches of a rank in one run, times the pipeline's stages: a pipeline fills and empties
once in a run, and progress is reported after each."""

MULTIPLE = 8
"""On GPUs padded lengths are multiples of it: few different shapes, with fast kernels."""

WASTE = 1.125
"""How much longer than its own samples need a batch may be, for the one shape of a pipeline's
run."""

Length = int | tuple[int, ...]


class Round(NamedTuple):
    """A micro batch of every data-parallel rank: numbers of samples, [D, B], the last of all
    repeated where there are not enough; and their padded length, if they have lengths."""

    samples: npt.NDArray[np.int64]
    pad_to: Length | None


def measure_samples(
    engine: ModelEngine,
    dataset: SampleDataset[Any] | Sequence[Any],
    collate: Callable[..., Any],
    measure: Measure,
    micro_batch_size: int,
    lengths: Sequence[int] | npt.NDArray[np.int64] | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, npt.NDArray[np.float64]]:
    """A measure's numbers for every sample of a data set, by name: float64 [n] or [n, K] in the
    order of the data set, the same on every rank. Every rank must call it.

    Args:
        collate: makes a batch of a list of samples.
        measure: with ``per_sample``.
        micro_batch_size: most samples of a batch.
        lengths: of every sample, [n], or [n, 2] for encoder and decoder. Samples of similar lengths
            then share a batch, and ``collate`` is called with the samples and the padded length, an
            int or a pair. Without lengths all batches have one shape.
        progress: called with the number of samples that are done, from time to time.
    """
    assert measure.per_sample
    count, done = len(dataset), 0
    found: npt.NDArray[np.float64] | None = None
    for rounds in _runs(engine, count, micro_batch_size, lengths):
        batches = _batches(dataset, collate, rounds, engine.mesh.data.rank)
        rows = engine.rows(batches, len(rounds), measure).numpy()
        if found is None:
            found = np.zeros((count, *rows.shape[3:]))
        # [rounds, D, B], as the rows; a sample that is repeated has the same numbers everywhere.
        numbers = np.stack([each.samples for each in rounds])
        found[numbers] = rows.swapaxes(0, 1)
        done += numbers.size
        if progress is not None:
            progress(min(done, count))
    if found is None:
        return {name: np.zeros(0) for name in measure.names}
    return dict(zip(measure.names, np.moveaxis(found, 1, 0), strict=True))


def measure_texts(
    engine: ModelEngine,
    tokenizer: Tokenizer,
    texts: Sequence[ScoredText],
    micro_batch_size: int,
    progress: Callable[[int], object] | None = None,
    measure: Measure = TEXT_SCORES,
) -> dict[str, npt.NDArray[np.float64]]:
    """The numbers of TEXT_SCORES for every text, [n]: ``log_prob`` and ``correct`` of its
    continuation; those of CHOICE_SCORES, [n, K], where texts have choices. Every rank must call it.
    Raises ConfigError if the model's family does not predict text; ValueError if a text is longer
    than the model's positions."""
    config = engine.config
    family = family_of(config.model.family)
    lengths = family.scored_lengths(config, texts)
    collate = partial(family.scored_batch, config, tokenizer)
    return measure_samples(engine, texts, collate, measure, micro_batch_size, lengths, progress)


def _runs(engine: ModelEngine, count: int, size: int, lengths: Any = None) -> Iterator[list[Round]]:
    """The rounds of a data set, in lists that the engine takes at once."""
    mesh, slices = engine.mesh, 1
    if engine.config.parallel.sequence_parallel:
        slices = mesh.tensor.size
    multiple = slices if engine.device.type == "cpu" else int(np.lcm(MULTIPLE, slices))
    if count:
        # As many batches as that size needs, of one smaller size if fewer are then filled up.
        batches = -(-count // (mesh.data.size * size))
        size = -(-count // (mesh.data.size * batches))
    rounds = _rounds(count, mesh.data.size, size, lengths, multiple)
    run: list[Round] = []
    for each in rounds:
        if run and (
            len(run) == ROUNDS * mesh.pipeline.size
            or (mesh.pipeline.size > 1 and not _fits(each.pad_to, run[0].pad_to))
        ):
            yield run
            run = []
        if run and mesh.pipeline.size > 1:
            each = each._replace(pad_to=run[0].pad_to)
        run.append(each)
    if run:
        yield run


def _rounds(count: int, ranks: int, size: int, lengths: Any, multiple: int) -> Iterator[Round]:
    """The longest samples come first: those for which memory might not suffice."""
    order, table = np.arange(count), None
    if lengths is not None:
        table = np.asarray(lengths).reshape(count, -1)
        order = np.lexsort(table.T[::-1])[::-1]
    for start in range(0, count, ranks * size):
        samples = order[start : start + ranks * size]
        samples = np.pad(samples, (0, ranks * size - len(samples)), mode="edge")
        pad_to: Length | None = None
        if table is not None:
            longest = -(-table[samples].max(0) // multiple) * multiple
            pad_to = int(longest[0]) if len(longest) == 1 else tuple(longest.tolist())
        yield Round(samples.reshape(ranks, size), pad_to)


def _fits(own: Length | None, shared: Length | None) -> bool:
    """Whether samples of a padded length may be padded to another."""
    if own is None or shared is None:
        return True
    pairs = zip(np.atleast_1d(own), np.atleast_1d(shared), strict=True)
    return all(a <= b <= WASTE * a for a, b in pairs)


def _batches(
    dataset: Any, collate: Callable[..., Any], rounds: Sequence[Round], rank: int
) -> Iterator[Any]:
    for samples, pad_to in rounds:
        chosen = [dataset[int(number)] for number in samples[rank]]
        yield collate(chosen) if pad_to is None else collate(chosen, pad_to)
