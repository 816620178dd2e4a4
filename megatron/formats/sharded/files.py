"""Reader of torch.distributed.checkpoint (DCP) files, which can read slices of tensors.

::

    .metadata           a pickle: shape and chunks of each tensor, location of each chunk in a file
    __0_0.distcp, ...   per process: concatenated torch.save archives, each with one chunk

The pickles, in the metadata and in each chunk's archive, are read with the checks of
:mod:`megatron.formats.unpickle`. In a chunk, only the bytes between the first and the last
requested element are read. The classes in the pickle are those of
``torch/distributed/checkpoint/metadata.py``.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.serialization import StorageType

from megatron.checkpoint.files import CheckpointError, read_bytes
from megatron.checkpoint.slices import Slice, tiles
from megatron.formats.unpickle import Inert, load_bare, load_pickle
from megatron.util.files import open_regular
from megatron.util.phases import moved

METADATA = ".metadata"
_MOST_PAIRS = 2**11
"""Maximum number of chunks of a tensor that are compared pairwise for overlaps."""
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Local header of a zip member. It has the lengths of the name and of the extra field after it."""
_MOST_OPEN = 64


class Extent(NamedTuple):
    """Byte range in a file that contains a torch.save archive."""

    path: Path
    offset: int
    length: int


class ArchivedTensor(NamedTuple):
    """Tensor in an archive: elements from ``start`` on in a storage of ``length`` bytes at byte
    ``place``. It does not refer to a tensor object, not even on the meta device: small allocations
    that stay alive would prevent the large ones freed before them from being reused."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool
    start: int
    place: int
    length: int


@dataclass(frozen=True)
class ShardedTensor:
    """Tensor with its chunks. Each chunk has a slice of the tensor and a byte range in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[Slice, Extent], ...]


