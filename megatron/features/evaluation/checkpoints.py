"""Evaluation of checkpoints outside training, and measures computed for each sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import nothing_at, tokenizer_in
from megatron.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    OptimizerFlags,
    Setting,
    Settings,
    TokenizerConfig,
    TrainingFlags,
)
from megatron.config.features import taking_part
from megatron.config.flags import build
from megatron.data.samples import Piece, SampleDataset
from megatron.data.texts import ScoredText
from megatron.engine.environment import training_device
from megatron.engine.loading import load_checkpoint
from megatron.engine.train_engine import ModelEngine
from megatron.families import family_of, spec_of
from megatron.features.evaluation.evaluator import build_evaluator
from megatron.features.evaluation.scoring import TEXT_SCORES
from megatron.formats.generation_settings import end_tokens
from megatron.model.spec import Batch, Measure
from megatron.parallel.meeting import run_meeting
from megatron.parallel.mesh import Group
from megatron.run.process import connected
from megatron.run.run import Run, run_of, show_configuration
from megatron.tokenizer import Tokenizer
from megatron.training.resume import find_origin
from megatron.util.processes import is_main_process, return_freed_memory
from megatron.util.progress import say

MICRO_BATCH_SIZE = 8
"""Default micro batch size. Results do not depend on it."""

Sample = TypeVar("Sample")

_OWN = "this program"
_FOR_TRAINING = (OptimizerFlags, TrainingFlags, DataConfig)
_USED = {
    *("micro_batch_size", "eval_batch_size", "eval_seq_length", "eval_iters", "seed"),
    "explain_config",
}
_SAVING = {
    *("save", "save_interval", "save_init", "keep_every", "async_save", "save_universal"),
    *("checkpoint_format", "save_optim", "save_rng"),
}


class MadeSamples(Generic[Sample]):
    """Dataset that creates each sample by calling ``make`` on an item of a list when it is read.
    Its samples have no origin in an indexed file."""

    def __init__(self, items: Sequence[Any], make: Callable[[Any], Sample]) -> None:
        self.items, self.make = items, make

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int, /) -> Sample:
        return self.make(self.items[index])

    def origin(self, index: int, /) -> Sequence[Piece]:
        return ()


@dataclass(frozen=True)
class Opened:
    """Opened checkpoint: its run, model and folder, and the tokens ``ends`` that end a text."""

    run: Run
    engine: ModelEngine
    folder: Path
    iteration: int | None
    ends: frozenset[int]


@contextmanager
def opened_checkpoint(
    settings: Settings, processes: int, what: str, watched: bool = False
) -> Iterator[Opened]:
    """Open the checkpoint of ``--load`` for evaluation, in the parallel layout of the flags, until
    the block ends. ``what`` describes the program ("an evaluation") in a note about unused training
    flags. With ``watched``, a watchdog ends the process if it hangs; do not use it if users may
    keep the program waiting. Raises ConfigError, CheckpointError or OSError if opening fails."""
    used, unused = evaluation_settings(checkpoint_settings(settings))
    run = evaluated_run(used, processes)
    show_configuration(run)
    notes = list(run.resolved.notes)
    if unused:
        notes.append(f"{what} does not use {', '.join(unused)}")
    origin = find_origin(run.config.checkpoint)
    if origin is None:
        named = run.config.checkpoint.load
        where = f"--load {named}: {nothing_at(named)}" if named else "--load is missing"
        raise CheckpointError(f"{where}; name one")
    with connected(run, watched=watched) as mesh:
        for feature in taking_part():
            feature.check_run(run, mesh, training_device())
        run_meeting().compare_checkpoints([origin.found])
        spec = spec_of(run.config.model, run.config.parallel)
        engine = build_evaluator(run.config, spec, mesh, training_device())
        source = load_checkpoint(engine, origin.found, weights_only=True)
        for feature in taking_part():
            feature.check_weights(source.model, run.config.model, str(source.folder))
        for note in (*notes, *source.notes) if is_main_process() else ():
            say(note)
        folder, iteration = source.folder, source.state.get("iteration")
        ends = end_tokens(run.tokenizer, source.generation)
        del source  # also closes its memory-mapped files
        return_freed_memory()
        yield Opened(run, engine, folder, iteration, ends)


def evaluated_run(settings: Settings, processes: int) -> Run:
    """Call :func:`run_of`. If the run's tokenizer files no longer exist and no flag names others,
    use the tokenizer in the checkpoint's folder."""
    try:
        return run_of(settings, processes)
    except FileNotFoundError:
        origin = find_origin(build(CheckpointConfig, settings))
        named = {field.name for field in dataclasses.fields(TokenizerConfig)} & settings.keys()
        folder = None if origin is None else tokenizer_in(origin.found.folder)
        if origin is None or named or folder is None:
            raise
        values = {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(folder)}
        own = {name: Setting(value, origin.flag) for name, value in values.items()}
        return run_of(settings | own, processes)


