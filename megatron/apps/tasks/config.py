"""Flags of ``tasks/main.py`` in addition to the training flags, with checks of their files and
checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint, nothing_at
from megatron.config import CheckpointConfig, ConfigError
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, SHARE, option
from megatron.training.resume import find_origin

_NAMES = re.compile(r"(?:global_step|iter_|checkpoint-)(\d+)")
"""Pattern for the names of checkpoint folders of this project and DeepSpeed, Megatron, and Hugging
Face."""


INDEX, EVALUATION, FINE_TUNING = "RETRIEVER-INDEX", "RETRIEVER-EVAL", "RET-FINETUNE-NQ"
MATCHES = ("string", "regex")


@dataclass(frozen=True)
class RetrieverTaskConfig:
    """Retrievers: passages, questions, embeddings."""

    evidence_data_path: str | None = option(None)
    """Tab-separated table of passages: a header "id text title", then one line per passage."""
    embedding_path: str | None = option(None, aliases=("--block-data-path",))
    """File with the passages' embeddings. RETRIEVER-EVAL computes it if it does not exist."""
    qa_data_dev: str | None = option(None)
    """RETRIEVER-EVAL: table of questions. Each line contains a question, a tab, and a list of
    answers."""
    qa_data_test: str | None = option(None)
    """RETRIEVER-EVAL: a second table of questions."""
    ict_load: str | None = option(None)
    """Checkpoint of the retriever, used if --load is not given."""
    indexer_batch_size: int = option(128, bounds=POSITIVE)
    """Passages per forward pass on each data-parallel rank."""
    indexer_log_interval: int = option(1000, bounds=POSITIVE)
    """Number of forward passes between two progress lines while passages are embedded."""
    faiss_match: str = option("string", choices=MATCHES)
    """RETRIEVER-EVAL: when a passage counts as an answer. With string, it must contain the words of
    an answer; with regex, an answer must match it as a regular expression."""
    faiss_topk_retrievals: int = option(100, bounds=POSITIVE)
    """RETRIEVER-EVAL: number of passages to retrieve for each question."""
    faiss_use_gpu: bool = option(
        False, note="the search is exact, by matrix products on the device of the model"
    )
    train_with_neg: bool = option(False)
    """RET-FINETUNE-NQ: also train with the negative passages of each question."""
    train_hard_neg: int = option(0, bounds=NOT_NEGATIVE)
    """RET-FINETUNE-NQ with --train-with-neg: number of hard negative passages per question. If a
    question has fewer, other negative passages are used."""
    val_av_rank_hard_neg: int = option(30, bounds=NOT_NEGATIVE)
    """RET-FINETUNE-NQ: number of hard negative passages per question in evaluations."""
    val_av_rank_other_neg: int = option(30, bounds=NOT_NEGATIVE)
    """RET-FINETUNE-NQ: number of other negative passages per question in evaluations."""
    sample_rate: float = option(1.0, bounds=SHARE)
    """RET-FINETUNE-NQ: fraction of the questions to use, selected at random with --seed."""


