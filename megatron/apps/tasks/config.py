"""The flags of ``tasks/main.py`` in addition to the training flags, and the files and checkpoints
that they name."""

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
"""Folders of one checkpoint: of this project and DeepSpeed, of Megatron, of Hugging Face."""


INDEX, EVALUATION, FINE_TUNING = "RETRIEVER-INDEX", "RETRIEVER-EVAL", "RET-FINETUNE-NQ"
MATCHES = ("string", "regex")


@dataclass(frozen=True)
class RetrieverTaskConfig:
    """Retrievers: passages, questions, vectors."""

    evidence_data_path: str | None = option(None)
    """Table of passages, with tabs: a line "id text title" and one for each passage."""
    embedding_path: str | None = option(None, aliases=("--block-data-path",))
    """File of the passages' vectors; RETRIEVER-EVAL computes it where it does not exist."""
    qa_data_dev: str | None = option(None)
    """RETRIEVER-EVAL: table of questions, a tab, and the list of their answers."""
    qa_data_test: str | None = option(None)
    """RETRIEVER-EVAL: a second table of questions."""
    ict_load: str | None = option(None)
    """Checkpoint of the retriever, where --load is not given."""
    indexer_batch_size: int = option(128, bounds=POSITIVE)
    """Passages per forward pass of one data-parallel rank."""
    indexer_log_interval: int = option(1000, bounds=POSITIVE)
    """Forward passes between two lines about passages."""
    faiss_match: str = option("string", choices=MATCHES)
    """RETRIEVER-EVAL: a passage answers a question if it contains the words of an answer, or a
    match of it as a regular expression."""
    faiss_topk_retrievals: int = option(100, bounds=POSITIVE)
    """RETRIEVER-EVAL: passages that are retrieved for each question."""
    faiss_use_gpu: bool = option(
        False, note="the search is exact, by matrix products on the device of the model"
    )
    train_with_neg: bool = option(False)
    """RET-FINETUNE-NQ: train with the negative passages of questions, too."""
    train_hard_neg: int = option(0, bounds=NOT_NEGATIVE)
    """RET-FINETUNE-NQ with --train-with-neg: hard negative passages of each question; missing ones
    are replaced by other negative ones."""
    val_av_rank_hard_neg: int = option(30, bounds=NOT_NEGATIVE)
    """RET-FINETUNE-NQ: hard negative passages of each question in evaluations."""
    val_av_rank_other_neg: int = option(30, bounds=NOT_NEGATIVE)
    """RET-FINETUNE-NQ: other negative passages of each question in evaluations."""
    sample_rate: float = option(1.0, bounds=SHARE)
    """RET-FINETUNE-NQ: fraction of the questions that are used, drawn by the seed."""


@dataclass(frozen=True)
class TaskConfig(RetrieverTaskConfig):
    """Task: what is evaluated or fine-tuned, on which files."""

    task: str | None = option(None)
    """Name of the task; the list is below."""
    train_data: tuple[str, ...] = option(())
    """Files or folders to fine-tune on."""
    valid_data: tuple[str, ...] = option(())
    """Files or folders to evaluate on."""
    epochs: int | None = option(None, bounds=NOT_NEGATIVE)
    """Epochs of fine-tuning; 0 evaluates only."""
    predictions: str | None = option(
        None, derived="with --epochs 0: predictions_NAME.jsonl next to the checkpoints of --load"
    )
    """Fine-tuning: file of JSON lines for the predictions, of the best epoch where one is
    trained."""
    max_qa_length: int = option(128, bounds=POSITIVE)
    """RACE: tokens of a question with an option; longer ones are cut."""
    version_2_with_negative: bool = option(False)
    """SQUAD: some questions cannot be answered from their text (SQuAD 2.0)."""
    null_score_diff_threshold: float = option(0.0)
    """SQUAD with --version-2-with-negative: "no answer" is predicted where its score exceeds that
    of the best answer by more."""
    doc_stride: int = option(128, bounds=POSITIVE)
    """SQUAD: a text that is too long is read in windows, each this many tokens after the one before
    it."""
    max_query_length: int = option(64, bounds=POSITIVE)
    """SQUAD: tokens of a question; longer ones are cut."""
    max_answer_length: int = option(30, bounds=POSITIVE)
    """SQUAD: tokens of the longest answer that is predicted."""
    n_best_size: int = option(20, bounds=POSITIVE)
    """SQUAD: starts and ends of each window that are combined, and answers that are written."""
    keep_last: int | None = option(None, bare=0, bounds=NOT_NEGATIVE)
    """Number of newest checkpoints to keep, besides that of the best epoch; older ones are deleted.
    Without a number: keep a last batch that is not full, which is always kept here."""
    overlapping_eval: int | None = option(None, derived="32; RAW: --seq-length", bounds=POSITIVE)
    """WIKITEXT103 and RAW: tokens between the starts of two windows of --seq-length tokens. All
    tokens of the first window count, and of each other one those that no window before it had."""
    strict_lambada: bool = option(False)
    """LAMBADA: predict the whole last word, every token of it, instead of the last token."""
    eval_micro_batch_size: int | None = option(None, derived="--micro-batch-size", bounds=POSITIVE)
    """Samples per forward pass of one data-parallel rank while evaluating."""
    output: str | None = option(None)
    """JSON file for the results."""
    all_iterations: bool = option(False)
    """Evaluate every checkpoint of --load, not only the newest."""


def wanted_checkpoints(
    options: CheckpointConfig, all_iterations: bool
) -> list[FoundCheckpoint | None]:
    """The checkpoint of ``--load``, [None] without a flag that names one, or else all of its
    checkpoints, in the order of their iterations. Raises CheckpointError without any."""
    if all_iterations:
        return list(checkpoints_in(options))
    origin = find_origin(options)
    if origin is None and options.load:
        raise CheckpointError(
            f"--load {options.load}: {nothing_at(options.load)}; name one to evaluate"
        )
    return [None if origin is None else origin.found]


def checkpoints_in(options: CheckpointConfig) -> list[FoundCheckpoint]:
    """Every complete checkpoint of the folder ``--load``, the first iteration first. Raises
    CheckpointError if it has none, or --load-tag chooses one."""
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
    """Raises ConfigError if one of the paths of a flag does not exist or is a folder; with
    ``folders``: is not one."""
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