class ShardedFiles:
    """Tensors in a folder by name. ``objects`` has the locations of other values, and
    ``original_shapes`` the shapes of tensors that Megatron-Core stored as flattened blocks. Raises
    CheckpointError if a file is missing or too short, or if chunks do not fill a tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / METADATA
        content = read_bytes(self.path)
        metadata = load_bare(io.BytesIO(content), str(self.path), len(content))
        self.tensors: dict[str, ShardedTensor] = {}
        self.objects: dict[str, Extent] = {}
        self._handle = lru_cache(maxsize=_MOST_OPEN)(open_regular)
        self._stored = lru_cache(maxsize=2**12)(self._find)
        self._sizes: dict[str, int] = {}
        try:
            self._read(vars(metadata))
        except (TypeError, AttributeError, KeyError, RecursionError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"{self.path} is not the metadata of a sharded checkpoint ({reason})"
            ) from None

    def _read(self, content: Mapping[str, Any]) -> None:
        places: dict[str, list[tuple[tuple[int, ...], Extent]]] = {}
        for index, stored in content["storage_data"].items():
            name, offsets = str(index.fqn), vars(index).get("offset")
            extent = self._extent(name, stored)
            if offsets is None:
                self.objects[name] = extent
            else:
                places.setdefault(name, []).append((_whole_numbers(offsets), extent))
        for name, facts in content["state_dict_metadata"].items():
            if "chunks" in vars(facts):
                self.tensors[str(name)] = self._tensor(str(name), facts, places.get(name, []))
        known = content.get("mcore_data")
        self.original_shapes = {
            name: _whole_numbers(facts["nd_reformulated_orig_global_shape"])
            for name, facts in (known.items() if isinstance(known, Mapping) else ())
        }

    def _extent(self, name: str, stored: Inert) -> Extent:
        file, offset, length = stored.relative_path, stored.offset, stored.length  # type: ignore[attr-defined]
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{self.path}: {name} is in {file!r:.100}, which is not a file of this folder"
            )
        if vars(stored).get("transform_descriptors"):
            raise CheckpointError(f"{self.folder / file}: {name} is compressed or encrypted")
        path = self.folder / file
        if file not in self._sizes:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; {METADATA} says that it has {name}")
            self._sizes[file] = path.stat().st_size
        place = _whole_numbers((offset, length))
        if sum(place) > self._sizes[file]:
            raise CheckpointError(
                f"{path} has {self._sizes[file]:,} bytes, but {name} should end at {sum(place):,}: "
                "the file is incomplete; copy it again"
            )
        return Extent(path, *place)

    def _tensor(
        self, name: str, facts: Inert, places: Sequence[tuple[tuple[int, ...], Extent]]
    ) -> ShardedTensor:
        shape = _whole_numbers(facts.size)  # type: ignore[attr-defined]
        dtype = facts.properties.state[0]  # type: ignore[attr-defined]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"the dtype of {name}")
        extents, chunks = dict(places), []
        for chunk in facts.chunks:  # type: ignore[attr-defined]
            starts, sizes = _whole_numbers(chunk.offsets), _whole_numbers(chunk.sizes)
            inside = len(starts) == len(sizes) == len(shape) and all(
                start + size <= whole
                for start, size, whole in zip(starts, sizes, shape, strict=True)
            )
            if not inside:
                raise CheckpointError(
                    f"{self.path}: {name} of the shape {shape} has a chunk {sizes} at {starts}"
                )
            if not math.prod(sizes):
                continue
            if starts not in extents:
                raise CheckpointError(f"{self.path} does not say where {name} at {starts} is")
            if math.prod(sizes) * dtype.itemsize > extents[starts].length:
                raise CheckpointError(
                    f"{extents[starts].path} has {extents[starts].length:,} bytes of {name} "
                    f"{sizes}, which needs more"
                )
            cuts = tuple((dim, ((starts[dim], sizes[dim]),)) for dim in range(len(shape)))
            chunks.append((Slice(shape, cuts, 0, math.prod(sizes)), extents[starts]))
        if math.prod(shape) and not _fills(shape, [box for box, _ in chunks]):
            raise CheckpointError(
                f"{self.path}: the {len(chunks)} chunks of {name} do not fill the shape {shape}"
            )
        return ShardedTensor(name, shape, dtype, tuple(chunks))

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> ShardedTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self.tensors[name]

    @cached_property
    def files(self) -> dict[str, Path]:
        """File that contains the first chunk of each tensor, by tensor name."""
        return {
            name: each.chunks[0][1].path if each.chunks else self.path
            for name, each in self.tensors.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self[name].dtype

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, in the dtype of the files."""
        shape = self[name].shape
        return self.read(name, Slice.whole(shape)).view(shape)

    def part(self, name: str, number: int) -> Tensor:
        """Return the slice with index ``number`` along a tensor's first dimension."""
        shape = self[name].shape
        each = math.prod(shape[1:])
        return self.read(name, Slice(shape, (), number * each, (number + 1) * each)).view(shape[1:])

    def read(self, name: str, wanted: Slice) -> Tensor:
        """Return a slice of a tensor, flattened, in the dtype of the files. Reads only the
        chunks that it needs. Raises CheckpointError if a chunk is malformed or contradicts the
        metadata."""
        moved()
        stored = self[name]
        if len(stored.chunks) == 1 and wanted.is_whole_share and not wanted.cuts:
            return self._elements(stored, *stored.chunks[0], 0, wanted.numel)
        flat = torch.empty(wanted.numel, dtype=stored.dtype)
        for box, extent in stored.chunks:
            common = wanted.overlap(box)
            if common is not None:
                piece = self._elements(stored, box, extent, common.first, common.end)
                common.copy(flat, piece)
        return flat

    def _elements(
        self, tensor: ShardedTensor, box: Slice, extent: Extent, first: int, end: int
    ) -> Tensor:
        """Return elements [first, end) of a flattened chunk."""
        chunk, dtype = self._stored(extent, tensor.name), tensor.dtype
        if (chunk.shape, chunk.dtype) != (box.share_shape, dtype):
            raise CheckpointError(
                f"{extent.path}: {tensor.name} has a chunk {chunk.shape} of {chunk.dtype}; "
                f"{METADATA} makes it {box.share_shape} of {dtype}"
            )
        if not chunk.contiguous:
            values = self._bytes(extent, chunk.place, chunk.length, tensor.name).view(dtype)
            strided = values.as_strided(chunk.shape, chunk.strides, chunk.start)
            return strided.contiguous().view(-1)[first:end]
        start = chunk.place + (chunk.start + first) * dtype.itemsize
        return self._bytes(extent, start, (end - first) * dtype.itemsize, tensor.name).view(dtype)

    def _bytes(self, extent: Extent, start: int, length: int, name: str) -> Tensor:
        """Read bytes of a chunk's archive. The file is not memory-mapped, because mapped pages
        count as the process's memory."""
        values = torch.empty(length, dtype=torch.uint8)
        view, done = values.numpy().data.cast("B"), 0
        handle = self._handle(extent.path)
        handle.seek(extent.offset + start)
        while done < length:
            count = handle.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{extent.path} ends within {name}: copy it again")
            done += count
        return values

    def _find(self, extent: Extent, name: str) -> ArchivedTensor:
        """Locate the tensor in an archive."""
        view = _View(self._handle(extent.path), extent.offset, extent.length)
        where = f"{extent.path}: {name}"
        try:
            return _tensor_in(view, where)
        except (zipfile.BadZipFile, OSError, ValueError, KeyError, struct.error, EOFError) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(f"{where}: not an archive of torch.save ({reason})") from None
        # zipfile raises these for unsupported methods.
        except (NotImplementedError, RuntimeError) as error:
            raise CheckpointError(f"{where}: {str(error)[:200]}") from None

    def object(self, name: str) -> Any:
        """Load a stored value that is not a tensor."""
        extent = self.objects[name]
        view = _View(self._handle(extent.path), extent.offset, extent.length)
        where = f"{extent.path}: {name}"
        try:
            with zipfile.ZipFile(view) as archive:
                content = _pickled(archive, where)[1]
        except (zipfile.BadZipFile, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{where}: {str(error)[:200]}") from None
        return load_bare(io.BytesIO(content), where, len(content))


def _whole_numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**60 for n in numbers):
        raise TypeError(f"{numbers!r:.60} are not sizes or places")
    return numbers


