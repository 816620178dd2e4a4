"""Retriever tasks: embed passages, and measure how often the nearest answer a question."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.apps.tasks.config import INDEX, TaskConfig, check_inputs, wanted_checkpoints
from megatron.apps.tasks.report import EvaluatedModel, ModelResults, TaskResult, finish
from megatron.apps.tasks.retrieval.matching import (
    EvidencePassage,
    EvidenceQuestion,
    hits,
    read_passages,
    read_questions,
)
from megatron.apps.tasks.retrieval.vectors import (
    PassageEncoder,
    Vectors,
    embed,
    identity,
    load_vectors,
    nearest,
    opened_encoder,
    save_vectors,
)
from megatron.checkpoint.source import FoundCheckpoint
from megatron.config import ConfigError, Settings
from megatron.config.output import check_output
from megatron.engine.environment import training_device
from megatron.features.evaluation.checkpoints import evaluation_settings
from megatron.features.retrieval.flags import FAMILY, BiencoderConfig
from megatron.parallel.meeting import run_meeting
from megatron.parallel.mesh import Mesh
from megatron.run.process import connected
from megatron.run.run import Run, run_of, show_configuration
from megatron.util.processes import is_main_process
from megatron.util.progress import say

DEFAULT_ACCURACIES = (1, 5, 20, 100)


def run_retriever(config: TaskConfig, settings: Settings, processes: int) -> None:
    """Compute the embeddings of passages and, except for RETRIEVER-INDEX, evaluate the retriever on
    questions. See :data:`megatron.apps.tasks.command.TaskFunction`."""
    task, evidence, embeddings = config.task, config.evidence_data_path, config.embedding_path
    tables = {"--qa-data-dev": config.qa_data_dev, "--qa-data-test": config.qa_data_test}
    named = {flag: path for flag, path in tables.items() if path is not None}
    if evidence is None or embeddings is None:
        missing = "--evidence-data-path" if evidence is None else "--embedding-path"
        raise ConfigError(f"--task {task} needs {missing}")
    if task != INDEX and not named:
        raise ConfigError(f"--task {task} needs --qa-data-dev or --qa-data-test, the questions")
    check_inputs("--evidence-data-path", [evidence])
    check_output("--embedding-path", embeddings)
    check_output("--output", config.output)
    family = settings["family"]
    if family.value != FAMILY:
        raise ConfigError(
            f"--task {task} evaluates a retriever, and {family.origin} has a model of the family "
            f"{family.value}: give --load a checkpoint of pretrain_ict.py"
        )
    questions = {flag: read_questions(flag, path) for flag, path in named.items() if task != INDEX}
    passages = read_passages(evidence)
    used, _ = evaluation_settings(settings, config.eval_micro_batch_size)
    run = run_of(used, processes)
    show_configuration(run)
    with connected(run, config) as mesh:
        (checkpoint,) = wanted_checkpoints(run.config.checkpoint, all_iterations=False)
        if checkpoint is None:
            raise ConfigError(f"--task {task} needs --load, the retriever's checkpoint")
        run_meeting().compare_checkpoints([checkpoint])
        vectors = _vectors_of_passages(config, run, mesh, checkpoint, passages)
        if not questions:
            return
        texts = [question.text for each in questions.values() for question in each]
        with opened_encoder(run, mesh, checkpoint, queries=True) as engine:
            encoder, size = PassageEncoder.of(run), config.indexer_batch_size
            queries = embed(engine, texts, encoder.question, run.tokenizer.pad, size)
        if is_main_process():
            _evaluate(config, run, checkpoint, passages, vectors, questions, queries)


def _vectors_of_passages(
    config: TaskConfig,
    run: Run,
    mesh: Mesh,
    checkpoint: FoundCheckpoint,
    passages: Sequence[EvidencePassage],
) -> Vectors:
    """Return the embeddings in ``--embedding-path``, computing the file if it is missing."""
    assert config.embedding_path is not None and config.evidence_data_path is not None
    path, main = Path(config.embedding_path), is_main_process()
    about = identity(run, checkpoint, config.evidence_data_path)
    if path.exists():
        return load_vectors(path, passages, about)
    every, shown = config.indexer_log_interval, 0

    def progress(batches: int, texts: int) -> None:
        nonlocal shown
        if main and batches // every > shown:
            shown = batches // every
            say(f"Batch {batches:10d} | Total {texts:10d}")

    encoder, began = PassageEncoder.of(run), time.perf_counter()
    with opened_encoder(run, mesh, checkpoint, queries=False) as engine:
        vectors = embed(
            engine,
            passages,
            lambda passage: encoder.passage(passage.title, passage.text),
            run.tokenizer.pad,
            config.indexer_batch_size,
            progress,
        )
    if main:
        save_vectors(path, vectors, passages, about)
        seconds = time.perf_counter() - began
        say(f"{len(vectors)} passages of {vectors.shape[1]} elements in {path}, {seconds:.1f} s")
    return vectors


def _evaluate(
    config: TaskConfig,
    run: Run,
    checkpoint: FoundCheckpoint,
    passages: Sequence[EvidencePassage],
    vectors: Vectors,
    questions: dict[str, list[EvidenceQuestion]],
    queries: Vectors,
) -> None:
    """Print and save, for each table of questions, the fraction of questions that the nearest
    passages answer."""
    most, results, start = min(config.faiss_topk_retrievals, len(passages)), [], 0
    wanted = run.config.model.part(BiencoderConfig).retriever_report_topk_accuracies
    for flag, asked in questions.items():
        began, end = time.perf_counter(), start + len(asked)
        neighbours = nearest(vectors, queries[start:end], most, training_device())
        start = end
        counts = hits(asked, neighbours, passages, config.faiss_match)
        shares = counts / len(asked)
        name = flag.removeprefix("--qa-data-").upper()
        say(f"{name} SET RESULTS")
        say(f"topk-{most} documents hits {counts.tolist()}")
        say(f"top-k documents hits accuracy {np.round(shares, 6).tolist()}")
        chosen = [k for k in wanted or DEFAULT_ACCURACIES if k <= most]
        for k in chosen:
            say(f"top-{k}: {100.0 * shares[k - 1]:.2f}")
        metrics = {f"top{k}_accuracy": float(shares[k - 1]) for k in chosen}
        seconds = time.perf_counter() - began
        results.append(TaskResult(f"NQ {name.lower()}", metrics, len(asked), 0, seconds))
    model = EvaluatedModel.of(run.config, checkpoint.folder, None)
    finish([ModelResults(model, results)], config.output, None)
