"""The flags of ``tasks/main.py`` besides those of training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, option


@dataclass(frozen=True)
class TaskConfig:
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
        None, derived="with --epochs 0: predictions_NAME.jsonl beside the checkpoints of --load"
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
