"""Opens pickles that other programs wrote, without running what they ask for.

A pickle names functions and classes, and calls them. Here a name is looked up in a short list:
torch's own constructors of tensors, plain containers, and settings objects of other trainers, for
which an inert stand-in keeps the values. Every other name is refused before anything is called.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import zipfile
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy
import torch
import torch._utils

from megatron.checkpoint.files import CheckpointError


class Inert:
    """Stands for an object of a class that is not here: it keeps what it is given."""

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


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 pickles bytes for Python 2."""
    return text.encode("latin1" if encoding == "latin1" else "utf-8")


_TORCH_DTYPES = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_NUMPY = {"dtype": numpy.dtype, "ndarray": numpy.ndarray}
_RECONSTRUCT = numpy.zeros(1).__reduce__()[0]
_SCALAR = numpy.float64(1).__reduce__()[0]

_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "tuple"): tuple,
    ("builtins", "int"): int,
    ("builtins", "float"): float,
    ("builtins", "bool"): bool,
    ("builtins", "str"): str,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("builtins", "range"): range,
    ("argparse", "Namespace"): argparse.Namespace,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch", "Tensor"): torch.Tensor,
    **{("torch", name): value for name, value in _TORCH_DTYPES.items()},
    **{("numpy", name): value for name, value in _NUMPY.items()},
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy.core.multiarray", "scalar"): _SCALAR,
    ("numpy._core.multiarray", "scalar"): _SCALAR,
}
"""What may be called, by module and name."""

_INERT_PACKAGES = ("deepspeed", "megatron", "apex", "pathlib", "omegaconf")
"""Packages whose classes are settings in a checkpoint; none of their code is imported or run."""


class _Unpickler(pickle.Unpickler):
    """Python's unpickler with a list of what may be named; torch derives its own from this."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module.partition(".")[0] in _INERT_PACKAGES and "." not in name:
            return type(name, (Inert,), {"__module__": module})
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


_RESTRICTED = SimpleNamespace(__name__="restricted", Unpickler=_Unpickler, load=_load)
"""What torch.load takes for the pickle module."""


def load_pickle(file: Path | BinaryIO) -> Any:
    """What torch.save wrote, in its zip or its older form; tensors on the CPU.

    Tensors of a zip file on disk are mapped into memory, and read when they are looked at.

    Args:
        file: a path, or an open seekable file (a member of an archive).

    Raises:
        CheckpointError: it is damaged, no such file, or asks for anything but tensors, containers
            and settings.
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
    """Whether the file can be mapped; torch.load would run code of some other forms."""
    if isinstance(file, Path):
        with open(file, "rb") as opened:
            return _check_form(opened, name)
    head = file.read(4)
    file.seek(0)
    if head == b"PK\x03\x04":
        with zipfile.ZipFile(file) as archive:
            members = [PurePosixPath(member).name for member in archive.namelist()]
        file.seek(0)
        if "constants.pkl" in members or "data.pkl" not in members:
            raise CheckpointError(f"{name} is a zip file, but not one that torch.save wrote")
        return True
    if head[:1] != b"\x80":
        raise CheckpointError(f"{name} is not a file that torch.save wrote")
    return False
