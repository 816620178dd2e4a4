"""Safe unpickling of other programs' files, without running the code that they refer to.

A pickle names functions and classes, and calls them. This unpickler looks names up in a short list
of torch's own constructors of tensors and plain containers. Other trainers' settings objects are
replaced by inert stand-ins that keep their values. Every other name is refused before anything is
called.

A few bytes can also demand any amount of memory or time: a ``range`` of a billion numbers, a copy
of a copy of a list, or a key whose hash takes hours. Therefore copied values are counted, and
shared values count as often as they occur. ``torch.load(weights_only=True)`` has no such limits.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy
import torch
import torch._utils
from torch import Tensor
from torch.serialization import StorageType

from megatron.checkpoint.files import CheckpointError
from megatron.util.files import open_regular

_INERT_PACKAGES = ("deepspeed", "megatron", "apex", "pathlib", "omegaconf")
"""Packages whose classes are settings in checkpoints. Their code is neither imported nor run."""
_INERT_MODULES = "torch.distributed.checkpoint."
"""Prefix of the modules whose classes describe a sharded checkpoint's files."""
_MAGIC = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
"""First bytes of torch.save's older format: a pickled magic number."""
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")
"""Pattern for NumPy's codes of numeric dtypes."""
_MOST_VALUES = 1 << 24
"""Maximum number of values in one file. A shared value counts as often as it occurs."""
_FEW_VALUES = 1 << 20
"""Number of values that a file of any size may contain. More values require a file of at least as
many bytes."""
_MAX_DEPTH = 100
"""Maximum nesting depth of containers."""
_CONTAINERS = (list, tuple, dict, set, frozenset)


class _Frozen(type):
    """Metaclass for classes that a pickle must not change, as a pickle can set attributes of any
    object that it names."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__} cannot be changed")

    def __delattr__(cls, name: str) -> None:
        raise TypeError(f"{cls.__name__} cannot be changed")


class Inert(metaclass=_Frozen):
    """Stand-in for an object whose class is not imported. It keeps its arguments and state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        inert = super().__new__(cls)
        inert.__dict__["args"] = args
        return inert

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:  # one with instance attributes, and one with slots
            if isinstance(part, dict):
                self.__dict__.update(part)


class Namespace(argparse.Namespace, metaclass=_Frozen):
    """Stand-in for argparse's namespace, which has the settings of a run."""


class DType(Inert):
    """Stand-in for a NumPy dtype."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def number(self, data: bytes) -> int | float | bool:
        """Decode a number from its bytes. Raises UnpicklingError if the dtype is not numeric."""
        code = self.args[0] if self.args else None  # type: ignore[attr-defined]
        if not isinstance(code, str) or not _NUMBERS.fullmatch(code):
            raise pickle.UnpicklingError("it has a NumPy value that is not a number")
        big_endian = ">" in str(self.__dict__.get("state", "<"))
        (number,) = numpy.frombuffer(data, numpy.dtype((">" if big_endian else "<") + code))
        return number.item()


class Properties(Inert):
    """Stand-in for a tensor's properties in a sharded checkpoint. The dtype is the first item of
    ``state``."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _Callable:
    """Function that a pickle can call but not change."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("a function cannot be changed")

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _encode(text: str, encoding: str) -> bytes:
    """Return bytes that Python 3 pickled in protocol 2, as text to encode."""
    return text.encode("latin1" if encoding == "latin1" else "utf-8")


def _member(owner: Any, name: Any) -> Inert:
    """Return a member of a stand-in enumeration. Python 3.11.0 to 3.11.3 pickle it as a getattr
    call. Raises UnpicklingError for any other getattr call."""
    if isinstance(owner, type) and issubclass(owner, Inert) and isinstance(name, str):
        return owner(name)
    raise pickle.UnpicklingError("it calls builtins.getattr, which no checkpoint needs")


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> Tensor:
    if any(rest[2:]):  # flags for conjugated or negated tensors
        raise pickle.UnpicklingError("it has a tensor with metadata")
    count = math.prod(size) if all(isinstance(each, int) for each in size) else -1
    if not 0 <= count <= storage._size():  # strides of 0 would allow any number of values
        raise pickle.UnpicklingError(
            f"it has a tensor of {count:,} values in a storage of {storage._size():,}"
        )
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


def _from_type(function: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """Rebuild a tensor without its attributes, such as those of Megatron's float32 weights."""
    if not isinstance(function, _Callable):
        raise pickle.UnpicklingError("it builds a tensor by something that is not a function")
    return function(*args)


