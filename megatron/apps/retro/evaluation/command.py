"""``tools/retro/evaluate.py``: what retrieval gives a model, and on which chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.evaluation.overlap import (
    ChunkScores,
    ScoresByOverlap,
    between,
    filtered,
)
from megatron.apps.retro.evaluation.perplexity import (
    NEIGHBORS,
    EvaluatedText,
    Neighbors,
    measure_chunks,
    overlaps,
    scores_of,
)
from megatron.apps.retro.evaluation.report import (
    dataset_table,
    draw,
    overlap_table,
    scores_by_dataset,
    with_details,
)
from megatron.apps.retro.gpt_run import project_run
from megatron.apps.retro.gpt_samples import gpt_samples
from megatron.apps.retro.model_check import check_model
from megatron.apps.tasks.report import (
    EvaluatedModel,
    ModelResults,
    TaskResult,
    finish,
)
from megatron.config import ConfigError, ModelConfig
from megatron.config.flags import POSITIVE, option
from megatron.data.sources import PARTS
from megatron.engine.train_engine import ModelEngine
from megatron.families import family_of
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.project import RetroProject
from megatron.features.retro.run_settings import project_of
from megatron.run.folders import check_output
from megatron.run.launch import start_processes
from megatron.run.run import Run, RunToolParser
from megatron.training.evaluation import opened_checkpoint
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

SHARES = tuple(n / 8 for n in range(9))
"""Shares of chunks that are in their neighbours."""
RETRIEVED = 2
"""Chunks of text of a neighbour that are compared, whatever a model reads: with its continuation,
as in the paper."""


@dataclass(frozen=True)
class RetrievalEvaluationConfig:
    """Evaluation of retrieval."""

    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Folder of the project with the samples and their neighbours."""
    part: str = option("valid", choices=PARTS)
    """Samples that are read: those of training, validation or test."""
    samples: int | None = option(None, derived="all that have neighbours", bounds=POSITIVE)
    """How many of them, from the first on."""
    neighbors: str | None = option(None, derived="own,none,shuffled; of a GPT none")
    """What is read beside each chunk, with commas between several: its own neighbours; none,
    without attending to any; or shuffled ones, those of another chunk."""
    leakage_neighbors: int = option(10, bounds=POSITIVE)
    """Nearest neighbours of a chunk that it is compared with, to see what of it they have."""
    compare: tuple[str, ...] = option(())
    """NAME=FILE ...: results of other models on the same samples (--output), for table and
    figure."""
    output: str | None = option(None)
    """JSON file for the results."""
    figure: str | None = option(None)
    """PNG file for curves over the share of chunks that is in their neighbours."""


