"""``tools/retro/evaluate.py``: perplexity with and without neighbours, and as a function of overlap
with neighbours."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.pictures.run_curves import Panel, RunCurve, draw_panels
from megatron.apps.retro.perplexity import (
    NEIGHBORS,
    ChunkScores,
    EvaluatedText,
    Neighbors,
    between,
    filtered,
    measure_chunks,
    overlaps,
    scores_by_dataset,
    scores_of,
)
from megatron.apps.retro.preprocessing import project_run
from megatron.apps.retro.query import check_model, gpt_samples
from megatron.apps.tasks.report import EvaluatedModel, ModelResults, TaskResult, finish, ruled
from megatron.config import ConfigError, ModelConfig
from megatron.config.flags import POSITIVE, option
from megatron.config.output import check_output
from megatron.data.sources import PARTS
from megatron.engine.train_engine import ModelEngine
from megatron.families import family_of
from megatron.features.evaluation.checkpoints import opened_checkpoint
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.project import RetroProject, project_of
from megatron.run.run import Run, RunToolParser, start_processes
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process
from megatron.util.progress import move_to, progress_bar, say

_SHARES = tuple(n / 8 for n in range(9))
"""Upper limits on the fraction of a chunk that also occurs in its neighbours."""
_RETRIEVED = 2
"""Number of chunks of text per neighbour that are used to measure overlap, whatever the model
reads: the neighbour and its continuation, as in the paper."""
Details = Mapping[str, Any]
"""Results of a model by dataset and by overlap, as JSON values (:func:`_details`)."""


@dataclass(frozen=True)
class RetrievalEvaluationConfig:
    """Evaluation of a model with and without retrieval."""

    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Folder of the project with the samples and their neighbours."""
    part: str = option("valid", choices=PARTS)
    """Split to evaluate: training, validation or test samples."""
    samples: int | None = option(None, derived="all that have neighbours", bounds=POSITIVE)
    """Number of samples to evaluate, starting with the first."""
    neighbors: str | None = option(None, derived="own,none,shuffled; of a GPT none")
    """Neighbours that the model reads, separated by commas: own (those of the chunk), none (without
    retrieval), shuffled (those of another chunk)."""
    leakage_neighbors: int = option(10, bounds=POSITIVE)
    """Number of nearest neighbours to compare a chunk with when measuring overlap."""
    compare: tuple[str, ...] = option(())
    """Results of other models on the same samples to include in the tables and figure, as NAME=FILE
    ... with files that --output wrote."""
    output: str | None = option(None)
    """JSON file to write the results to."""
    figure: str | None = option(None)
    """PNG file for curves over the fraction of a chunk that also occurs in its neighbours."""


