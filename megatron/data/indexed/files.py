"""Which indexed datasets a command line means, and how they become one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed.reader import CODE_OF_DTYPE, IndexedDataset, bin_path, idx_path
from megatron.data.indexed.writer import IndexedDatasetWriter


def find_prefixes(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The prefixes of indexed datasets, in order; a folder stands for all of its own, by name.

    Raises:
        FileNotFoundError: there is nothing of that name, or one of two files is missing.
        ValueError: a folder holds no indexed dataset.
    """
    prefixes: list[str] = []
    for path in (os.fspath(path) for path in paths):
        if not Path(path).is_dir():
            prefixes.append(path)
            continue
        endings = {".bin", ".idx"}
        found = {file.with_suffix("") for file in Path(path).iterdir() if file.suffix in endings}
        if not found:
            raise ValueError(f"the folder {path} holds no .bin and .idx files")
        prefixes.extend(str(prefix) for prefix in sorted(found))
    for prefix in prefixes:
        for file in (idx_path(prefix), bin_path(prefix)):
            if not file.is_file():
                raise FileNotFoundError(
                    f"{file} does not exist; an indexed dataset is the prefix of a .bin and an "
                    ".idx file"
                )
    return prefixes


@dataclass(frozen=True)
class Merged:
    """What a merge made."""

    prefix: str
    dtype: np.dtype
    documents: int
    sequences: int
    tokens: int
    notes: tuple[str, ...]
    """What the user may want to know."""


def merge_datasets(prefixes: Sequence[str], output_prefix: str) -> Merged:
    """Append the documents of all datasets, in order, as one new dataset in constant memory.

    Tokens get the narrowest dtype that holds those of all.

    Raises:
        ValueError: a file is damaged, the datasets do not go together, or the output is an input.
        OSError: a file is missing, or the disk is full; nothing is left of the output.
    """
    output = Path(output_prefix).absolute()
    for prefix in prefixes:
        if Path(prefix).absolute() == output:
            raise ValueError(
                f"--output-prefix {output_prefix} is one of the inputs: write elsewhere, or remove "
                f"{bin_path(output_prefix).name} and {idx_path(output_prefix).name} first"
            )
    inputs = [IndexedDataset(prefix) for prefix in prefixes]
    dtype = _common_dtype(inputs)
    with_modes = [d.prefix for d in inputs if d.modes is not None]
    without = [d.prefix for d in inputs if d.modes is None and len(d)]
    if with_modes and without:
        raise ValueError(
            f"{with_modes[0]} has a mode for each sequence (multimodal data) and {without[0]} has "
            "none: they cannot be merged"
        )
    notes = tuple(
        f"{bin_path(d.prefix)}: {d.dtype.name} tokens are written as {dtype.name}"
        for d in inputs
        if d.dtype != dtype
    )
    with IndexedDatasetWriter(output_prefix, dtype) as writer:
        for prefix in prefixes:
            writer.merge(prefix, widen=True)
    return Merged(
        output_prefix,
        dtype,
        sum(d.num_documents for d in inputs),
        sum(len(d) for d in inputs),
        sum(d.num_tokens for d in inputs),
        notes,
    )


def _common_dtype(inputs: Sequence[IndexedDataset]) -> np.dtype:
    if not inputs:
        raise ValueError("there is nothing to merge")
    kinds = {dataset.dtype.kind for dataset in inputs}
    if "f" in kinds and len(kinds) > 1:
        floats = next(d for d in inputs if d.dtype.kind == "f")
        tokens = next(d for d in inputs if d.dtype.kind != "f")
        raise ValueError(
            f"{bin_path(floats.prefix)} holds {floats.dtype.name} values and "
            f"{bin_path(tokens.prefix)} {tokens.dtype.name} tokens: they cannot be merged"
        )
    dtype = np.result_type(*(dataset.dtype for dataset in inputs)).newbyteorder("<")
    # Unsigned 32 bits, which the format lacks, cannot come out: no input has them.
    assert dtype in CODE_OF_DTYPE
    return dtype