@dataclass(frozen=True)
class TaskConfig(RetrieverTaskConfig):
    """Task: the task to evaluate or fine-tune on, and its files."""

    task: str | None = option(None)
    """Name of the task. The tasks are listed below."""
    train_data: tuple[str, ...] = option(())
    """Files or folders to fine-tune on."""
    valid_data: tuple[str, ...] = option(())
    """Files or folders to evaluate on."""
    epochs: int | None = option(None, bounds=NOT_NEGATIVE)
    """Number of epochs to fine-tune for. 0 only evaluates."""
    predictions: str | None = option(
        None, derived="with --epochs 0: predictions_NAME.jsonl next to the checkpoints of --load"
    )
    """Fine-tuning: JSON lines file to write the predictions to. After training, it contains the
    predictions of the best epoch."""
    max_qa_length: int = option(128, bounds=POSITIVE)
    """RACE: maximum number of tokens of a question with one option. Longer ones are truncated."""
    version_2_with_negative: bool = option(False)
    """SQUAD: the data includes questions that their text does not answer (SQuAD 2.0)."""
    null_score_diff_threshold: float = option(0.0)
    """SQUAD with --version-2-with-negative: predict "no answer" if its score exceeds the score of
    the best answer by more than this threshold."""
    doc_stride: int = option(128, bounds=POSITIVE)
    """SQUAD: number of tokens between the starts of consecutive windows of a text that does not fit
    into one sequence."""
    max_query_length: int = option(64, bounds=POSITIVE)
    """SQUAD: maximum number of tokens of a question. Longer questions are truncated."""
    max_answer_length: int = option(30, bounds=POSITIVE)
    """SQUAD: maximum number of tokens of a predicted answer."""
    n_best_size: int = option(20, bounds=POSITIVE)
    """SQUAD: number of best start positions, and of best end positions, to combine in each window.
    Also the number of answers to write per question."""
    keep_last: int | None = option(None, bare=0, bounds=NOT_NEGATIVE)
    """Number of newest checkpoints to keep, in addition to the checkpoint of the best epoch. Older
    ones are deleted. Without a number, the flag keeps an incomplete last batch, which this program
    always does."""
    overlapping_eval: int | None = option(None, derived="32; RAW: --seq-length", bounds=POSITIVE)
    """WIKITEXT103 and RAW: number of tokens between the starts of consecutive windows of
    --seq-length tokens. Every token is scored once, in the first window that contains it."""
    strict_lambada: bool = option(False)
    """LAMBADA: predict every token of the last word, instead of only the last token."""
    eval_micro_batch_size: int | None = option(None, derived="--micro-batch-size", bounds=POSITIVE)
    """Samples per forward pass on each data-parallel rank in evaluations."""
    output: str | None = option(None)
    """JSON file to write the results to."""
    all_iterations: bool = option(False)
    """Evaluate every checkpoint in --load, not only the newest."""


def wanted_checkpoints(
    options: CheckpointConfig, all_iterations: bool
) -> list[FoundCheckpoint | None]:
    """Return the checkpoints to evaluate: the one that the flags select, [None] if no flag selects
    one, or with ``all_iterations`` all checkpoints in ``--load`` in ascending order. Raises
    CheckpointError if no checkpoint is found."""
    if all_iterations:
        return list(checkpoints_in(options))
    origin = find_origin(options)
    if origin is None and options.load:
        raise CheckpointError(
            f"--load {options.load}: {nothing_at(options.load)}; name one to evaluate"
        )
    return [None if origin is None else origin.found]


def checkpoints_in(options: CheckpointConfig) -> list[FoundCheckpoint]:
    """Return all complete checkpoints in the folder ``--load``, by ascending iteration. Raises
    CheckpointError if the folder contains none, or if --load-tag is set."""
    if not options.load:
        raise CheckpointError("--all-iterations needs --load, the folder with the checkpoints")
    if options.load_tag:
        raise CheckpointError(
            f"--load-tag {options.load_tag} contradicts --all-iterations: give one of them"
        )
    load = Path(options.load)
    folders = {}
    for path in load.iterdir() if load.is_dir() else ():
        match = _NAMES.fullmatch(path.name)
        if match is not None and path.is_dir():
            folders[int(match[1])] = path
    checkpoints = [locate_checkpoint(folders[iteration]) for iteration in sorted(folders)]
    complete = [each for each in checkpoints if each is not None]
    if not complete:
        raise CheckpointError(
            f"--all-iterations: --load {load}: {nothing_at(load)}; it must be the folder of a run, "
            "with folders such as global_step100"
        )
    return complete


def check_inputs(flag: str, paths: Sequence[str | Path], folders: bool = False) -> None:
    """Raise ConfigError if one of a flag's paths does not exist or is a folder. With ``folders``,
    each path must be a folder instead."""
    kind = "folder" if folders else "file"
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"{flag} {path} does not exist; name a {kind}")
        if folders and not path.is_dir():
            raise ConfigError(f"{flag} {path} is a file; name a folder")
        if not folders and path.is_dir():
            names = sorted(child.name for child in path.iterdir() if child.is_file())
            inside = f" in it, such as {names[0]}" if names else ""
            raise ConfigError(f"{flag} {path} is a folder; name a file{inside}")
