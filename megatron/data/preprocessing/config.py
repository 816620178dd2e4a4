"""The flags of preprocessing, and what must hold between them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import ConfigError
from megatron.config.flags import option


@dataclass(frozen=True)
class PreprocessConfig:
    """Preprocessing: which text, and how it is turned into documents."""

    input: tuple[str, ...] = option(())
    """JSON-lines files, plain or packed by gzip or zstd: paths, globs, or folders (every
    *.jsonl and *.json below them, packed or not), in this order."""
    json_keys: tuple[str, ...] = option(("text",), aliases=("--json-key",))
    """Keys of the texts; each makes a dataset of its own."""
    output_prefix: str | None = option(None)
    """PREFIX of the files PREFIX_KEY_document.bin and .idx (PREFIX_KEY_sentence with
    --split-sentences)."""
    append_eod: bool = option(False)
    """End each document with the tokenizer's end-of-document token."""
    split_sentences: bool = option(False)
    """Make each sentence a sequence of its own (BERT, T5)."""
    sentence_splitter: str = option("auto", choices=("auto", "punkt", "rules"))
    """What finds the sentences: NLTK's punkt, a few rules, or punkt where its data is at hand."""
    lang: str = option("english")
    """Language of the text, for --split-sentences."""
    keep_newlines: bool = option(False)
    """Keep line breaks between sentences, at the end of the sentence before."""
    on_bad_line: str = option("error", choices=("error", "skip"))
    """What a malformed line does: stop, or be counted, listed and left out."""
    workers: int | None = option(None, derived="the processors this process may use")
    """Processes that tokenize."""
    chunk_size: int = option(1000)
    """Lines handed to a worker at a time, at most; fewer when they are long."""
    log_interval: int = option(1000)
    """Documents between two progress lines, which come once a second at most."""
    dataset_impl: str = option("mmap", choices=("mmap", "lazy", "cached"))
    """Format of the output; mmap is written whichever is given."""

    def check(self) -> None:
        """Finds what cannot run before anything is read.

        Raises:
            ConfigError: a flag is missing or out of range.
        """
        if not self.input:
            raise ConfigError("--input is missing: the JSON-lines files to read")
        if not self.output_prefix:
            raise ConfigError("--output-prefix is missing: the files PREFIX_KEY_document.bin/.idx")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError(f"--json-keys {' '.join(self.json_keys)} names a key twice")
        for flag, value in (
            ("--workers", self.workers),
            ("--chunk-size", self.chunk_size),
            ("--log-interval", self.log_interval),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value} must be 1 or more")
