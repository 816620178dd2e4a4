"""Functions that find, check, describe and merge indexed datasets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data.indexed import (
    CODE_OF_DTYPE,
    IndexedDataset,
    TokenExtremes,
    bin_path,
    idx_path,
    mark_path,
    read_mark,
)
from megatron.features.checksums.verify import checksum_path, read_checksums
from megatron.tokenizer.mark import TokenizerMark
from megatron.util.digests import sha256_of_file
from megatron.util.files import write_whole
from megatron.util.progress import progress_bar

_READ_BYTES = 1 << 24
_BLOCK = 1 << 20
# For more values than this, quantiles are estimated from about this many evenly spaced ones.
_EXACT_BELOW = 1 << 24
QUANTILES = (5, 25, 50, 75, 95)


def find_prefixes(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the prefixes of indexed datasets, in order. Each folder is replaced by the sorted
    prefixes in it. Raises FileNotFoundError if a path does not exist or one of a prefix's two files
    is missing, and ValueError if a folder contains no indexed dataset."""
    prefixes: list[str] = []
    for path in (os.fspath(path) for path in paths):
        if not Path(path).is_dir():
            prefixes.append(path)
            continue
        endings = {".bin", ".idx"}
        stems = {file.with_suffix("") for file in Path(path).iterdir() if file.suffix in endings}
        if not stems:
            raise ValueError(f"the folder {path} has no .bin and .idx files")
        prefixes.extend(str(prefix) for prefix in sorted(stems))
    for prefix in prefixes:
        files = idx_path(prefix), bin_path(prefix)
        if not any(file.is_file() for file in files):
            raise FileNotFoundError(
                f"{prefix}: no such folder or indexed dataset, which is the prefix of a .bin and "
                "an .idx file"
            )
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"{file} does not exist; an indexed dataset is the prefix of a .bin and an "
                    ".idx file"
                )
    return prefixes


class CheckResult(NamedTuple):
    documents: int
    sequences: int
    tokens: int
    dtype: np.dtype
    largest_id: int | None
    """Largest token id; None if the dataset has no token ids."""
    checksums: str
    """Result of comparing checksums: "equal", "written", or "none" if there is no checksum file."""


def check_dataset(
    prefix: str, vocab_size: int | None = None, *, write: bool = False
) -> CheckResult:
    """Read a dataset once and check all of it, including that token ids are below `vocab_size` if
    given. With `write`, the checksum file is written instead of compared. Raises ValueError if the
    dataset is damaged, and OSError if a file is missing or cannot be read or written."""
    dataset = IndexedDataset(prefix)
    dataset.verify()
    sums = {idx_path(prefix).name: sha256_of_file(idx_path(prefix))}
    extremes, sums[bin_path(prefix).name] = _read_tokens(dataset)
    # Compare checksums first: they identify a damaged .bin, which an id out of range does not.
    known = {} if write else read_checksums(prefix)
    for name in sorted(known):
        if known[name] != sums[name]:
            raise ValueError(
                f"{Path(prefix).parent / name} has the SHA-256 {sums[name]}, but "
                f"{checksum_path(prefix)} says {known[name]}: the file was damaged or replaced "
                "since; copy it again, or write new checksums (--write-checksums) if the new "
                "content is right"
            )
    if extremes is not None:
        dataset.check_ids(extremes, vocab_size)
    if write:
        lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
        write_whole(checksum_path(prefix), lines.encode())
    return CheckResult(
        dataset.num_documents,
        len(dataset),
        dataset.num_tokens,
        dataset.dtype,
        None if extremes is None else int(extremes[1, 0]),
        "written" if write else "equal" if known else "none",
    )


def _read_tokens(dataset: IndexedDataset) -> tuple[np.ndarray | None, str]:
    """Return `TokenExtremes.array` (None if there are no token ids) and the SHA-256 of the .bin."""
    digest, extremes, position = hashlib.sha256(), TokenExtremes(), 0
    integers = dataset.dtype.kind in "iu"
    path = bin_path(dataset.prefix)
    bar = progress_bar(f"reading {path}", total=path.stat().st_size)
    with bar, path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            bar.update(len(block))
            if integers:
                tokens = np.frombuffer(block, dataset.dtype)
                extremes.add(position, tokens)
                position += len(tokens)
    largest = extremes.array() if integers and position else None
    return largest, digest.hexdigest()


