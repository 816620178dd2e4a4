"""Log-probabilities of a run's answers under a reference model, computed once before training.

The reference model is evaluated in the layout of the run and then freed, so that only one model is
in memory during training. Its log-probabilities are stored in the index cache next to the data,
keyed by the content of the weights and of the answers. A resumed run, or one with another loss,
uses the stored values.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint, nothing_at
from megatron.config import ConfigError, RunConfig
from megatron.config.features import taking_part
from megatron.data.index_cache import IndexCache
from megatron.data.loader import TrainingData
from megatron.engine.environment import training_device
from megatron.engine.loading import load_checkpoint, together
from megatron.families import family_of, spec_of
from megatron.features.evaluation.checkpoints import MadeSamples, measure_samples
from megatron.features.evaluation.evaluator import Evaluator, build_evaluator
from megatron.features.evaluation.scoring import TEXT_SCORES
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.preference.samples import PreferenceDataset
from megatron.model.spec import ModelSpec, training_dtype
from megatron.parallel.mesh import Mesh, any_rank
from megatron.run.run import Run
from megatron.util.digests import digest_of_parts, sha256_of_file
from megatron.util.processes import is_main_process, return_freed_memory
from megatron.util.progress import progress_bar, say

logger = logging.getLogger(__name__)

# Part of each cache key. Increment it whenever the meaning of the log-probabilities changes.
VERSION = 1
_LENGTHS_AT_ONCE = 1000


def add_reference(run: Run, mesh: Mesh, data: TrainingData) -> None:
    """Add the log-probabilities under the reference model to all preferences in the data.
    Collective: every rank must call this. Raises ConfigError if no checkpoint is named,
    CheckpointError if it is unusable, and ValueError if a log-probability is not finite."""
    parts = [part for part in _preferences(data) if part.reference is None]
    if not parts:
        return
    checkpoint, flag = reference_checkpoint(run.config)
    weights = _from_main_process(lambda: weights_digest(checkpoint, _cache(run, parts[0])))
    device = training_device()
    keys = [_depends_on(run.config, weights, part) for part in parts]
    missing = []
    for part, key in zip(parts, keys, strict=True):
        stored = _cache(run, part).find("reference", key)
        if any_rank(stored is None, device):
            missing.append((part, key))
        else:
            assert stored is not None
            part.reference = stored["log_probs"]
    if not missing:
        return
    engine = _reference_model(run.config, checkpoint, mesh)
    for part, key in missing:
        if is_main_process():
            say(
                f"{flag}: log-probabilities of the answers to {len(part.documents)} prompts of "
                f"{part.examples.prefix}, once"
            )
        log_probs = log_probs_of(engine, run, part)
        stored = _cache(run, part).arrays("reference", key, partial(dict, log_probs=log_probs))
        part.reference = stored["log_probs"]
    del engine
    return_freed_memory()


def reference_checkpoint(config: RunConfig) -> tuple[FoundCheckpoint, str]:
    """Return the checkpoint of the reference model, and the flag with its value that names it.
    Raises ConfigError if no flag names one, and CheckpointError if it does not exist."""
    options, preference = config.checkpoint, config.section(PreferenceConfig)
    tag = None
    if preference.reference_checkpoint is not None:
        path, flag = preference.reference_checkpoint, "--reference-checkpoint"
    elif options.pretrained_checkpoint is not None:
        path, flag = options.pretrained_checkpoint, "--pretrained-checkpoint"
    elif options.load is not None and options.finetune:
        path, flag, tag = options.load, "--load", options.load_tag
    else:
        raise ConfigError(
            f"--preference {preference.preference} compares the model with a frozen reference: "
            "give --pretrained-checkpoint, the model that training starts from, or "
            "--reference-checkpoint"
        )
    checkpoint = locate_checkpoint(path, tag)
    if checkpoint is None:
        raise CheckpointError(f"{flag} {path}: {nothing_at(path)}")
    return checkpoint, f"{flag} {path}"


def _reference_model(config: RunConfig, found: FoundCheckpoint, mesh: Mesh) -> Evaluator:
    """Return the reference model with its weights. If a feature changes the form of the base
    weights, load them in that form, with adapters of zero: training starts from this model."""
    spec, form = _base(config)
    engine = build_evaluator(config, spec, mesh, training_device())
    if not form:
        load_checkpoint(engine, found, weights_only=True)
        return engine
    source = together(engine, found.open)
    for feature in taking_part():
        feature.load_base(engine, source)
    return engine


def _base(config: RunConfig) -> tuple[ModelSpec, int]:
    """Return the reference model and the form of its weights, 0 for the checkpoint's own form."""
    spec = spec_of(config.model, config.parallel)
    if config.section(PreferenceConfig).reference_checkpoint is not None:
        return spec, 0
    bases = (feature.base(spec, config) for feature in taking_part())
    return next(filter(None, bases), (spec, 0))


