"""Opens pickles of other programs without running the code that they name.

A pickle names functions and classes, and calls them. Here names are looked up in a short list:
torch's own constructors of tensors, plain containers, and settings objects of other trainers, whose
values an inert stand-in keeps. Every other name is refused before anything is called.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy
import torch
import torch._utils
from torch import Tensor

from megatron.checkpoint.files import CheckpointError


class _Frozen(type):
    """Classes that a pickle cannot change: it can set attributes of every object that it names."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__} cannot be changed")

    def __delattr__(cls, name: str) -> None:
        raise TypeError(f"{cls.__name__} cannot be changed")


class Inert(metaclass=_Frozen):
    """A stand-in for an object of an unknown class, which keeps its arguments and state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        found = super().__new__(cls)
        found.__dict__["args"] = args
        return found

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        slots: Any = None
        if isinstance(state, tuple) and len(state) == 2:
            state, slots = state
        for part in (state, slots):
            if isinstance(part, dict):
                self.__dict__.update(part)


class Namespace(argparse.Namespace, metaclass=_Frozen):
    """The settings of a run."""


class DType(Inert):
    """A NumPy dtype."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def number(self, data: bytes) -> int | float | bool:
        """The number that ``data`` encodes."""
        code = self.args[0] if self.args else None  # type: ignore[attr-defined]
        if not isinstance(code, str) or not _NUMBERS.fullmatch(code):
            raise pickle.UnpicklingError(f"it has a NumPy value of dtype {code!r}")
        big_endian = ">" in str(self.__dict__.get("state", "<"))
        (number,) = numpy.frombuffer(data, numpy.dtype((">" if big_endian else "<") + code))
        return number.item()


_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")


class _Callable:
    """A function that a pickle can call, but not change."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("a function cannot be changed")

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _encode(text: str, encoding: str) -> bytes:
    """Bytes that Python 3 pickled for Python 2."""
    return text.encode("latin1" if encoding == "latin1" else "utf-8")


def _member(owner: Any, name: Any) -> Inert:
    """A member of an enumeration, as Python 3.11.0 to 3.11.3 pickle one; of nothing else."""
    if isinstance(owner, type) and issubclass(owner, Inert) and isinstance(name, str):
        return owner(name)
    raise pickle.UnpicklingError("it calls builtins.getattr, which no checkpoint needs")


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> Tensor:
    if any(rest[2:]):  # conjugated or negated in a flag
        raise pickle.UnpicklingError("it has a tensor with metadata")
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


def _parameter(data: Tensor, *rest: Any) -> Tensor:
    return data


def _from_type(function: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """A tensor without its attributes, which Megatron's float32 weights have."""
    if not isinstance(function, _Callable):
        raise pickle.UnpicklingError("it builds a tensor by something that is not a function")
    return function(*args)


def _scalar(dtype: Any, data: Any = b"") -> int | float | bool:
    if not isinstance(dtype, DType) or not isinstance(data, bytes):
        raise pickle.UnpicklingError("it has a NumPy value that is not a number")
    return dtype.number(data)


def _array(*args: Any) -> Inert:
    """An array, which is not read: in a checkpoint it is NumPy's random state."""
    return Inert(*args)


_TORCH_DTYPES = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}

_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (
            set, frozenset, dict, list, tuple, int, float, bool, str, bytearray, complex, slice,
            range,
        )
    },
    ("argparse", "Namespace"): Namespace,
    ("_codecs", "encode"): _Callable(_encode),
    ("builtins", "getattr"): _Callable(_member),
    ("__builtin__", "getattr"): _Callable(_member),
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor"): _Callable(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Callable(_tensor),
    ("torch._utils", "_rebuild_parameter"): _Callable(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): _Callable(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): _Callable(_from_type),
    # Arguments that say of which class a tensor was.
    ("torch.nn.parameter", "Parameter"): _Frozen("Parameter", (Inert,), {}),
    ("torch", "Tensor"): _Frozen("Tensor", (Inert,), {}),
    **{("torch", name): value for name, value in _TORCH_DTYPES.items()},
    ("numpy", "dtype"): DType,
    ("numpy", "ndarray"): _Frozen("ndarray", (Inert,), {}),
    **{
        (f"numpy.{package}.multiarray", name): _Callable(function)
        for package in ("core", "_core")
        for name, function in (("_reconstruct", _array), ("scalar", _scalar))
    },
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Callable(_array) for core in ("core", "_core")},
}  # fmt: skip
"""Everything that can be called, by module and name. A test makes sure that none of it can be
changed."""

_INERT_PACKAGES = ("deepspeed", "megatron", "apex", "pathlib", "omegaconf")
"""Packages whose classes are settings in a checkpoint; their code is neither imported nor run."""

_MAGIC = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
"""The first bytes of torch.save's older form: the pickle of a number."""


class _Unpickler(pickle.Unpickler):
    """Python's unpickler with a list of allowed names; torch derives its own from this."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module.partition(".")[0] in _INERT_PACKAGES and "." not in name:
            return _Frozen(name, (Inert,), {"__module__": module})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


_RESTRICTED = SimpleNamespace(__name__="restricted", Unpickler=_Unpickler, load=_load)
"""torch.load uses this as the pickle module."""


def load_pickle(file: Path | BinaryIO) -> Any:
    """Loads a file of torch.save, in its zip or its older form; tensors on the CPU.

    Tensors of a zip file on disk are mapped into memory, and read when they are first used. Raises
    CheckpointError if it is missing or damaged, or contains anything but tensors, containers and
    settings.

    Args:
        file: a path, or an open seekable file (a member of an archive).
    """
    name = str(file) if isinstance(file, Path) else getattr(file, "name", "a member")
    try:
        mapped = _check_form(file, name)
        return torch.load(
            file,
            map_location="cpu",
            pickle_module=_RESTRICTED,
            weights_only=False,
            mmap=mapped and isinstance(file, Path),
        )
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{name} cannot be opened: {error}") from None


def _check_form(file: Path | BinaryIO, name: str) -> bool:
    """Whether the file can be mapped; refuses forms whose code torch.load would run."""
    if isinstance(file, Path):
        with open(file, "rb") as opened:
            return _check_form(opened, name)
    head = file.read(32)
    file.seek(0)
    if head[:4] == b"PK\x03\x04":
        # With torch's own reader: another could find other members in the same file.
        reader = torch._C.PyTorchFileReader(file)
        members = reader.get_all_records()
        file.seek(0)
        if "constants.pkl" in members or "data.pkl" not in members:
            raise CheckpointError(f"{name} is a zip file, but not one that torch.save wrote")
        return True
    if not _MAGIC.match(head) or _is_tar(file):
        raise CheckpointError(f"{name} is not a file that torch.save wrote")
    return False


def _is_tar(file: Any) -> bool:
    """Whether torch would treat the file as its oldest form, and unpack it to the disk."""
    try:
        tarfile.open(fileobj=file, mode="r:").close()
    except tarfile.TarError:
        return False
    finally:
        file.seek(0)
    return True