def run_evaluation(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Evaluates what a command line asks for, on all ranks of its layout. Raises ValueError or
    OSError if a flag, a file or a checkpoint cannot be used; the message names it."""
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
    ) as found:
        model = found.engine.config.model
        wanted = wanted_neighbors(options.neighbors, model)
        run = project_run(project)
        check_model(model, found.run.tokenizer, project)
        _check_length(model, project)
        text = evaluated_text(project, run, options.part, options.samples)
        if wanted != ["none"]:
            check_kept(text, model, project)
        overlap_N = overlaps(text, options.leakage_neighbors, RETRIEVED).ravel()
        _check_same_chunks(others, filtered(overlap_N, {}, SHARES))
        results, scores = _measured(found.engine, run, text, wanted)
        if not is_main_process():
            return
        at_most = filtered(overlap_N, scores, SHARES)
        within = between(overlap_N, scores, SHARES)
        results = [
            with_details(result, at_most, within, scores_by_dataset(text, scores[result.name]))
            for result in results
        ]
        evaluated = EvaluatedModel.of(found.engine.config, found.folder, found.iteration)
        finish([ModelResults(evaluated, results)], options.output, None)
        if len(next(iter(results)).details["datasets"]) > 1:
            say(f"\nperplexity by dataset\n{dataset_table(results)}")
        curves = {**others, **{result.name: result.details for result in results}}
        say(f"\nbits per byte of chunks of which at most a share is in their neighbours\n"
            f"{overlap_table(curves, 'filtered')}")  # fmt: skip
        say(f"\nperplexity of chunks by the share that is in their neighbours\n"
            f"{overlap_table(curves, 'by_overlap')}")  # fmt: skip
        if options.figure is not None:
            draw(curves, Path(options.figure))
            say(f"curves: {options.figure}")


def wanted_neighbors(given: str | None, model: ModelConfig) -> list[Neighbors]:
    """The kinds of neighbours of the flag. Raises ConfigError if one is unknown, or the model reads
    none."""
    reads = model.part(RetrievalConfig).retro_add_retriever
    if given is None:
        return list(NEIGHBORS) if reads else ["none"]
    words = [word.strip() for word in given.split(",")]
    found = [kind for word in words for kind in NEIGHBORS if kind == word]
    if len(found) < len(words):
        raise ConfigError(f"--neighbors {given}: expected some of {', '.join(NEIGHBORS)}")
    if not reads and found != ["none"]:
        raise ConfigError(
            f"--neighbors {given}: the model is a {model.family}, which reads no neighbours; give "
            "none, or the checkpoint of a Retro"
        )
    return found


def _check_length(model: ModelConfig, project: RetroProject) -> None:
    longest = model.positions.longest
    if longest is not None and project.seq_length > longest:
        raise ConfigError(
            f"samples of {project.config_file} have {project.seq_length} tokens, and the model has "
            f"{longest} positions: make the project again with a shorter "
            "--retro-gpt-seq-length, or name another checkpoint"
        )


def evaluated_text(
    project: RetroProject, run: Run, part: str, most: int | None = None
) -> EvaluatedText:
    """The samples of a part and their neighbours, ``most`` of them at most. Raises ValueError or
    OSError if files are missing or cannot be read."""
    table, samples = project.neighbors(part), gpt_samples(run).get(part)
    if samples is None:
        raise ConfigError(f"{project.config_file} has no samples for --part {part}")
    count = min(samples.count, len(table))
    count = count if most is None else min(count, most)
    numbers_ILQ = np.stack([table.rows(sample) for sample in range(count)])
    return EvaluatedText(samples.samples, numbers_ILQ, project.database(run.tokenizer.eod))


def check_kept(text: EvaluatedText, model: ModelConfig, project: RetroProject) -> None:
    """Raises ConfigError if the files have fewer neighbours of a chunk than a model reads."""
    kept, read = text.numbers_ILQ.shape[-1], model.part(RetrievalConfig).retro_num_neighbors
    if kept < read:
        raise ConfigError(
            f"--retro-project-dir {project.folder} has {kept} neighbours of each chunk, and the "
            f"model reads {read}: run query-neighbors again with a larger "
            "--retro-query-num-neighbors-save, or give --neighbors none"
        )


def _measured(
    engine: ModelEngine, run: Run, text: EvaluatedText, wanted: Sequence[Neighbors]
) -> tuple[list[TaskResult], dict[str, ChunkScores]]:
    tokenizer, training = run.tokenizer, engine.config.training
    collate = family_of("gpt").data(run.config, tokenizer).collator()
    bytes_V = token_lengths(tokenizer.token_bytes, tokenizer.special_tokens)
    reads = engine.config.model.part(RetrievalConfig).retro_add_retriever
    results, scores = [], {}
    for kind in wanted:
        name = f"neighbours {kind}" if reads else "no retrieval"
        started = time.perf_counter()
        with progress_bar(name, total=len(text), unit=" samples") as bar:
            done = 0

            def progress(count: int, bar: Any = bar) -> None:
                nonlocal done
                bar.update(count - done)
                done = count

            log_prob_IP = measure_chunks(
                engine, collate, text, kind, training.micro_batch_size, training.seed, progress
            )
        scores[name] = found = scores_of(text, log_prob_IP, bytes_V)
        metrics = {
            "loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
        }
        tokens, seconds = int(found.tokens_N.sum()), time.perf_counter() - started
        results.append(TaskResult(name, metrics, len(text), tokens, seconds))
    return results, scores


def token_lengths(token_bytes: Sequence[bytes], special: frozenset[int]) -> npt.NDArray[np.int64]:
    """Bytes of text of every token of a vocabulary, [V]; special ones have none."""
    return np.array(
        [0 if token in special else len(each) for token, each in enumerate(token_bytes)], np.int64
    )


def _check_same_chunks(others: Mapping[str, Mapping[str, Any]], own: ScoresByOverlap) -> None:
    for name, each in others.items():
        if each["filtered"]["chunks"] != list(own.chunks):
            raise ConfigError(
                f"--compare {name}: its chunks are not those of this evaluation; evaluate both "
                "with the same --retro-project-dir, --part, --samples and --leakage-neighbors"
            )


def _others(flags: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """What ``--compare`` names: numbers by the name of a model and of what it has read."""
    found: dict[str, Mapping[str, Any]] = {}
    for flag in flags:
        name, equals, path = flag.partition("=")
        if not equals:
            raise ConfigError(f"--compare {flag}: expected NAME=FILE")
        try:
            content = parse_json(Path(path).read_bytes(), path, lenient=True)
            tasks = content["evaluations"][0]["tasks"]
            for task, numbers in tasks.items():
                several = f"{name}, {task}" if len(tasks) > 1 else name
                found[several] = {what: dict(numbers[what]) for what in ("filtered", "by_overlap")}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ConfigError(
                f"--compare {flag}: {path} is not a file of tools/retro/evaluate.py --output"
            ) from None
    return found
