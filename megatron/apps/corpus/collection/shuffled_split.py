"""A corpus shuffled and cut at exact shares, as Megatron-LM's first release (2019) did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.apps.corpus.collection.line_job import required
from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.data.json_lines import expand, long_line, read_lines
from megatron.util.files import replacing, sync

FILES = ("train.json", "dev.json", "test.json")
_HEADER = b"file\tline #\n"


@dataclass(frozen=True)
class ShuffledSplitConfig:
    """Shuffling a corpus into train.json, dev.json and test.json."""

    input_files: tuple[str, ...] = option((), aliases=("--input_files",))
    """JSON-lines files."""
    output_dir: str | None = option(None, aliases=("--output_dir",))
    """Folder for train.json, dev.json and test.json, and of each a .map: file (from 0, in the order
    of --input-files) and line (from 0) of every document, in columns."""
    test_percent: tuple[float, ...] = option((0.05, 0.0), aliases=("--test_percent",))
    """Shares of dev and test as fractions of the documents, rounded up; test may be left out."""
    seed: int = option(1234)
    """Another seed makes another order."""


def shuffled_split(config: ShuffledSplitConfig) -> str:
    """Writes the documents to their parts, and returns how many each has. Raises ConfigError for
    shares that are not fractions; ValueError for a line of more than 64 MiB; OSError if a file
    cannot be read or written."""
    patterns, folder = required(config, "input_files", "output_dir")
    shares = (*config.test_percent, 0.0)[:2]
    if len(config.test_percent) > 2 or min(shares) < 0 or sum(shares) > 1:
        raise ConfigError(
            f"--test-percent {' '.join(map(str, config.test_percent))} must be one or two "
            "fractions such as 0.05 0, with a sum of at most 1"
        )
    paths = [path for pattern in patterns for path in expand(pattern, (".json", ".jsonl"))]
    places = np.array(list(_places(paths)), np.int64).reshape(-1, 3)
    held_out = [min(math.ceil(share * len(places)), len(places)) for share in shares]
    order = np.random.RandomState(config.seed).permutation(len(places))
    bounds = np.cumsum([max(len(places) - sum(held_out), 0), held_out[0]])
    Path(folder).mkdir(parents=True, exist_ok=True)
    parts = np.split(places[order], bounds)
    for name, part in zip(FILES, parts, strict=True):
        _write(Path(folder, name), paths, part)
    return ", ".join(f"{len(p):,} in {n}" for n, p in zip(FILES, parts, strict=True))


def _places(paths: Sequence[Path]) -> Iterator[tuple[int, int, int]]:
    """File, line and offset of every line that is not empty."""
    for number, path in enumerate(paths):
        with path.open("rb") as file:
            for line, (offset, content) in enumerate(read_lines(file)):
                if too_long := long_line(content, line + 1):
                    raise ValueError(f"{path}, line {too_long.number}: {too_long.reason}")
                if content.strip():
                    yield number, line, offset


def _write(path: Path, inputs: Sequence[Path], places: np.ndarray) -> None:
    with ExitStack() as stack:
        sources = [stack.enter_context(each.open("rb")) for each in inputs]
        parts = [stack.enter_context(replacing(Path(f"{path}{end}"))) for end in ("", ".map")]
        lines, rows = (stack.enter_context(part.open("xb")) for part in parts)
        rows.write(_HEADER)
        for file, line, offset in places.tolist():
            sources[file].seek(offset)
            lines.write(sources[file].readline().strip() + b"\n")
            rows.write(f"{file}\t{line}\n".encode())
        sync(lines)
        sync(rows)
