#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Learns the vocabulary of a tokenizer from text or JSON-lines files.

python tools/train_tokenizer.py --input 'corpus/*.jsonl' --vocab-size 8000 --output tokenizer
python tools/train_tokenizer.py --tokenizer-type BertWordPieceLowerCase ...
python tools/train_tokenizer.py --tokenizer-type SentencePieceTokenizer --byte-fallback ...
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.apps.corpus.preprocessing.inputs import (
    JSON_ENDINGS,
    LineBatch,
    expand_inputs,
    read_batches,
    total_bytes,
)
from megatron.apps.corpus.progress import Progress
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.config.output import check_output
from megatron.features.raw_text.records import BadLine, long_line, texts_of_line
from megatron.features.tokenizers.train import KINDS, TRAINED_FILES, train_tokenizer
from megatron.util.errors import one_line


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Tokenizer training: which text, and how large a vocabulary."""

    input: tuple[str, ...] = option(())
    """Files, globs or folders, plain or compressed with gzip or zstd. Files that end in .json or
    .jsonl (then .gz or .zst) are JSON lines, others are text. In a folder, *.json, *.jsonl and
    *.txt are read."""
    json_keys: tuple[str, ...] = option(("text",), aliases=("--json-key",))
    """Keys of the texts in JSON lines."""
    vocab_size: int | None = option(None)
    """Number of tokens: characters or bytes and special tokens included."""
    output: str | None = option(None)
    """Folder for the vocabulary (vocab.json and merges.txt, vocab.txt or tokenizer.model) and the
    files of Hugging Face."""
    min_frequency: int = option(2)
    """A pair is merged only when it occurs this often (not with SentencePiece)."""
    tokenizer_type: str = option("GPT2BPETokenizer", choices=tuple(TRAINED_FILES))
    """Kind of tokenizer."""
    tokenizer_model_type: str = option("bpe", choices=KINDS)
    """Kind of SentencePiece model."""
    byte_fallback: bool = option(False)
    """SentencePiece as in Llama 2: text and its spaces stay as they are, digits are tokens of their
    own, and characters outside the vocabulary become bytes; every text can be restored
    exactly."""

    def check(self) -> None:
        for flag, value in (
            ("--input", self.input),
            ("--vocab-size", self.vocab_size),
            ("--output", self.output),
        ):
            if not value:
                raise ConfigError(f"{flag} is missing")


def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_configs((TrainTokenizerConfig,), argv, description=__doc__)
    try:
        train(config)
    except (ValueError, OSError) as error:
        sys.exit(f"train_tokenizer.py: error: {one_line(error)}")


def train(config: TrainTokenizerConfig) -> None:
    config.check()
    assert config.vocab_size is not None and config.output is not None
    paths, output = expand_inputs(config.input, (*JSON_ENDINGS, ".txt")), Path(config.output)
    there = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    check_output("--output", there / output.name)
    start = time.monotonic()
    tokenizer = train_tokenizer(
        config.tokenizer_type,
        lambda: read_texts(paths, config.json_keys),
        config.vocab_size,
        config.min_frequency,
        config.tokenizer_model_type,
        config.byte_fallback,
    )
    tokenizer.save_pretrained(config.output)
    if tokenizer.vocab_size < config.vocab_size:
        limit = f"no more pairs occur {config.min_frequency} times (--min-frequency); "
        limit = "" if config.tokenizer_type == "SentencePieceTokenizer" else limit
        print(
            f"--vocab-size {config.vocab_size:,} is not reached: {limit}give more text or a "
            "smaller size",
            file=sys.stderr,
        )
    files = TRAINED_FILES[config.tokenizer_type]
    print(
        f"{config.output}: {files}, {tokenizer.vocab_size:,} tokens, from {len(paths):,} files in "
        f"{time.monotonic() - start:.1f} seconds"
    )


def read_texts(paths: Sequence[Path], keys: Sequence[str]) -> Iterator[str]:
    """The texts of all files, a bounded part of them at a time; shows progress on stderr."""
    progress = Progress(total_bytes(paths), log_interval=1)
    for batch in read_batches(paths, max_lines=10_000):
        is_json = batch.path.name.removesuffix(".gz").removesuffix(".zst").endswith(JSON_ENDINGS)
        texts = json_texts(batch, keys) if is_json else [plain_text(batch)]
        yield from texts
        progress.update(len(texts), sum(map(len, batch.lines)), batch.position)
    progress.close()
    print(f"read {total_bytes(paths) / 1e6:,.1f} MB; learning from it", file=sys.stderr)


def json_texts(batch: LineBatch, keys: Sequence[str]) -> list[str]:
    texts: list[str] = []
    _check_lengths(batch)
    for number, line in enumerate(batch.lines, batch.first_line):
        if line.isspace():
            continue
        outcome = texts_of_line(line, number, keys)
        if isinstance(outcome, BadLine):
            raise ValueError(
                f"--input {batch.path}, line {number}: {outcome.reason} ({outcome.detail})"
            )
        texts += outcome
    return texts


def _check_lengths(batch: LineBatch) -> None:
    for number, line in enumerate(batch.lines, batch.first_line):
        if found := long_line(line, number):
            raise ValueError(f"--input {batch.path}, line {number}: {found.reason}; divide it")


def plain_text(batch: LineBatch) -> str:
    _check_lengths(batch)
    try:
        return b"".join(batch.lines).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--input {batch.path} is not UTF-8 text, after line {batch.first_line - 1}: {error}"
        ) from None


if __name__ == "__main__":
    main()
