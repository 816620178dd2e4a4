#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Merges indexed datasets (PREFIX.bin and PREFIX.idx) into one.

    python tools/merge_datasets.py --input parts/ --output-prefix data/corpus_text_document
    python tools/merge_datasets.py --input data/a data/b --output-prefix data/both

Inputs keep their order; the datasets of a folder are sorted by name. If dtypes differ, tokens are
written in the narrowest one that fits all. Memory is constant, and the output appears only when it
is complete.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.apps.corpus.indexed_files import find_prefixes, merge_datasets
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.data.indexed import IndexedDataset
from megatron.util.errors import one_line


@dataclass(frozen=True)
class MergeConfig:
    """Merge: inputs and output."""

    input: tuple[str, ...] = option(())
    """Prefixes of .bin/.idx pairs, or folders of such pairs."""
    output_prefix: str | None = option(None)
    """Prefix of the new .bin and .idx; an existing pair is replaced."""
    multimodal: bool = option(False, note="modes are merged with or without it")
    """Megatron-LM's flag for files with modes."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    (config,) = parse_configs((MergeConfig,), argv, description=__doc__)
    try:
        if not config.input or not config.output_prefix:
            raise ConfigError("give --input and --output-prefix")
        prefixes = find_prefixes(config.input)
        notes = merge_datasets(prefixes, config.output_prefix)
        merged = IndexedDataset(config.output_prefix)
    except (ValueError, OSError) as error:
        sys.exit(f"merge_datasets.py: error: {one_line(error)}")
    for note in notes:
        print(note)
    print(
        f"{merged.prefix}.bin/.idx: {merged.num_documents:,} documents, {len(merged):,} "
        f"sequences, {merged.num_tokens:,} tokens of {merged.dtype.name} from {len(prefixes)} "
        "datasets"
    )


if __name__ == "__main__":
    main()
