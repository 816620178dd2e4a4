"""What a teacher says of samples, on disk: its most probable tokens at every position.

A folder has ``teacher.json``, whose it is, and files of blocks of samples. A sample is found by the
digest of its tokens, in whatever order and number a run meets it. Shape suffixes: B micro batch,
S sequence, P positions of a block's samples one after another, K tokens that are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, save_tensors
from megatron.checkpoint.source import Source
from megatron.config import ConfigError
from megatron.data.samples import SampleDataset
from megatron.features.distillation.divergence import TopTokens, linear_top_tokens
from megatron.features.distillation.objective import TaughtBatch
from megatron.features.distillation.teacher import Teacher
from megatron.parallel.mesh import Mesh
from megatron.run.fingerprint import checkpoint_digest
from megatron.util.digests import digest_of_parts
from megatron.util.files import replacing, write_whole
from megatron.util.json_text import parse_json
from megatron.util.progress import progress_bar

IDENTITY = "teacher.json"
BLOCK_BYTES = 64 * 2**20
"""Of a file, about."""
_DIGESTED = 8
"""Tensors of a teacher whose values are part of its identity, the smallest: its norms."""


class Sampled(NamedTuple):
    """Samples of a data set whose losses need the teacher."""

    dataset: SampleDataset[Any]
    numbers: range


class _Place(NamedTuple):
    file: Path
    start: int
    stop: int


class TeacherCache:
    """The folder ``--kd-cache`` of one teacher, with the samples that were there when it was
    opened. Raises ConfigError if it has what another teacher says, or at another temperature;
    CheckpointError if a file is damaged."""

    def __init__(self, folder: str, identity: Mapping[str, Any], collate: Any) -> None:
        self._folder, self._identity, self._collate = Path(folder), dict(identity), collate
        self._open: dict[Path, Any] = {}
        self._places: dict[int, _Place] = {}
        path = self._folder / IDENTITY
        if path.is_file():
            self._compare(path)
        self.look()

    def _compare(self, path: Path) -> None:
        try:
            found = parse_json(path.read_bytes(), str(path))
        except ValueError as error:
            raise CheckpointError(f"{error}; remove --kd-cache {self._folder}") from None
        for name, value in self._identity.items():
            # Folders of earlier versions do not say what the files were.
            if found.get(name) != value and not (name == "files" and name not in found):
                raise ConfigError(
                    f"--kd-cache {self._folder} is of another teacher: {name} is "
                    f"{found.get(name)}, and here {value}; name another folder"
                )

    def look(self) -> None:
        """Finds all samples that are there now."""
        for path in sorted(self._folder.glob("*.safetensors")):
            if path in self._open:
                continue
            try:
                self._open[path] = file = safe_open(path, "pt")
                keys, stops = file.get_tensor("keys").tolist(), file.get_tensor("stops").tolist()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: {error}; remove the file") from None
            for key, start, stop in zip(keys, [0, *stops[:-1]], stops, strict=True):
                self._places[key] = _Place(path, start, stop)

    def missing(self, samples: Iterable[Sampled], mesh: Mesh) -> list[Any]:
        """The samples that are not there, each once, the same on every rank."""
        known: list[Any] = [set(self._places)]
        if mesh.world.size > 1:
            dist.broadcast_object_list(known, src=0)
        seen, missing = known[0], []
        for dataset, numbers in samples:
            for number in numbers:
                sample = dataset[number]
                (key,) = self._collate([sample]).keys_B.tolist()
                if key not in seen:
                    seen.add(key)
                    missing.append(sample)
        return missing

    def fill(self, teacher: Teacher, samples: Sequence[Any], micro_batch_size: int) -> None:
        """Adds samples; the data-parallel ranks share them. Every rank must call it."""
        mesh, count = teacher.engine.mesh, int(self._identity["tokens"])
        temperature = float(self._identity["temperature"])
        if mesh.world.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / IDENTITY
            write_whole(path, json.dumps(self._identity, indent=1).encode())
        # As often on every data-parallel rank, of which some may then have nothing left to do.
        own = samples[mesh.data.rank :: mesh.data.size]
        at_once = micro_batch_size * (2 * mesh.pipeline.size if mesh.pipeline.size > 1 else 1)
        block = _Block()
        bar = progress_bar("teacher", total=len(own), unit=" samples")
        with bar:
            for first in range(0, len(own), at_once):
                group = own[first : first + at_once]
                parts = range(0, len(group), micro_batch_size)
                batches = [self._collate(group[at : at + micro_batch_size]) for at in parts]
                # A pipeline takes micro batches of one shape.
                lengths = [batch.tokens_BS.shape[1] for batch in batches]
                size = len(batches[0].tokens_BS)
                if mesh.pipeline.size > 1:
                    batches = [_repeated(b.lengthened(max(lengths)), size) for b in batches]
                moved = [batch.to(teacher.engine.device) for batch in batches]
                for batch, head in zip(batches, teacher.heads(moved), strict=False):
                    top = linear_top_tokens(head, count, temperature)
                    if mesh.tensor.rank == 0:
                        block.add(batch, TopTokens(*(each.cpu() for each in top)))
                        if block.bytes >= BLOCK_BYTES:
                            block.write(self._folder)
                bar.update(len(group))
        block.write(self._folder)
        if mesh.world.size > 1:
            dist.barrier(group=mesh.world.handle)
        self.look()

    def teach(self, batches: Iterator[Any], count: int, has_head: bool) -> Iterator[TaughtBatch]:
        """``count`` micro batches with what the teacher says of them, which only a pipeline stage
        with the output head needs."""
        for _ in range(count):
            batch = next(batches)
            if not has_head:
                yield TaughtBatch(batch)
                continue
            device, length = batch.tokens_BS.device, batch.tokens_BS.shape[1]
            rows = [self._of(key, length) for key in batch.keys_B.tolist()]
            parts = (torch.stack(part).to(device) for part in zip(*rows, strict=True))
            yield TaughtBatch(batch, TopTokens(*parts))

    def _of(self, key: int, length: int) -> tuple[Tensor, ...]:
        """What the teacher says of the first positions of a sample, and zeros after its last."""
        place = self._places.get(key)
        if place is None:
            raise CheckpointError(
                f"--kd-cache {self._folder} lacks a sample of this run, which it had at its start"
            )
        stop = min(place.stop, place.start + length)
        file = self._open[place.file]
        found = [file.get_slice(name)[place.start : stop] for name in TopTokens._fields]
        missing = length - (stop - place.start)
        return tuple(F.pad(each, (0, 0) * (each.dim() - 1) + (0, missing)) for each in found)


class _Block:
    """Samples that are not yet written."""

    def __init__(self) -> None:
        self._found: dict[int, TopTokens] = {}
        self.bytes = 0

    def add(self, batch: Any, top: TopTokens) -> None:
        for row, key in enumerate(batch.keys_B.tolist()):
            own = TopTokens(*(each[row] for each in top))
            if key not in self._found:
                self._found[key] = own
                self.bytes += sum(each.nbytes for each in own)

    def write(self, folder: Path) -> None:
        """Writes them to a new file of the folder, which appears when it is complete."""
        if not self._found:
            return
        keys, rows = list(self._found), self._found.values()
        stops = torch.tensor([len(top.rest_BP) for top in rows]).cumsum(0)
        tensors = {"keys": torch.tensor(keys), "stops": stops} | {
            name: torch.cat([top[field] for top in rows])
            for field, name in enumerate(TopTokens._fields)
        }
        name = f"{digest_of_parts(f'{key} ' for key in keys)}.safetensors"
        with replacing(folder / name) as path:
            save_tensors(tensors, path)
        self.__init__()  # type: ignore[misc]


def _repeated(batch: Any, size: int) -> Any:
    """The batch with its last sample again, up to so many."""
    missing = size - len(batch.tokens_BS)
    if not missing:
        return batch
    repeat = torch.arange(size).clamp(max=size - missing - 1)
    parts = batch._replace(weights_2=None)
    return batch._make(None if each is None else each[repeat] for each in parts)


def identity_of(source: Source, top_tokens: int, temperature: float) -> dict[str, Any]:
    """Record of a folder about its teacher: digests of its smallest weights, and of blocks of its
    files, in which teachers with the same norms differ."""
    shapes = {name: source.shape(name) for name in source.names()}
    smallest = sorted(shapes, key=lambda name: (torch.Size(shapes[name]).numel(), name))
    read = (source.tensor(name).contiguous().numpy().data for name in smallest[:_DIGESTED])
    weights = digest_of_parts([json.dumps(sorted(shapes.items())), *read])
    found = {"weights": weights, "tokens": top_tokens, "temperature": temperature}
    return found | {"files": checkpoint_digest(source.folder)}
