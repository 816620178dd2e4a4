"""GGUF files, versions 2 and 3: metadata by key, and memory-mapped tensors.

A file consists of a header (the letters GGUF, the version, the numbers of tensors and of keys), the
keys with their values, a description of each tensor, and, starting at the next multiple of
``general.alignment``, the tensors' bytes (see the description of GGUF in the ggml project). Numbers
are little endian, and tensor dimensions are in reverse order compared with torch. A model may
consist of several files, NAME-00001-of-0000N.gguf, which divide its tensors; the first has the
metadata.

Every size in a file is checked against the file's length before it is used.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError

MAGIC = b"GGUF"
ALIGNMENT = 32
"""Alignment of files that do not specify one."""
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
"""Format character of the module struct for each scalar type; type 7 is a boolean."""
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_MOST_ELEMENTS = 2**22
"""Maximum number of elements in a metadata array. Published vocabularies have up to 2^18 tokens."""
_LONGEST_STRING = 2**24
_MOST_DIMENSIONS = 4
F32, F16, BF16, F64 = 0, 1, 30, 28
PLAIN = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, F64: torch.float64}
"""Torch dtype of each tensor type that torch supports."""


class StoredTensor(NamedTuple):
    """A tensor in a file: the number of its ggml type, its shape in torch's order, and its
    bytes."""

    path: Path
    kind: int
    shape: tuple[int, ...]
    data: memoryview


class GGUFFile:
    """Metadata and tensors of a model in one or several files. Raises CheckpointError if one of its
    files is missing, truncated or inconsistent."""

    def __init__(self, path: Path) -> None:
        self.path, self.tensors = path, dict[str, StoredTensor]()
        self.metadata: Mapping[str, Any] = {}
        parts = _parts_of(path)
        for number, part in enumerate(parts):
            metadata, tensors = _Part(part).content()
            _check_split(part, metadata, number, len(parts))
            self.metadata = self.metadata or metadata
            if repeated := self.tensors.keys() & tensors.keys():
                raise CheckpointError(f"{part}: {min(repeated)!r} is in another part too")
            self.tensors |= tensors
        count = self.metadata.get("split.tensors.count")
        if count is not None and count != len(self.tensors):
            raise CheckpointError(
                f"{path}: split.tensors.count is {count}, but its parts have {len(self.tensors)}"
            )

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, or its slice ``index`` along the first dimension, on the CPU. Quantised
        tensors are dequantised to float32. Raises CheckpointError if the package gguf cannot
        dequantise the tensor's type."""
        path, kind, shape, data = self.tensors[name]
        if index is not None:
            size = len(data) // shape[0]
            shape, data = shape[1:], data[index * size : (index + 1) * size]
        if not len(data):
            return torch.empty(shape, dtype=PLAIN.get(kind, torch.float32))
        if kind in PLAIN:
            # Copied, since the mapped file is read-only and its tensors need not be aligned.
            copied = torch.frombuffer(bytearray(data), dtype=PLAIN[kind])
            return copied.reshape(shape)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        form = GGMLQuantizationType(kind)
        rows = np.frombuffer(data, dtype=np.uint8).reshape(math.prod(shape[:-1]), -1)
        try:
            with np.errstate(all="ignore"):  # scales of a damaged file may be infinite
                values = dequantize(rows, form)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: {name} is {form.name}, which the package gguf cannot dequantise"
            ) from None
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(shape)