def contents(dataset: IndexedDataset) -> dict[str, Any]:
    """Return counts, sizes and length statistics of a dataset as JSON values, computed from the
    .idx alone. Raises ValueError if the .idx is damaged."""
    dataset.verify()
    bounds, size = dataset.document_indices, dataset.dtype.itemsize
    end = np.int64(dataset.num_tokens * size)

    def bytes_before(sequences: np.ndarray) -> np.ndarray:
        inside = sequences < len(dataset)  # document bounds include the end of the last document
        starts = np.full(len(sequences), end)
        starts[inside] = dataset.sequence_offsets[sequences[inside]]
        return starts

    blocks = [bounds[i : i + _BLOCK + 1] for i in range(0, dataset.num_documents, _BLOCK)]
    lengths = dataset.sequence_lengths
    return {
        "prefix": dataset.prefix,
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "bin_bytes": bin_path(dataset.prefix).stat().st_size,
        "idx_bytes": idx_path(dataset.prefix).stat().st_size,
        "multimodal": dataset.modes is not None,
        "tokens_per_sequence": _statistics(
            len(dataset), (lengths[i : i + _BLOCK] for i in range(0, len(dataset), _BLOCK))
        ),
        "tokens_per_document": _statistics(
            dataset.num_documents, (np.diff(bytes_before(block)) // size for block in blocks)
        ),
        "sequences_per_document": _statistics(dataset.num_documents, map(np.diff, blocks)),
    }


def _statistics(count: int, blocks: Iterable[np.ndarray]) -> dict[str, Any]:
    """Return statistics of `count` lengths that are given in blocks. If there are many lengths,
    quantiles are computed from a sample."""
    step = -(-count // _EXACT_BELOW) or 1
    sample, of_blocks, seen = [], [], 0
    for values in blocks:
        sample.append(values[-seen % step :: step].astype(np.int64))
        empty = int(np.count_nonzero(values == 0))
        total = int(values.sum(dtype=np.int64))
        of_blocks.append((total, empty, int(values.min()), int(values.max())))
        seen += len(values)
    totals, empties, smallest, largest = zip(*of_blocks or [(0, 0, 0, 0)], strict=True)
    percentiles = np.percentile(
        np.concatenate(sample or [np.zeros(1, np.int64)]), QUANTILES, method="inverted_cdf"
    )
    return {
        "count": count,
        "total": sum(totals),
        "smallest": min(smallest),
        "largest": max(largest),
        "empty": sum(empties),
        "mean": sum(totals) / count if count else 0.0,
        "quantiles": {f"{q}%": int(v) for q, v in zip(QUANTILES, percentiles, strict=True)},
    }


def merge_datasets(prefixes: Sequence[str], output_prefix: str) -> list[str]:
    """Append the documents of all datasets, in order, to a new dataset, in constant memory. Tokens
    get the narrowest dtype that can represent all of them. Return notes, for example about inputs
    with another dtype. Raises ValueError if a file is damaged, datasets are incompatible or the
    output is an input, and OSError if a file is missing or the disk is full. Errors leave no
    output."""
    output = Path(output_prefix).absolute()
    for prefix in prefixes:
        if Path(prefix).absolute() == output:
            raise ValueError(
                f"--output-prefix {output_prefix} is one of the inputs: choose another prefix, or "
                f"remove {bin_path(output_prefix).name} and {idx_path(output_prefix).name} first"
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
    marks = {f"{prefix}.bin": read_mark(mark_path(prefix)) for prefix in prefixes}
    common = common_mark(marks)
    with IndexedDatasetWriter(output_prefix, dtype, common.json() if common else None) as writer:
        for prefix in prefixes:
            writer.merge(prefix, widen=True)
    unknown = [name for name, each in marks.items() if each is None]
    notes = []
    if 0 < len(unknown) < len(marks):
        notes.append(f"{unknown[0]}: it is not known which tokenizer made it; not compared")
    return notes + [
        f"{bin_path(d.prefix)}: {d.dtype.name} tokens are written as {dtype.name}"
        for d in inputs
        if d.dtype != dtype
    ]


def common_mark(marks: Mapping[str, TokenizerMark | None]) -> TokenizerMark | None:
    """Return the common mark of data to be combined, whose names are the keys. Return None if any
    mark is unknown. Raises ValueError if the data are of different tokenizers."""
    known = {name: mark for name, mark in marks.items() if mark is not None}
    first = next(iter(known.items()), None)
    for name, mark in known.items():
        if first is not None and mark.digest != first[1].digest:
            raise ValueError(
                f"{first[0]} was made with {first[1]}, and {name} with {mark}: data of different "
                "tokenizers cannot be put together; preprocess them with the same one"
            )
    return first[1] if first is not None and len(known) == len(marks) else None


def _common_dtype(inputs: Sequence[IndexedDataset]) -> np.dtype:
    if not inputs:
        raise ValueError("there is nothing to merge")
    kinds = {dataset.dtype.kind for dataset in inputs}
    if "f" in kinds and len(kinds) > 1:
        floats = next(d for d in inputs if d.dtype.kind == "f")
        tokens = next(d for d in inputs if d.dtype.kind != "f")
        raise ValueError(
            f"{bin_path(floats.prefix)} contains {floats.dtype.name} values and "
            f"{bin_path(tokens.prefix)} {tokens.dtype.name} tokens: they cannot be merged"
        )
    dtype = np.result_type(*(dataset.dtype for dataset in inputs)).newbyteorder("<")
    # uint32 is not supported by the format, but cannot result, since no input can have it.
    assert dtype in CODE_OF_DTYPE
    return dtype
