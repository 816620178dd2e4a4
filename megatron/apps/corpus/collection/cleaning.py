"""Repair of texts, and removal of documents that are too short or in unwanted languages."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ftfy
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from megatron.apps.corpus.collection.json_files import JsonRecord, RecordStep
from megatron.apps.corpus.collection.line_job import (
    JobReport,
    LineJobConfig,
    json_inputs,
    required,
    run_step,
)
from megatron.apps.corpus.normalization import normalized
from megatron.config import ConfigError, TokenizerConfig
from megatron.config.flags import option
from megatron.tokenizer import build_tokenizer

# `normalized` does the Unicode normalization, in linear time.
_REPAIRS = ftfy.TextFixerConfig(normalization=None, explain=False)
# Characters that may need repair. Lines without them are skipped.
_SUSPICIOUS = re.compile(r"[^\t\n\x20-\x25\x27-\x7e]")
_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")
_CHARACTERS_PER_TOKEN = 16  # far above the average, so that the prefix has more tokens than needed
_LANGUAGE_CHARACTERS = 4000  # number of characters to classify; more would only take longer
FILTERS = ("remove_512", "remove_256_javascript", "remove_512_non_english")
REPAIRS = ("ftfy_fix_text", "general_cleaning")
_LINE_ENDS_AND_RUNS = re.compile(r"(?<=\w)\n+ *| {2,}")
_ENDINGS = re.compile(r"(\.jsonl?)?(\.gz|\.zst)?$")


@dataclass(frozen=True)
class CleanupConfig:
    """Options for cleaning documents."""

    input: tuple[str, ...] = option(())
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    output: str | None = option(None)
    """JSON-lines file to write, compressed if its name ends in .gz or .zst."""
    dropped: str | None = option(None)
    """File for the documents that are left out, with the reason of each under the key "dropped"."""
    text_key: str = option("text")
    """Key of the text in each record."""
    lang: tuple[str, ...] = option(("en",))
    """ISO codes of the languages to keep. any keeps all languages."""
    min_tokens: int = option(128)
    """Minimum number of tokens of a document. Shorter documents are left out. Without
    --tokenizer-type, words and punctuation marks are counted; --vocab-file alone selects GPT-2's
    tokenizer."""
    no_ftfy: bool = option(False)
    """Do not repair texts."""


def cleanup(config: CleanupConfig, tokenizer: TokenizerConfig, running: LineJobConfig) -> JobReport:
    inputs, output = required(config, "input", "output")
    if config.min_tokens < 0:
        raise ConfigError(f"--min-tokens {config.min_tokens} must be 0 or more")
    known = {"any", *LanguageIdentifier.from_model_file(MODEL_FILE).labels}
    for code in config.lang:
        if code not in known:
            raise ConfigError(
                f"--lang {code} is not known; any, or codes among {' '.join(sorted(known))}"
            )
    counting: TokenizerConfig | None = tokenizer
    if tokenizer == TokenizerConfig():
        counting = None
    elif tokenizer.tokenizer_type is None:
        counting = replace(tokenizer, tokenizer_type="GPT2BPETokenizer")
    if counting is not None:
        build_tokenizer(counting)  # report errors before any work is done
    return run_step(
        config,
        running,
        "cleanup_dataset",
        _cleanup_step,
        json_inputs(inputs),
        [output, config.dropped],
        keys=(config.text_key,),
        uses={"tokenizer": counting},
    )


def _cleanup_step(config: CleanupConfig, tokenizer: TokenizerConfig | None) -> RecordStep:
    """Return the step that repairs a text, then checks its language and length."""
    language_of = None if "any" in config.lang else language_finder()
    is_short = short_finder(config.min_tokens, tokenizer)

    def reason_of(text: str) -> str | None:
        if not text.strip():
            return "empty"
        if language_of is not None and (language := language_of(text)) not in config.lang:
            return f"language {language}"
        return "short" if is_short(text) else None

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        before = record.fields[config.text_key]
        text = before if config.no_ftfy else repaired(before)
        reason = reason_of(text)
        if reason is not None:
            counts[f"left out: {reason}"] += 1
            counts[f"characters left out: {reason}"] += len(text)
            if config.dropped:
                yield 1, record.replaced(**{config.text_key: text, "dropped": reason})
            return
        counts["documents written"] += 1
        if text == before:
            yield 0, record.unchanged()
        else:
            counts["texts repaired"] += 1
            yield 0, record.replaced(**{config.text_key: text})

    return step


@functools.cache
def language_finder() -> Callable[[str], str]:
    """Return a function that returns the language code of a text (ISO 639-1 or -3), or "zxx" if the
    text has no words. The model is py3langid's. datatrove's language filter would download
    fastText's."""
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    return lambda text: identifier.classify(text[:_LANGUAGE_CHARACTERS])[0]


