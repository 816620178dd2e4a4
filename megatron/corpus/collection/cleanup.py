"""Repairs texts, and leaves out documents of other languages and short ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import ftfy

from megatron.config import ConfigError, TokenizerConfig
from megatron.config.flags import option
from megatron.corpus.collection.command import json_inputs, required
from megatron.corpus.collection.job import Job, Report, RunConfig, run
from megatron.corpus.collection.languages import check_languages, language_finder
from megatron.corpus.collection.lines import Emit, Mapped, Record, map_records
from megatron.corpus.collection.workers import BatchStep
from megatron.corpus.preprocessing.inputs import LineBatch
from megatron.tokenizer import build_tokenizer

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")
_CHARACTERS_PER_TOKEN = 16
"""More than text has on average by far: a beginning of so many is nearly always enough."""


@dataclass(frozen=True)
class CleanupConfig:
    """Cleaning documents."""

    input: tuple[str, ...] = option(())
    """JSON-lines files, globs or folders, plain or packed by gzip or zstd."""
    output: str | None = option(None)
    """The JSON-lines file to write; .gz or .zst at its end packs it."""
    dropped: str | None = option(None)
    """A file for the documents left out, with the reason under the key "dropped"."""
    text_key: str = option("text")
    """Key of the text."""
    lang: tuple[str, ...] = option(("en",))
    """Languages to keep, by their ISO code; any: all."""
    min_tokens: int = option(128)
    """Leave out documents with fewer tokens. Without --tokenizer-type (or with --vocab-file alone,
    which means GPT-2's) words and punctuation marks are counted in their place."""
    no_ftfy: bool = option(False)
    """Leave the texts as they are."""


@dataclass(frozen=True)
class CleanupStep:
    """Repairs, then asks for the language, then for the length."""

    config: CleanupConfig
    tokenizer: TokenizerConfig | None

    def build(self) -> BatchStep:
        config = self.config
        language_of = None if "any" in config.lang else language_finder()
        is_short = short_finder(config.min_tokens, self.tokenizer)

        def reason_of(text: str) -> str | None:
            if not text.strip():
                return "empty"
            if language_of is not None and (language := language_of(text)) not in config.lang:
                return f"language {language}"
            return "short" if is_short(text) else None

        def step(record: Record, counts: Counter[str]) -> Iterator[Emit]:
            found = record.fields[config.text_key]
            text = found if config.no_ftfy else ftfy.fix_text(found)
            reason = reason_of(text)
            if reason is not None:
                counts[f"left out: {reason}"] += 1
                counts[f"characters left out: {reason}"] += len(text)
                if config.dropped:
                    yield 1, record.replaced(**{config.text_key: text, "dropped": reason})
                return
            counts["documents written"] += 1
            if text == found:
                yield 0, record.unchanged()
            else:
                counts["texts repaired"] += 1
                yield 0, record.replaced(**{config.text_key: text})

        def batch_step(batch: LineBatch) -> Mapped:
            return map_records(batch, (config.text_key,), step, 2 if config.dropped else 1)

        return batch_step


def short_finder(min_tokens: int, config: TokenizerConfig | None) -> Callable[[str], bool]:
    """Whether a text has fewer than `min_tokens` tokens, or words and marks without tokenizer."""
    if config is None:
        return lambda text: sum(1 for _ in _WORD_OR_MARK.finditer(text)) < min_tokens
    tokenizer = build_tokenizer(config)

    def is_short(text: str) -> bool:
        # What follows can change the last word of a beginning, no more: hence the one to spare.
        beginning = text[: _CHARACTERS_PER_TOKEN * min_tokens]
        if len(tokenizer.tokenize(beginning)) > min_tokens:
            return False
        return len(tokenizer.tokenize(text)) < min_tokens

    return is_short


def cleanup(config: CleanupConfig, tokenizer: TokenizerConfig, running: RunConfig) -> Report:
    """Writes the documents that are worth keeping.

    Raises:
        ConfigError: a flag is missing or a language unknown.
        ValueError, OSError: see `job.run`, `build_tokenizer`.
    """
    required(input=config.input, output=config.output)
    assert config.output is not None
    if config.min_tokens < 0:
        raise ConfigError(f"--min-tokens {config.min_tokens} must be 0 or more")
    check_languages(config.lang)
    counting = _counting(tokenizer)
    if counting is not None:
        build_tokenizer(counting)  # what is wrong with it is to be said before anything is read
    outputs = [Path(path) for path in (config.output, config.dropped) if path]
    step = CleanupStep(config, counting)
    job = Job("cleanup_dataset", json_inputs(config.input), outputs, step, settings=asdict(step))
    return run(job, running)


def _counting(config: TokenizerConfig) -> TokenizerConfig | None:
    if config.tokenizer_type is not None:
        return config
    if config == TokenizerConfig():
        return None
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=config.vocab_file,
        merge_file=config.merge_file,
    )