def _scalar(dtype: Any, data: Any = b"") -> int | float | bool:
    if not isinstance(dtype, DType) or not isinstance(data, bytes):
        raise pickle.UnpicklingError("it has a NumPy value that is not a number")
    return dtype.number(data)


def _bytearray(*args: Any) -> bytearray:
    if any(isinstance(each, int) for each in args):
        raise pickle.UnpicklingError("it asks for a bytearray by its length")
    return bytearray(*args)


def _str(*args: Any) -> str:
    if args and not isinstance(args[0], str | bytes | bytearray):
        raise pickle.UnpicklingError("it asks for the text of an object")
    return str(*args)


def _inert(name: str, module: str | None = None) -> type:
    """Create a stand-in class with a name."""
    return _Frozen(name, (Inert,), {"__module__": module} if module else {})


_PARAMETER = _Callable(lambda data, *rest: data)
# A checkpoint's NumPy arrays are its random state, which is not read.
_ARRAY = _Callable(Inert)
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("argparse", "Namespace"): Namespace,
    ("_codecs", "encode"): _Callable(_encode),
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor"): _Callable(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Callable(_tensor),
    ("torch._utils", "_rebuild_parameter"): _PARAMETER,
    ("torch._utils", "_rebuild_parameter_with_state"): _PARAMETER,
    ("torch._tensor", "_rebuild_from_type_v2"): _Callable(_from_type),
    # These are only arguments that record a tensor's class.
    ("torch.nn.parameter", "Parameter"): _inert("Parameter"),
    ("torch", "Tensor"): _inert("Tensor"),
    ("torch.serialization", "_get_layout"): _Callable(Inert),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): Properties,
    ("numpy", "dtype"): DType,
    ("numpy", "ndarray"): _inert("ndarray"),
}
"""Everything that a pickle can call, by module and name. A test checks that it is all immutable."""
_KNOWN |= {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
for _module in ("builtins", "__builtin__"):
    for _kind in (set, frozenset, dict, list, tuple, int, float, bool, complex, slice):
        _KNOWN[_module, _kind.__name__] = _kind
    for _name, _function in (("bytearray", _bytearray), ("str", _str), ("getattr", _member)):
        _KNOWN[_module, _name] = _Callable(_function)
    _KNOWN[_module, "range"] = _inert("range")
for _core in ("numpy.core", "numpy._core"):
    _KNOWN[f"{_core}.multiarray", "_reconstruct"] = _ARRAY
    _KNOWN[f"{_core}.multiarray", "scalar"] = _Callable(_scalar)
    _KNOWN[f"{_core}.numeric", "_frombuffer"] = _ARRAY


_PYTHON: Any = pickle._Unpickler


class _Unpickler(_PYTHON):  # type: ignore[misc]
    """Python's unpickler with a list of allowed names. torch derives its own unpickler from this
    class.

    It is the implementation in Python, because the C version allocates room for as many objects as
    a file claims (32 GiB for five bytes). It reads everything in a checkpoint except the elements
    of tensors.
    """

    dispatch = dict(_PYTHON.dispatch)
    most_copied = _FEW_VALUES
    """Maximum number of container items and characters that calls may copy."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._left = self.most_copied

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        inert = module.partition(".")[0] in _INERT_PACKAGES or module.startswith(_INERT_MODULES)
        if inert and "." not in name:
            return _inert(name, module)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")

    def check_call(self, function: Any, args: Any) -> None:
        """Count the values that a call copies, and check the keys that it hashes."""
        for each in args:
            if isinstance(each, (*_CONTAINERS, str, bytes, bytearray)):
                self._left -= len(each)
        if self._left < 0:
            raise pickle.UnpicklingError("it copies values again and again")
        if function in (set, frozenset):
            _check_keys(*args)
        elif isinstance(function, type) and issubclass(function, dict):
            for each in args:
                if isinstance(each, list | tuple):
                    _check_keys(pair[0] for pair in each if isinstance(pair, list | tuple) and pair)

    def _instantiate(self, klass: Any, args: Any) -> None:
        self.check_call(klass, args)
        super()._instantiate(klass, args)

    def check_named_call(self) -> None:
        """Check a call with keyword arguments. The class and its arguments are on the stack."""
        cls, args, named = self.stack[-3:]
        self.check_call(cls, (*args, *named.values()))

    def check_storage(self) -> None:
        """Raise UnpicklingError if a storage's persistent id has a container, whose hash could take
        too long."""
        saved_id = self.stack[-1]
        if isinstance(saved_id, tuple) and any(isinstance(e, _CONTAINERS) for e in saved_id[:5]):
            raise pickle.UnpicklingError("it has a storage whose name is none")


def _check_before(opcode: bytes, check: Callable[[_Unpickler], None]) -> None:
    """Make the unpickler run a check before it executes an opcode."""
    execute = _PYTHON.dispatch[opcode[0]]

    def checked(unpickler: _Unpickler) -> None:
        check(unpickler)
        execute(unpickler)

    _Unpickler.dispatch[opcode[0]] = checked


_check_before(pickle.BINPERSID, _Unpickler.check_storage)
_check_before(pickle.REDUCE, lambda reader: reader.check_call(*reader.stack[-2:]))
_check_before(pickle.NEWOBJ, lambda reader: reader.check_call(*reader.stack[-2:]))
_check_before(pickle.NEWOBJ_EX, _Unpickler.check_named_call)
_check_before(pickle.BUILD, lambda reader: reader.check_call(None, reader.stack[-1:]))
_check_before(pickle.SETITEM, lambda reader: _check_keys(reader.stack[-2:-1]))
# For these opcodes, the stack contains only the items since the last mark.
_check_before(pickle.SETITEMS, lambda reader: _check_keys(reader.stack[::2]))
_check_before(pickle.DICT, lambda reader: _check_keys(reader.stack[::2]))
_check_before(pickle.ADDITEMS, lambda reader: _check_keys(reader.stack))
_check_before(pickle.FROZENSET, lambda reader: _check_keys(reader.stack))


def _check_keys(keys: Iterable[Any]) -> None:
    """Raise UnpicklingError if a key is a tuple that contains tuples. Hashing it visits each inner
    tuple as often as it occurs: 2^n times if each of n tuples contains the next one twice."""
    for key in keys:
        if isinstance(key, tuple | frozenset) and any(
            isinstance(part, tuple | frozenset) for part in key
        ):
            raise pickle.UnpicklingError("it has a key made of nested tuples")


def _check_values(content: Any, most: int) -> None:
    """Raise UnpicklingError if there are more than ``most`` values, where shared values count as
    often as they occur, or if containers contain themselves."""
    level: list[Any] = [content]
    count, closed = 0, set[int]()
    for _ in range(_MAX_DEPTH):
        inside: list[Any] = []
        for each in level:
            if isinstance(each, Inert) and id(each) in closed:  # a stand-in may refer to its owner
                continue
            closed.add(id(each))
            values = vars(each) if isinstance(each, Inert | Namespace) else each
            inside += values.values() if isinstance(values, dict) else values
        count += len(inside)
        if count > most:
            raise pickle.UnpicklingError(f"it has more than {most:,} values")
        level = [each for each in inside if isinstance(each, (*_CONTAINERS, Inert, Namespace))]
        if not level:
            return
    raise pickle.UnpicklingError(f"its containers are nested more than {_MAX_DEPTH} levels deep")


def _restricted(most: int) -> SimpleNamespace:
    """Return a replacement for the module pickle, for torch.load."""
    unpickler = type("Unpickler", (_Unpickler,), {"most_copied": most})

    def load(file: Any, **options: Any) -> Any:
        return unpickler(file, **options).load()

    return SimpleNamespace(__name__="restricted", Unpickler=unpickler, load=load)


def load_pickle(path: Path, name: str = "") -> Any:
    """Load a torch.save file in its zip format or its older one. Tensors are on the CPU, and
    memory-mapped from a zip file. Raises CheckpointError if the file is missing or damaged,
    contains anything but tensors, containers and settings, or exceeds the limits on memory and
    time. The message calls the file ``name``."""
    name = name or str(path)

    def load() -> Any:
        with open_regular(path) as file:
            mapped = _check_form(file, name)
            most = max(os.fstat(file.fileno()).st_size, _FEW_VALUES)
        return torch.load(
            path,
            map_location="cpu",
            pickle_module=_restricted(most),
            weights_only=False,
            mmap=mapped,
        )

    return _refusing(load, name, path.stat().st_size if path.is_file() else 0)


def _refusing(load: Callable[[], Any], name: str, size: int) -> Any:
    """Return what ``load`` returns for a file of ``size`` bytes, if it is within the limits. Errors
    become a CheckpointError that calls the file ``name``."""
    try:
        content = load()
        if isinstance(content, (*_CONTAINERS, Inert, Namespace)):
            _check_values(content, min(max(size, _FEW_VALUES), _MOST_VALUES))
        return content
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing") from None
    except (MemoryError, RecursionError) as error:
        reason = "memory" if isinstance(error, MemoryError) else "levels of containers"
        raise CheckpointError(f"{name} cannot be opened: it needs too much {reason}") from None
    except Exception as error:  # a damaged pickle can raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{name} cannot be opened: {reason[:500]}") from None


class _BareUnpickler(_Unpickler):
    """Unpickler that calls a given function to create the storages of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return StorageType(name)
        return super().find_class(module, name)


def load_bare(
    file: BinaryIO, name: str, size: int, storage: Callable[[Any], Any] | None = None
) -> Any:
    """Load a pickle of ``size`` bytes that is not in a torch.save archive. ``storage`` creates a
    tensor's storage from its persistent id. Raises the errors of :func:`load_pickle`."""
    unpickler = type("Unpickler", (_BareUnpickler,), {"most_copied": max(size, _FEW_VALUES)})

    def load() -> Any:
        reader = unpickler(file)
        if storage is not None:
            reader.persistent_load = storage
        return reader.load()

    return _refusing(load, name, size)


def _check_form(file: BinaryIO, name: str) -> bool:
    """Return whether the file can be memory-mapped. Raises CheckpointError for forms in which
    torch.load would run code."""
    head = file.read(32)
    file.seek(0)
    if head[:4] == b"PK\x03\x04":
        # Use torch's own reader, because another one could find different members in the same file.
        reader = torch._C.PyTorchFileReader(file)
        members = reader.get_all_records()
        if "constants.pkl" in members or "data.pkl" not in members:
            raise CheckpointError(f"{name} is a zip file, but not one that torch.save wrote")
        if _declared_bytes(reader, file) > file.seek(0, os.SEEK_END):
            raise CheckpointError(
                f"{name} is a zip file with compressed members, which torch.save never writes"
            )
        return True
    if not _MAGIC.match(head) or _is_tar(file):
        raise CheckpointError(f"{name} is not a file that torch.save wrote")
    return False


def _declared_bytes(reader: Any, file: BinaryIO) -> int:
    """Return the total unpacked size, in bytes, that a zip file declares for its members."""
    if hasattr(reader, "get_record_size"):  # since torch 2.13
        return sum(map(reader.get_record_size, reader.get_all_records()))
    with zipfile.ZipFile(file) as archive:
        return sum(member.file_size for member in archive.infolist())


def _is_tar(file: Any) -> bool:
    """Return whether torch would treat the file as its oldest format, and unpack it to disk."""
    try:
        tarfile.open(fileobj=file, mode="r:").close()
    except tarfile.TarError:
        return False
    finally:
        file.seek(0)
    return True