def short_finder(min_tokens: int, config: TokenizerConfig | None) -> Callable[[str], bool]:
    """Return a function that returns whether a text has fewer than `min_tokens` tokens. Without a
    tokenizer, words and punctuation marks are counted."""
    if config is None:
        return lambda text: sum(1 for _ in _WORD_OR_MARK.finditer(text)) < min_tokens
    tokenizer = build_tokenizer(config)

    def is_short(text: str) -> bool:
        # The text after the prefix can only change the prefix's last token.
        beginning = text[: _CHARACTERS_PER_TOKEN * min_tokens]
        may_be = len(tokenizer.tokenize(beginning)) <= min_tokens
        return may_be and len(tokenizer.tokenize(text)) < min_tokens

    return is_short


@dataclass(frozen=True)
class FixConfig:
    """Options for filtering and repairing documents."""

    input_files: tuple[str, ...] = option((), aliases=("--input",))
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    tasks: tuple[str, ...] = option(())
    """Filters and repairs to apply. remove_512 drops documents with fewer than 512 characters,
    remove_256_javascript documents with fewer than 256 that contain the word javascript, and
    remove_512_non_english documents with fewer than 512 that are not in English. ftfy_fix_text
    repairs Unicode. general_cleaning replaces runs of spaces, and line breaks within sentences, by
    one space."""
    output_path: str | None = option(None)
    """Folder to write to. Each file NAME.json becomes NAME_cleaned.json and NAME_filtered.json."""
    text_key: str = option("text")
    """Key of the text in each record."""


def fix(config: FixConfig, running: LineJobConfig) -> JobReport:
    """Write two files for each input: the documents that are kept and the removed ones."""
    files, tasks, folder = required(config, "input_files", "tasks", "output_path")
    known = (*FILTERS, *REPAIRS)
    for task in tasks:
        if task not in known:
            raise ConfigError(f"--tasks {task} is unknown; it is among {' '.join(known)}")
    inputs, outputs = json_inputs(files), []
    for path in inputs:
        ending = _ENDINGS.search(path.name)
        assert ending is not None
        stem = path.name[: ending.start()]
        kinds = ("cleaned", "filtered")
        outputs += [Path(folder, f"{stem}_{kind}{ending.group()}") for kind in kinds]
    keys = (config.text_key,)
    tool = "cleanup_fix_dataset"
    return run_step(config, running, tool, _fix_step, inputs, outputs, keys=keys, per_input=True)


def _fix_step(config: FixConfig) -> RecordStep:
    """Return the step that applies the filters, and then the repairs."""
    language_of = language_finder() if "remove_512_non_english" in config.tasks else None
    all_filters: dict[str, Callable[[str], bool]] = {
        "remove_512": lambda text: len(text) < 512,
        "remove_256_javascript": lambda text: len(text) < 256 and "javascript" in text.lower(),
        "remove_512_non_english": lambda text: (
            language_of is not None and len(text) < 512 and language_of(text) != "en"
        ),
    }
    filters = {task: find for task, find in all_filters.items() if task in config.tasks}
    all_repairs = {"ftfy_fix_text": repaired, "general_cleaning": tidied}
    repairs = {task: repair for task, repair in all_repairs.items() if task in config.tasks}

    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        before = text = record.fields[config.text_key]
        removed_by = next((task for task, find in filters.items() if find(text)), None)
        if removed_by:
            counts[f"left out: {removed_by}"] += 1
            yield 1, record.unchanged()
            return
        for task, repair in repairs.items():
            unrepaired, text = text, repair(text)
            if text != unrepaired:
                counts[f"texts changed: {task}"] += 1
        counts["documents written"] += 1
        same = text == before
        yield 0, record.unchanged() if same else record.replaced(**{config.text_key: text})

    return step


def repaired(text: str) -> str:
    """Repair a text line by line, as `ftfy.fix_text` does. Very long runs of combining marks, which
    `normalized` skips, are left unchanged."""
    pieces, done, config = [], 0, _REPAIRS
    while match := _SUSPICIOUS.search(text, done):
        start = text.rfind("\n", done, match.start()) + 1 or done
        end = text.find("\n", match.start()) + 1 or len(text)
        if "<" in text[done:end]:  # HTML may start here, in which entities are intended
            config = config._replace(unescape_html=False)
        pieces += [text[done:start], _repaired_line(text[start:end], config)]
        done = end
    return "".join([*pieces, text[done:]])


def _repaired_line(line: str, config: ftfy.TextFixerConfig) -> str:
    while True:
        decoded = ftfy.fix_text(line, config)
        line = normalized("NFC", decoded)
        if line == decoded:
            return line


def tidied(text: str) -> str:
    """Replace runs of spaces, and line breaks after a letter or digit, by one space."""
    return _LINE_ENDS_AND_RUNS.sub(" ", text)
