"""Writing of checkpoints: each process writes its slices, then one writes the index and manifest.

In a run, every rank has a :class:`SliceWriter`. A conversion has only one, which keeps the tensors
of a single file in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import Facts, LazyTensor, json_text, write_bytes, write_tensors
from megatron.checkpoint.folder import incomplete_folder, publish
from megatron.checkpoint.manifest import INDEX, IndexEntry, file_facts, tensor_key
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import TOKENIZER
from megatron.util.files import sync_path

PROCESS = "slices-{:05d}.json"
"""File with one process's index entries and manifest entries, for :func:`finish_checkpoint`."""

_WEIGHTS, _MOMENTS = "weights", "optimizer"
"""Name prefixes of the files with weights and with moments."""


class SliceWriter:
    """Writer of one process's slices into an incomplete checkpoint.

    Set ``max_file_bytes`` in a process that writes alone. It limits files with more than one
    tensor, which are numbered consecutively and sorted by tensor name. Without it, all tensors stay
    in memory until :meth:`finish`, in ``tensors``, by file and key: float32, or uint8 for random
    states. ``progress`` is called with a line about each file. With ``weights_dtype``, the dtype of
    computation, weights must be finite in that dtype, and moments in float32.
    """

    def __init__(
        self,
        folder: Path,
        process: int = 0,
        max_file_bytes: int | None = None,
        progress: Callable[[str], None] = lambda line: None,
        weights_dtype: torch.dtype | None = None,
    ) -> None:
        self.tensors: dict[str, dict[str, Tensor | LazyTensor]] = {}
        self._folder, self._process, self._max_file_bytes = folder, process, max_file_bytes
        self._progress = progress
        self._finite_in: dict[str, torch.dtype] = {}
        if weights_dtype is not None:
            self._finite_in = {_WEIGHTS: weights_dtype, _MOMENTS: torch.float32}
        self._numbers: dict[str, int] = {}
        self._index: dict[str, list[dict[str, Any]]] = {}
        self._facts: dict[str, Facts] = {}

    def add(
        self,
        name: str,
        held: Slice,
        tensors: Iterable[tuple[str, Tensor | LazyTensor]],
        part: str = "",
    ) -> None:
        """Add a non-empty slice of the parameter with the canonical name ``name``. ``tensors`` are
        pairs of a kind (``weight`` or a moment) and its elements. :class:`IndexEntry` describes
        ``part``."""
        shape = held.share_shape if held.is_whole_share else (held.numel,)
        files = {
            kind: self.put(
                _WEIGHTS if kind == "weight" else _MOMENTS,
                tensor_key(name, kind, part),
                (values if isinstance(values, LazyTensor) else values.contiguous()).view(shape),
            )
            for kind, values in tensors
        }
        self._index.setdefault(name, []).append(IndexEntry(held, files, part).to_json())

    def put(self, series: str, key: str, values: Tensor | LazyTensor) -> str:
        """Add a tensor to a file whose name begins with ``series``. Return the file's name."""
        number = self._numbers.setdefault(series, self._process)
        file = f"{series}-{number:05d}.safetensors"
        waiting, limit = self.tensors.setdefault(file, {}), self._max_file_bytes
        if waiting and limit is not None and _bytes(waiting) + values.nbytes > limit:
            self._write(file)
            self._numbers[series] += 1
            return self.put(series, key, values)
        waiting[key] = values
        return file

    def finish(self) -> None:
        """Write the remaining tensors to the disk. Raises NotFiniteError if a weight or moment is
        not finite and ``weights_dtype`` was given."""
        for file in sorted(self.tensors, reverse=True):
            self._write(file)
        path = self._folder / PROCESS.format(self._process)
        path.write_text(json.dumps({"index": self._index, "files": self._facts}))

    def _write(self, file: str) -> None:
        tensors = self.tensors.pop(file)
        if self._max_file_bytes is not None:
            tensors = dict(sorted(tensors.items()))
        finite_in = self._finite_in.get(file.partition("-")[0])
        self._facts[file] = write_tensors(self._folder / file, tensors, finite_in)
        self._progress(f"{file}: {_bytes(tensors) / 1e6:,.1f} MB")


def _bytes(tensors: Mapping[str, Tensor | LazyTensor]) -> int:
    return sum(values.nbytes for values in tensors.values())


def finish_checkpoint(
    save: Path,
    iteration: int,
    processes: int,
    contents: Mapping[str, Any],
    save_tokenizer: Callable[[Path], object],
) -> int:
    """Complete a checkpoint after all ``processes`` have written their slices, publish it, and
    return its size in bytes. ``contents`` maps names of the other JSON files to their contents, and
    ``save_tokenizer`` writes the tokenizer's files into a folder. Raises OSError if a file cannot
    be written; older checkpoints are then unchanged."""
    folder = incomplete_folder(save, iteration)
    index: dict[str, list[Any]] = {}
    facts: dict[str, Facts] = {}
    for process in range(processes):
        path = folder / PROCESS.format(process)
        written = json.loads(path.read_text())
        for name, entries in written["index"].items():
            index.setdefault(name, []).extend(entries)
        facts |= written["files"]
        path.unlink()
    for name, content in {INDEX: index, **contents}.items():
        facts[name] = write_bytes(folder / name, json_text(content).encode())
    save_tokenizer(folder / TOKENIZER)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name not in facts:
            sync_path(path)
            if path.is_file():
                facts[name] = file_facts(path)
    publish(save, iteration, facts)
    return sum(int(entry["bytes"]) for entry in facts.values())