def checkpoint_settings(settings: Settings) -> Settings:
    """Add the checkpoint's model family to the settings. Unless flags describe a model, also take
    the model and tokenizer from the checkpoint. Raises ConfigError if there is neither model nor
    checkpoint, and CheckpointError if the checkpoint does not exist or is incomplete."""
    options = build(CheckpointConfig, settings)
    origin = find_origin(options)
    if origin is not None and "family" not in settings:
        family = origin.found.family
        settings = settings | {"family": Setting(family, origin.flag)}
    if {"num_layers", "encoder_num_layers", "use_checkpoint_args"} & settings.keys():
        return settings
    if origin is None:
        load = options.load
        where = f"--load {load}: {nothing_at(load)};" if load else "--load is missing:"
        raise ConfigError(f"{where} name a checkpoint, or describe a model with --num-layers")
    return settings | {"use_checkpoint_args": Setting(True, _OWN)}


def evaluation_settings(
    settings: Settings, micro_batch_size: int | None = None
) -> tuple[Settings, list[str]]:
    """Return the settings for an evaluation, and the given flags that it ignores: those for
    training, its data and its outputs. ``micro_batch_size`` is the value of
    ``--eval-micro-batch-size``."""
    classes = list[type](_FOR_TRAINING)
    for feature in taking_part():
        classes += feature.training_flags
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    dropped = (fields | _SAVING) - _USED
    unused = {name: setting for name, setting in settings.items() if name in dropped}
    kept = {name: setting for name, setting in settings.items() if name not in unused}
    if micro_batch_size is not None:
        kept["micro_batch_size"] = Setting(micro_batch_size, "flag --eval-micro-batch-size")
    elif "micro_batch_size" not in kept:
        kept["micro_batch_size"] = kept.get("eval_batch_size", Setting(MICRO_BATCH_SIZE, _OWN))
    kept["eval_batch_size"] = kept["micro_batch_size"]
    kept["skip_train"] = Setting(True, _OWN)
    if "deepspeed_config" not in kept:
        # From stage 1 on, models in half precision have no float32 copy of their weights.
        kept.setdefault("zero_stage", Setting(1, _OWN))
    origins = (setting.origin for setting in unused.values())
    return kept, [o.removeprefix("flag ") for o in origins if o.startswith("flag ")]


ROUNDS = 8
"""Number of micro batches per rank and pipeline stage in one call of the engine. The pipeline fills
and drains once per call, and progress is reported after each call."""

MULTIPLE = 8
"""Divisor of padded sequence lengths on GPUs, for few distinct shapes and fast kernels."""

WASTE = 1.125
"""Maximum ratio of a batch's padded length to what its own samples need, if a pipeline requires one
shape for several batches."""

Length = int | tuple[int, ...]


