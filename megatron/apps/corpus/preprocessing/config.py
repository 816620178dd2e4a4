"""The flags of preprocessing and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import ConfigError
from megatron.config.flags import option

STDIN = "-"


@dataclass(frozen=True)
class PreprocessConfig:
    """Preprocessing: which text, and how it becomes documents."""

    input: tuple[str, ...] = option(())
    """Files, globs or folders, in this order; - is the standard input. JSON lines, a .json file
    that is one array, .txt and .parquet; all but Parquet may be compressed with gzip or zstd. A
    folder stands for every *.jsonl, *.json and *.parquet below it or, without any, every *.txt."""
    input_format: str = option("auto", choices=("auto", "jsonl", "json", "txt", "parquet"))
    """Format of the files; auto decides by their names, and reads other names as JSON lines."""
    txt_documents: str = option("file", choices=("file", "blank-line"))
    """Document of a .txt file: the whole file, or the text between empty lines."""
    json_keys: tuple[str, ...] = option(("text",), aliases=("--json-key", "--jsonl-keys"))
    """Keys (in Parquet files, columns) of the texts; each becomes a separate dataset."""
    output_prefix: str | None = option(None)
    """PREFIX of the files PREFIX_KEY_document.bin and .idx (PREFIX_KEY_sentence with
    --split-sentences). The folder PREFIX.preprocessing keeps unfinished work."""
    append_eod: bool = option(False)
    """End each document with the tokenizer's end-of-document token."""
    split_sentences: bool = option(False)
    """Make each sentence a separate sequence (BERT, T5)."""
    sentence_splitter: str = option("auto", choices=("auto", "punkt", "rules"))
    """What finds the sentences: NLTK's punkt, a few rules, or (auto) punkt where its data is
    installed, else the rules."""
    lang: str = option("english")
    """Language of the text, for --split-sentences."""
    keep_newlines: bool = option(False)
    """Keep line breaks between sentences, at the end of the preceding sentence."""
    on_bad_line: str = option("error", choices=("error", "skip"))
    """What to do with a malformed line: stop with an error, or skip it, count it and list it."""
    max_line_bytes: int = option(1 << 26)
    """A longer line, or document of a .txt file, is malformed; it is not read into memory."""
    workers: int | None = option(None, derived="number of processors that this process may use")
    """Number of processes that tokenize."""
    partitions: int = option(1)
    """Number of parts of the input. They are processed in parallel, each by its share of the
    workers, and then joined. The output does not depend on this number."""
    partition_rank: int | None = option(None)
    """Process only this one of the --partitions, counted from 0, for example on another machine;
    the command without this flag processes the remaining parts and joins all of them."""
    log_interval: int = option(1000)
    """Number of documents between two progress lines, which appear at most once per second."""
    dataset_impl: str = option("mmap", choices=("mmap", "lazy", "cached"))
    """Format of the output; every value writes mmap."""
    chunk_size: int | None = option(None, note="work is handed out by bytes, not lines")
    """Lines handed to a worker at a time."""
    keep_sequential_samples: bool = option(False, note="the input's order is always kept")
    """Keep the order of the input."""

    def check(self) -> None:
        """Checks the flags before anything is read. Raises ConfigError if a flag is missing or out
        of range."""
        if not self.input:
            raise ConfigError("--input is missing: the files to read")
        if not self.output_prefix:
            raise ConfigError("--output-prefix is missing: the files PREFIX_KEY_document.bin/.idx")
        if not self.split_sentences and (self.keep_newlines or self.sentence_splitter != "auto"):
            flag = "--keep-newlines" if self.keep_newlines else "--sentence-splitter"
            raise ConfigError(f"{flag} would change nothing without --split-sentences")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError(f"--json-keys {' '.join(self.json_keys)} names a key twice")
        for flag, value in (
            ("--workers", self.workers),
            ("--partitions", self.partitions),
            ("--max-line-bytes", self.max_line_bytes),
            ("--log-interval", self.log_interval),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value} must be 1 or more")
        self._check_partitions()

    def _check_partitions(self) -> None:
        rank = self.partition_rank
        if rank is not None and not 0 <= rank < self.partitions:
            raise ConfigError(
                f"--partition-rank {rank} is not one of the --partitions {self.partitions}, "
                f"which are 0 to {self.partitions - 1}"
            )
        if STDIN in self.input and self.partitions > 1:
            raise ConfigError(
                f"--partitions {self.partitions} cannot divide the standard input (--input -)"
            )
