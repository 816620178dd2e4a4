#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Checks that indexed datasets (PREFIX.bin and PREFIX.idx) are intact.

    python tools/verify_data.py data/
    python tools/verify_data.py data/corpus_text_document \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt
    python tools/verify_data.py data/ --write-checksums

A folder means all datasets in it. Every length, offset and document boundary is checked, every
token id against the vocabulary (with tokenizer flags, or --vocab-size alone), and the SHA-256 of
both files against PREFIX.sha256 if that exists. --write-checksums writes that file if the dataset
is intact; `sha256sum -c` reads it too.

Exit status: 0 if all is intact; 1 if anything is damaged or missing; 2 if the command line is
wrong.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.apps.corpus.indexed_files import check_dataset, find_prefixes
from megatron.config import FlagParser, TokenizerConfig
from megatron.config.flags import build, option
from megatron.tokenizer import build_tokenizer
from megatron.util.errors import one_line


@dataclass(frozen=True)
class VerifyConfig:
    """Verify: action."""

    write_checksums: bool = option(False)
    """Write or replace PREFIX.sha256 instead of comparing with it."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = FlagParser(VerifyConfig, TokenizerConfig, description=__doc__)
    parser.usage = "%(prog)s PREFIX|FOLDER ... [flags]"
    parser.add_argument("inputs", nargs="+", metavar="PREFIX|FOLDER")
    settings: dict[str, Any] = parser.settings(argv)
    inputs = settings.pop("inputs")
    config: VerifyConfig = build(VerifyConfig, settings)
    try:
        vocab_size = vocabulary(build(TokenizerConfig, settings))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    status = 0
    for entry in inputs:
        try:
            prefixes = find_prefixes([entry])
        except (ValueError, OSError) as error:
            there = any(Path(f"{entry}{ending}").exists() for ending in ("", ".idx", ".bin"))
            what = "damaged" if there else "error"
            print(f"{what}: {one_line(error)}", file=sys.stderr)
            status = 1
            continue
        for prefix in prefixes:
            status |= verify(prefix, vocab_size, config.write_checksums)
    return status


def vocabulary(config: TokenizerConfig) -> int | None:
    """Number of token ids, None without flags for it."""
    if config.tokenizer_type is None:
        return config.vocab_size
    return build_tokenizer(config).vocab_size


def verify(prefix: str, vocab_size: int | None, write: bool) -> int:
    """Checks a dataset and prints the result; returns 1 if it is damaged."""
    began = time.perf_counter()
    try:
        report = check_dataset(prefix, vocab_size, write=write)
    except (ValueError, OSError) as error:
        print(f"damaged: {one_line(error)}", file=sys.stderr)
        return 1
    sums = {"none": "no checksums", "equal": "checksums equal", "written": "checksums written"}
    ids = "no token ids" if report.largest_id is None else f"largest id {report.largest_id}"
    if report.largest_id is not None and vocab_size is not None:
        ids += f" of {vocab_size}"
    print(
        f"{prefix}: whole; {report.documents:,} documents, {report.sequences:,} sequences, "
        f"{report.tokens:,} tokens of {report.dtype.name}, {ids}, {sums[report.checksums]}, "
        f"{time.perf_counter() - began:.1f} seconds"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