class Round(NamedTuple):
    """One micro batch for every data-parallel rank: sample indices [D, B], where the last sample
    fills up missing ones, and the padded sequence length, if samples have lengths."""

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
    """Compute a measure for every sample of a dataset. Return its values by name, float64 [n] or
    [n, K], in the dataset's order, the same on every rank. Collective: every rank must call it.

    Args:
        collate: function that builds a batch from a list of samples.
        measure: measure with ``per_sample``.
        micro_batch_size: maximum number of samples per batch.
        lengths: length of every sample, [n], or [n, 2] for encoder and decoder. Samples of similar
            length then share a batch, and ``collate`` is called with the samples and the padded
            length, an int or a pair. Without lengths all batches must have one shape.
        progress: called at intervals with the number of measured samples.
    """
    assert measure.per_sample
    count, done = len(dataset), 0
    values: npt.NDArray[np.float64] | None = None
    for rounds in _runs(engine, count, micro_batch_size, lengths):
        batches = _batches(dataset, collate, rounds, engine.mesh.samples.rank)
        rows = rows_of(engine, batches, len(rounds), measure).numpy()
        if values is None:
            values = np.zeros((count, *rows.shape[3:]))
        # [rounds, D, B], as in ``rows``. Repeats of a sample have equal values.
        numbers = np.stack([each.samples for each in rounds])
        values[numbers] = rows.swapaxes(0, 1)
        done += numbers.size
        if progress is not None:
            progress(min(done, count))
    if values is None:
        return {name: np.zeros(0) for name in measure.names}
    return dict(zip(measure.names, np.moveaxis(values, 1, 0), strict=True))


def rows_of(engine: ModelEngine, batches: Iterator[Batch], count: int, measure: Measure) -> Tensor:
    """Measure ``count`` batches on each of D data-parallel ranks. Return the N values of each
    sample on the CPU, float64 [D, ``count``, B, N] or [D, ``count``, B, N, K], the same on every
    rank. All batches must have the same number of samples, B. Collective."""
    measured = engine.measured(batches, count, measure)
    own = torch.stack(measured) if measured else torch.zeros((), device=engine.device).double()
    own, ranks = _from_last_stage(own, engine.mesh.pipeline), engine.mesh.samples
    if ranks.size == 1:
        return own[None].cpu()
    parts = [torch.empty_like(own) for _ in range(ranks.size)]
    dist.all_gather(parts, own.contiguous(), group=ranks.handle)
    return torch.stack(parts).cpu()


_DIMENSIONS = 4


def _from_last_stage(rows: Tensor, pipeline: Group) -> Tensor:
    """Broadcast the last pipeline stage's rows to all stages. Other stages pass a scalar."""
    if pipeline.size == 1:
        return rows
    shape = torch.zeros(_DIMENSIONS, dtype=torch.int64, device=rows.device)
    shape[: rows.dim()] = torch.tensor(rows.shape, device=rows.device)
    dist.all_reduce(shape, op=dist.ReduceOp.MAX, group=pipeline.handle)
    if not rows.dim():
        rows = rows.new_zeros([size for size in shape.tolist() if size])
    dist.all_reduce(rows, group=pipeline.handle)
    return rows


def measure_texts(
    engine: ModelEngine,
    tokenizer: Tokenizer,
    texts: Sequence[ScoredText],
    micro_batch_size: int,
    progress: Callable[[int], object] | None = None,
    measure: Measure = TEXT_SCORES,
) -> dict[str, npt.NDArray[np.float64]]:
    """Score the continuation of every text. Return ``log_prob`` and ``correct``, [n] each. With
    CHOICE_SCORES as ``measure``, they are [n, K] for texts with K choices. Collective: every rank
    must call it. Raises ConfigError if the model's family does not predict text, and ValueError if
    a text exceeds the model's positions."""
    config = engine.config
    family = family_of(config.model.family)
    lengths = family.scored_lengths(config, texts)
    collate = partial(family.scored_batch, config, tokenizer)
    return measure_samples(engine, texts, collate, measure, micro_batch_size, lengths, progress)


def _runs(engine: ModelEngine, count: int, size: int, lengths: Any = None) -> Iterator[list[Round]]:
    """Yield lists of rounds, each for one call of the engine."""
    mesh, divisor = engine.mesh, engine.config.parallel.length_divisor
    multiple = divisor if engine.device.type == "cpu" else int(np.lcm(MULTIPLE, divisor))
    if count:
        # Keep the number of batches, but reduce their size if that leaves fewer repeated samples.
        batches = -(-count // (mesh.samples.size * size))
        size = -(-count // (mesh.samples.size * batches))
    rounds = _rounds(count, mesh.samples.size, size, lengths, multiple)
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
    """Yield rounds, starting with the longest samples, so that a lack of memory shows at once."""
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
    """Return whether samples with the padded length ``own`` may be padded to ``shared``."""
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