def _fills(shape: tuple[int, ...], boxes: Sequence[Slice]) -> bool:
    """Return whether boxes cover a tensor, each element exactly once. Boxes that do not form a grid
    are compared pairwise; with too many for that, return False."""
    if tiles(shape, boxes):
        return True
    if sum(box.numel for box in boxes) != math.prod(shape) or len(boxes) > _MOST_PAIRS:
        return False
    return all(one.overlap(other) is None for one, other in combinations(boxes, 2))


class _View(io.RawIOBase):
    """Byte range of a file, as a file object."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("a place before the beginning")
        self._place = start + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._place)
        left = max(0, self._length - self._place)
        content = self._file.read(min(len(buffer), left))
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


def _pickled(archive: zipfile.ZipFile, where: str) -> tuple[str, bytes]:
    """Return the name of the folder within a torch.save archive, and the content of its pickle."""
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{where}: a compressed member, which torch.save never writes")
    names = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
    if len(names) != 1:
        raise CheckpointError(f"{where}: not an archive of torch.save: it has {len(names)} pickles")
    return names[0].removesuffix("data.pkl"), archive.read(names[0])


def _tensor_in(view: _View, where: str) -> ArchivedTensor:
    """Locate the tensor in a torch.save archive without reading its elements."""
    keys: list[str] = []

    def storage(saved: Any) -> Any:
        kind, made, key, _, numel = saved
        dtype = made.dtype if isinstance(made, StorageType) else None
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise CheckpointError(f"{where}: a storage of an unknown kind")
        keys.append(key)
        (numel,) = _whole_numbers((numel,))
        untyped = torch.UntypedStorage(numel * dtype.itemsize, device="meta")
        return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)

    with zipfile.ZipFile(view) as archive:
        folder, pickle = _pickled(archive, where)
        like = load_bare(io.BytesIO(pickle), where, len(pickle), storage)
        if not isinstance(like, Tensor) or len(keys) != 1:
            raise CheckpointError(f"{where}: {type(like).__name__} in place of one tensor")
        member = archive.getinfo(f"{folder}data/{keys[0]}")
    view.seek(member.header_offset)
    name, extra = _LOCAL_HEADER.unpack(view.read(_LOCAL_HEADER.size))
    place, length = member.header_offset + _LOCAL_HEADER.size + name + extra, member.file_size
    if like.untyped_storage().nbytes() != length or place + length > view.seek(0, os.SEEK_END):
        raise CheckpointError(f"{where}: its storage has {length:,} bytes, and should have others")
    return ArchivedTensor(
        tuple(like.shape), like.stride(), like.dtype, like.is_contiguous(),
        int(like.storage_offset()), place, length,
    )  # fmt: skip


def load_common(path: Path) -> dict[str, Any]:
    """Return the content of Megatron-Core's common.pt, the state that all ranks share. Raises
    CheckpointError if the file is missing or malformed."""
    content = load_pickle(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a dictionary")
    return content
