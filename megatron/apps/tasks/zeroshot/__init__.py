"""Tasks that need no training: perplexities, and the last words of LAMBADA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.apps.tasks.zeroshot.json_text import JsonText
from megatron.apps.tasks.zeroshot.lambada import Lambada
from megatron.apps.tasks.zeroshot.task import ZeroShotTask
from megatron.apps.tasks.zeroshot.wikitext import WikiText
from megatron.config import ConfigError, ModelConfig
from megatron.families import family_of
from megatron.features.raw_text.flags import RawTextConfig
from megatron.tokenizer import Tokenizer

__all__ = ["TASKS", "ZeroShotTask", "prepare"]

TASKS = ("wikitext", "lambada", "json")
"""What :func:`prepare` knows."""


def prepare(
    task: str,
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    model: ModelConfig,
    overlapping_eval: int,
    strict_lambada: bool,
    *,
    raw: RawTextConfig | None = None,
    most_windows: int | None = None,
    name: str | None = None,
) -> ZeroShotTask:
    """A task of :data:`TASKS` with its files read and tokenized, for models of one shape.

    Args:
        overlapping_eval: tokens from the start of a window of the model's sequence length to that
            of the next; wikitext and json.
        strict_lambada: whole words instead of last tokens; lambada.
        raw: how JSON files are read; by default the key is ``text``.
        most_windows: windows that count at most; json.
        name: of the results, by default the task's.

    Raises:
        OSError, ValueError: a file or a line of it cannot be used, or the model does not continue
            text; the message names it.
    """
    if not family_of(model.family).generates:
        raise ConfigError(
            f"a model of the family {model.family} does not continue text, which {task} measures; "
            "give a checkpoint of a model that does"
        )
    raw, paths = raw or RawTextConfig(), [str(path) for path in files]
    prepared: ZeroShotTask
    if task == "json":
        length = model.seq_length
        prepared = JsonText(paths, raw, tokenizer, length, overlapping_eval, most_windows)
    else:
        if len(paths) != 1:
            raise ConfigError(f"{task} needs one file, and {' '.join(paths) or 'none'} is given")
        if task == "lambada":
            key = raw.eval_text_key or raw.text_key
            longest = model.positions.longest
            prepared = Lambada(paths[0], key, tokenizer, longest, strict_lambada)
        else:
            assert task == "wikitext", task
            prepared = WikiText(paths[0], tokenizer, model.seq_length, overlapping_eval)
    prepared.name = name or prepared.name
    return prepared