def run_evaluation(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Run the evaluation that the command line describes, on all ranks of its layout. Raises
    ValueError or OSError, naming the flag, file or checkpoint, if one cannot be used."""
    options, settings = RunToolParser(RetrievalEvaluationConfig, description).parse(argv)
    if options.retro_project_dir is None:
        raise ConfigError("missing --retro-project-dir: the folder of the samples' neighbours")
    for flag, path in (("--output", options.output), ("--figure", options.figure)):
        check_output(flag, path)
    others = _others(options.compare)
    processes = start_processes(settings, argv)
    project = project_of(settings, options.retro_project_dir)
    with opened_checkpoint(
        settings, processes, "an evaluation of retrieval", watched=True
    ) as opened:
        model = opened.engine.config.model
        kinds = _kinds_of_neighbors(options.neighbors, model)
        run = project_run(project)
        check_model(model, opened.run.tokenizer, project)
        _check_length(model, project)
        text = _evaluated_text(project, run, options.part, options.samples)
        if kinds != ["none"]:
            check_kept(text, model, project)
        overlap_N = overlaps(text, options.leakage_neighbors, _RETRIEVED).ravel()
        _check_same_chunks(others, filtered(overlap_N, _SHARES))
        results, scores = _measured(opened.engine, run, text, kinds)
        if not is_main_process():
            return
        details = {name: _details(text, overlap_N, each) for name, each in scores.items()}
        evaluated = EvaluatedModel.of(opened.engine.config, opened.folder, opened.iteration)
        results = [replace(result, details=details[result.name]) for result in results]
        finish([ModelResults(evaluated, results)], options.output, None)
        _report({**others, **details}, details, options.figure)


def _kinds_of_neighbors(given: str | None, model: ModelConfig) -> list[Neighbors]:
    """Return the kinds of neighbours that the flag lists. Raises ConfigError if a kind is unknown,
    or if the model does not use retrieval."""
    reads = model.part(RetrievalConfig).retro_add_retriever
    if given is None:
        return list(NEIGHBORS) if reads else ["none"]
    words = [word.strip() for word in given.split(",")]
    kinds = [kind for word in words for kind in NEIGHBORS if kind == word]
    if len(kinds) < len(words):
        raise ConfigError(f"--neighbors {given}: expected some of {', '.join(NEIGHBORS)}")
    if not reads and kinds != ["none"]:
        raise ConfigError(
            f"--neighbors {given}: the model is a {model.family}, which reads no neighbours; give "
            "none, or the checkpoint of a Retro"
        )
    return kinds


def _check_length(model: ModelConfig, project: RetroProject) -> None:
    longest = model.positions.longest
    if longest is not None and project.seq_length > longest:
        raise ConfigError(
            f"samples of {project.config_file} have {project.seq_length} tokens, and the model has "
            f"{longest} positions: make the project again with a shorter "
            "--retro-gpt-seq-length, or name another checkpoint"
        )


def _evaluated_text(project: RetroProject, run: Run, part: str, most: int | None) -> EvaluatedText:
    """Return the samples of a split, at most ``most``, and their neighbours. Raises ValueError or
    OSError if files are missing or cannot be read."""
    table, samples = project.neighbors(part), gpt_samples(run).get(part)
    if samples is None:
        raise ConfigError(f"{project.config_file} has no samples for --part {part}")
    count = min(samples.count, len(table))
    count = count if most is None else min(count, most)
    numbers_ILQ = np.stack([table.rows(sample) for sample in range(count)])
    return EvaluatedText(samples.samples, numbers_ILQ, project.database(run.tokenizer.eod))


def check_kept(text: EvaluatedText, model: ModelConfig, project: RetroProject) -> None:
    """Raise ConfigError if the files contain fewer neighbours per chunk than the model reads."""
    kept, read = text.numbers_ILQ.shape[-1], model.part(RetrievalConfig).retro_num_neighbors
    if kept < read:
        raise ConfigError(
            f"--retro-project-dir {project.folder} has {kept} neighbours of each chunk, and the "
            f"model reads {read}: run query-neighbors again with a larger "
            "--retro-query-num-neighbors-save, or give --neighbors none"
        )


def _measured(
    engine: ModelEngine, run: Run, text: EvaluatedText, kinds: Sequence[Neighbors]
) -> tuple[list[TaskResult], dict[str, ChunkScores]]:
    tokenizer, training = run.tokenizer, engine.config.training
    collate = family_of("gpt").data(run.config, tokenizer).collator()
    bytes_V = token_lengths(tokenizer.token_bytes, tokenizer.special_tokens)
    reads = engine.config.model.part(RetrievalConfig).retro_add_retriever
    results, scores = [], {}
    for kind in kinds:
        name = f"neighbours {kind}" if reads else "no retrieval"
        started = time.perf_counter()
        with progress_bar(name, total=len(text), unit=" samples") as bar:
            size, seed, progress = training.micro_batch_size, training.seed, partial(move_to, bar)
            log_prob_IP = measure_chunks(engine, collate, text, kind, size, seed, progress)
        scores[name] = score = scores_of(text, log_prob_IP, bytes_V)
        metrics = {
            "loss": score.loss,
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
        }
        tokens, seconds = int(score.tokens_N.sum()), time.perf_counter() - started
        results.append(TaskResult(name, metrics, len(text), tokens, seconds))
    return results, scores


def token_lengths(token_bytes: Sequence[bytes], special: frozenset[int]) -> npt.NDArray[np.int64]:
    """Return the text bytes of each token of a vocabulary, [V]. Special tokens have 0."""
    return np.array(
        [0 if token in special else len(each) for token, each in enumerate(token_bytes)], np.int64
    )


def _details(
    text: EvaluatedText, overlap_N: npt.NDArray[np.float64], scores: ChunkScores
) -> dict[str, Any]:
    """Return a model's results by dataset and by overlap, as JSON values; null where there are no
    chunks."""

    def by_share(masks: Sequence[npt.NDArray[np.bool_]], metric: str) -> dict[str, Any]:
        values = [getattr(scores.part(mask_N), metric) for mask_N in masks]
        finite = [value if math.isfinite(value) else None for value in values]
        return {"shares": list(_SHARES), "chunks": _counts(masks), "values": finite}

    return {
        "datasets": {
            dataset: {
                "loss": each.loss,
                "perplexity": each.perplexity,
                "tokens": int(each.tokens_N.sum()),
            }
            for dataset, each in scores_by_dataset(text, scores).items()
        },
        "filtered": by_share(filtered(overlap_N, _SHARES), "bits_per_byte"),
        "by_overlap": by_share(between(overlap_N, _SHARES), "perplexity"),
    }


def _counts(masks: Sequence[npt.NDArray[np.bool_]]) -> list[int]:
    return [int(mask_N.sum()) for mask_N in masks]


def _report(models: Mapping[str, Details], new: Mapping[str, Details], figure: str | None) -> None:
    """Print tables of all models and of the new results by dataset, and draw the curves."""
    datasets = next(iter(new.values()))["datasets"]
    if len(datasets) > 1:
        rows = [("dataset", "tokens", *new)]
        for name, numbers in datasets.items():
            shown = (f"{each['datasets'][name]['perplexity']:.5g}" for each in new.values())
            rows.append((name, f"{numbers['tokens']:,}", *shown))
        say(f"\nperplexity by dataset\n{ruled(rows, texts=1)}")
    say(
        "\nbits per byte of chunks of which at most a share is in their neighbours\n"
        f"{_overlap_table(models, 'filtered')}"
    )
    say(
        "\nperplexity of chunks by the share that is in their neighbours\n"
        f"{_overlap_table(models, 'by_overlap')}"
    )
    if figure is not None:
        panels = [
            Panel("bits per byte, at most this share", _curves(models, "filtered")),
            Panel("perplexity, about this share", _curves(models, "by_overlap")),
        ]
        draw_panels(panels, Path(figure), "share of a chunk that is in its neighbours")
        say(f"curves: {figure}")


def _overlap_table(models: Mapping[str, Details], what: str) -> str:
    """Return a table with a row for each overlap limit and a column for each model."""
    first = next(iter(models.values()))[what]
    rows = [("share", "chunks", *models)]
    for place, (share, chunks) in enumerate(zip(first["shares"], first["chunks"], strict=True)):
        values = (each[what]["values"][place] for each in models.values())
        shown = ("" if value is None else f"{value:.5g}" for value in values)
        rows.append((f"{share:.3f}", f"{chunks:,}", *shown))
    return ruled(rows)


def _curves(models: Mapping[str, Details], what: str) -> list[RunCurve]:
    curves = []
    for name, each in models.items():
        pairs = zip(each[what]["shares"], each[what]["values"], strict=True)
        points = [(share, value) for share, value in pairs if value is not None]
        if points:
            shares, values = zip(*points, strict=True)
            curves.append(RunCurve(name, list(shares), list(values)))
    return curves


def _check_same_chunks(
    others: Mapping[str, Details], masks: Sequence[npt.NDArray[np.bool_]]
) -> None:
    for name, each in others.items():
        if each["filtered"]["chunks"] != _counts(masks):
            raise ConfigError(
                f"--compare {name}: its chunks are not those of this evaluation; evaluate both "
                "with the same --retro-project-dir, --part, --samples and --leakage-neighbors"
            )


def _others(flags: Sequence[str]) -> dict[str, Details]:
    """Return the results in the files of ``--compare``, by model name and, if a file has several
    results, by kind of neighbours."""
    others: dict[str, Details] = {}
    for flag in flags:
        name, equals, path = flag.partition("=")
        if not equals:
            raise ConfigError(f"--compare {flag}: expected NAME=FILE")
        try:
            content = parse_json(Path(path).read_bytes(), path, lenient=True)
            tasks = content["evaluations"][0]["tasks"]
            for task, numbers in tasks.items():
                several = f"{name}, {task}" if len(tasks) > 1 else name
                others[several] = {what: dict(numbers[what]) for what in ("filtered", "by_overlap")}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ConfigError(
                f"--compare {flag}: {path} is not a file of tools/retro/evaluate.py --output"
            ) from None
    return others
