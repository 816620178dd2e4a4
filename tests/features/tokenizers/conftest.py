"""Fixtures that these tests share with others."""

from trained_tokenizers import (
    fuzzed_strings,
    python_sources,
    ranks_file,
    sentencepiece_files,
    trained,
    trained_folder,
    wordpiece_file,
)

__all__ = [
    "fuzzed_strings",
    "python_sources",
    "ranks_file",
    "sentencepiece_files",
    "trained",
    "trained_folder",
    "wordpiece_file",
]