def _parts_of(path: Path) -> list[Path]:
    """Return the paths of all files of the model to which ``path`` belongs, in order."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    if not 1 <= int(count) <= 9999:
        raise CheckpointError(f"{path}: a model of {int(count)} parts is not possible")
    parts = [path.with_name(f"{stem}-{n:05d}-of-{count}.gguf") for n in range(1, int(count) + 1)]
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part} is missing; {path.name} is one of {int(count)} parts")
    return parts


def _check_split(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    said = metadata.get("split.no", number), metadata.get("split.count", count)
    if said not in ((number, count), (number, 0)):
        raise CheckpointError(
            f"{path} says that it is part {said[0]} of {said[1]} (split.no, split.count), but by "
            f"its name it is {number} of {count}"
        )


class _Part:
    """Reader of a single file, which reads from the beginning."""

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.what = path, 0, "its header"
        try:
            with path.open("rb") as file:
                mapped: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        self.data = memoryview(mapped)

    def content(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        """Return the metadata by key, and the tensors by name."""
        if self._bytes(4) != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        (version,) = self._numbers("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            reason = "it is big endian" if swapped else f"version {version}"
            self._refuse(f"{reason}; versions 2 and 3 in little endian are read")
        tensors, keys = self._numbers("QQ")
        self._check_count(keys, 8 + 4 + 1, "keys")
        self._check_count(tensors, 8 + 4 + 8 + 4 + 8, "tensors")
        metadata = dict[str, Any]()
        for _ in range(keys):
            self.what = "the name of a key"
            key = self._string()
            if key in metadata:
                self._refuse(f"it has the key {key!r:.100} twice")
            self.what = f"the value of {key!r:.100}"
            metadata[key] = self._value(self._numbers("I")[0])
        return metadata, self._tensors(tensors, metadata.get("general.alignment", ALIGNMENT))

    def _tensors(self, count: int, alignment: Any) -> dict[str, StoredTensor]:
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment % 8:
            self._refuse(f"general.alignment is {alignment!r:.100}, expected a multiple of 8")
        listed = dict[str, tuple[int, tuple[int, ...], int, int]]()
        for _ in range(count):
            self.what = "the name of a tensor"
            name = self._string()
            self.what = f"the description of {name!r:.100}"
            if name in listed:
                self._refuse(f"it has the tensor {name!r:.100} twice")
            (dimensions,) = self._numbers("I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                self._refuse(f"{name!r:.100} has {dimensions} dimensions, expected 1 to 4")
            shape = tuple(reversed(self._numbers(f"{dimensions}Q")))
            kind, offset = self._numbers("IQ")
            listed[name] = kind, shape, offset, self._size(name, kind, shape)
            if offset % alignment:
                self._refuse(f"{name!r:.100} begins at {offset}, not a multiple of {alignment}")
        start = -(-self.at // alignment) * alignment
        self._check_places(listed, start)
        return {
            name: StoredTensor(
                self.path, kind, shape, self.data[start + offset : start + offset + size]
            )
            for name, (kind, shape, offset, size) in listed.items()
        }

    def _check_places(
        self, listed: dict[str, tuple[int, tuple[int, ...], int, int]], start: int
    ) -> None:
        """Raise CheckpointError if tensors overlap or extend beyond the file."""
        end, before = 0, ""
        for name, (_, shape, offset, size) in sorted(listed.items(), key=lambda item: item[1][2]):
            if start + offset + size > len(self.data):
                self._refuse(
                    f"{name!r:.100} {shape} needs {size:,} bytes from {start + offset:,}, but the "
                    f"file has {len(self.data):,}: it is truncated, or its header is wrong"
                )
            if offset < end:
                self._refuse(f"{name!r:.100} and {before!r:.100} share bytes")
            end, before = offset + size, name

    def _size(self, name: str, kind: int, shape: tuple[int, ...]) -> int:
        """Return the size of a tensor in bytes."""
        if kind in PLAIN:
            return math.prod(shape) * PLAIN[kind].itemsize
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            self._refuse(f"{name!r:.100} has the type {kind}, which the package gguf does not know")
        if shape[-1] % elements:
            self._refuse(
                f"rows of {name!r:.100} are {shape[-1]} elements, not blocks of {elements}"
            )
        return math.prod(shape) // elements * size

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        element, count = self._numbers("IQ")
        if count > _MOST_ELEMENTS:
            self._refuse(f"{self.what} is an array of {count:,}, more than {_MOST_ELEMENTS:,}")
        if element == _STRING:
            self._check_count(count, 8, f"elements of {self.what}")
            return [self._string() for _ in range(count)]
        return self._scalars(element, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            self._refuse(f"{self.what} has the type {kind}, which is not known here")
        numbers = list(self._numbers(f"{count}{_SCALARS[kind]}"))
        if kind == _BOOL:
            return [bool(number) for number in numbers]
        # Use the shortest decimal that rounds to the same float32: 1e-05, not 9.99999974e-06.
        return [float(str(np.float32(n))) for n in numbers] if kind == _FLOAT32 else numbers

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        if length > _LONGEST_STRING:
            self._refuse(f"{self.what} is a text of {length:,} bytes")
        try:
            return str(self._bytes(length), "utf-8")
        except UnicodeDecodeError as error:
            self._refuse(f"{self.what} is not UTF-8: {error.reason}")

    def _numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))

    def _bytes(self, count: int) -> memoryview:
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            self._refuse(f"it ends within {self.what}: it is truncated, or its header is wrong")
        return self.data[start : self.at]

    def _check_count(self, count: int, least: int, what: str) -> None:
        if count * least > len(self.data) - self.at:
            self._refuse(f"it says that it has {count:,} {what}, for which it is too short")

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {why}")


Content = dict[str, Any]
"""Content of a config.json of `transformers`, or some of its keys."""
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
"""Keys that can be ignored: the vocabulary size follows from the token embedding, and the others
describe the model's origin."""


class Keys:
    """Metadata of an architecture, by key without the architecture's prefix.

    Attributes:
        tensors: names of the tensors in the file.
        values: function that returns a tensor's values.
    """

    def __init__(
        self, metadata: Mapping[str, Any], name: str, tensors: Collection[str],
        values: Callable[[str], Tensor], where: str,
    ) -> None:  # fmt: skip
        self.metadata, self.tensors, self.values = metadata, tensors, values
        self._name, self._where, self._read = name, where, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` if it is missing. Raises CheckpointError if
        ``default`` is a number and the value is not a number of the same type."""
        self._read.add(key)
        value = self.metadata.get(f"{self._name}.{key}", default)
        kinds: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float)}
        if type(value) not in kinds.get(type(default), (type(value),)):
            self.refuse(key, f"expected a number, as {default}")
        return value

    def require(self, key: str) -> Any:
        """Return the value of a key. Raises CheckpointError if it is missing."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self._where} has no {self._name}.{key}")
        return value

    def whole(self, key: str) -> int:
        """Return the value of a key, a positive integer. Raises CheckpointError if it is missing or
        anything else."""
        value = self.require(key)
        if type(value) is not int or value < 1:
            self.refuse(key, "expected a positive integer")
        return value

    def only(self, key: str, value: Any) -> None:
        """Raise CheckpointError if a key is present and its value is not ``value``."""
        if self.get(key, value) != value:
            self.refuse(key, f"expected {value}")

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise a CheckpointError about the value of a key."""
        value = f"{self.metadata.get(f'{self._name}.{key}')!r:.100}"
        raise CheckpointError(f"{self._where}: {self._name}.{key} is {value}: {why}")

    def refuse_tensor(self, name: str, why: str) -> NoReturn:
        """Raise a CheckpointError about a tensor."""
        raise CheckpointError(f"{self._where}: {name}: {why}")

    def refuse_the_rest(self) -> None:
        """Raise CheckpointError if there are keys that were not read and that may have an
        effect."""
        prefix = f"{self._name}."
        for key in self.metadata:
            short = key.removeprefix(prefix)
            if key.startswith(prefix) and short not in self._read | _HARMLESS:
                self.refuse(short, "its effect on such a model is not known")