def log_probs_of(engine: Evaluator, run: Run, part: PreferenceDataset) -> npt.NDArray[np.float32]:
    """Return the log-probability of each row's answer, float32 [documents, 2]. Raises ValueError if
    any is not finite."""
    config = run.config
    family = family_of(config.model.family)
    rows = MadeSamples(
        range(2 * len(part.documents)), lambda number: part.rows(number // 2)[number % 2]
    )
    lengths = np.concatenate(
        [
            family.scored_lengths(config, [rows[number] for number in block])
            for block in _blocks(len(rows))
        ]
    )
    collate = partial(family.scored_batch, config, run.tokenizer)
    with progress_bar("reference", total=len(rows), unit=" answers") as bar:
        measured = measure_samples(
            engine,
            rows,
            collate,
            TEXT_SCORES,
            2 * config.training.micro_batch_size,
            lengths,
            lambda done: bar.update(done - bar.n),
        )
    log_probs = measured["log_prob"].reshape(-1, 2).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(log_probs).all(1))
    if len(wrong):
        raise ValueError(
            f"the reference model gives an answer of record {part.documents[wrong[0]]} of "
            f"{part.examples.prefix} the log-probability {log_probs[wrong[0]].tolist()}: its "
            "weights, or their precision, are unusable"
        )
    return log_probs


def _blocks(count: int) -> Iterator[range]:
    for start in range(0, count, _LENGTHS_AT_ONCE):
        yield range(start, min(start + _LENGTHS_AT_ONCE, count))


def _preferences(data: TrainingData) -> list[PreferenceDataset]:
    """Return all preference datasets, also within blends and reordered ones, each once."""
    sets = data.datasets
    waiting: list[Any] = [sets.train, *sets.valid.values(), *sets.test.values()]
    datasets: list[PreferenceDataset] = []
    while waiting:
        samples = waiting.pop(0)
        if isinstance(samples, PreferenceDataset):
            datasets.append(samples)
        elif hasattr(samples, "parts"):
            waiting.extend(samples.parts)
        elif hasattr(samples, "dataset"):
            waiting.append(samples.dataset)
    return list({id(part): part for part in datasets}.values())


def _cache(run: Run, part: PreferenceDataset) -> IndexCache:
    return IndexCache.next_to(part.examples.prefix, run.config.data.data_cache_path)


def _depends_on(config: RunConfig, weights: str, part: PreferenceDataset) -> dict[str, Any]:
    """Return all inputs of the log-probabilities, without the layout: it only affects rounding."""
    return {
        "version": VERSION,
        "weights": weights,
        "model": dataclasses.asdict(config.model.flags()),
        "dtype": str(training_dtype(config)),
        "fp8": vars(config.fast_paths).get("fp8_format"),
        "4 bits": _base(config)[1] or False,  # must match existing caches
        "answers": part.digest,
    }


def weights_digest(found: FoundCheckpoint, cache: IndexCache) -> str:
    """Return a digest of the content of a checkpoint's files. For this project's checkpoints it is
    that of the manifest. Files of other formats are read completely, once per version."""
    folder = found.folder
    manifest = folder / MANIFEST
    if manifest.is_file():
        return digest_of_parts([manifest.read_bytes()])
    files = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else [folder]
    stats = [(path, path.stat()) for path in files]
    state = [[str(path.resolve()), s.st_size, s.st_mtime_ns] for path, s in stats]

    def digest() -> Mapping[str, np.ndarray]:
        parts = [f"{path.relative_to(folder)} {sha256_of_file(path)}\n" for path in files]
        return {"digest": np.frombuffer(bytes.fromhex(digest_of_parts(parts)), np.uint8)}

    stored = cache.arrays("weights", {"version": VERSION, "files": state}, digest)
    return bytes(stored["digest"]).hex()


def _from_main_process(make: Any) -> str:
    """Return the result of ``make`` on the main process, or raise its error, on every rank.
    Collective."""
    result: list[Any] = [None, None]
    if is_main_process():
        try:
            result[0] = make()
        except (ValueError, OSError) as error:
            result[1] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise result[1]
    return result[0]
