"""Landlock, by which Linux keeps a thread and what it starts to some folders, whatever opens the
files: Python's audit hooks do not see the opens of libraries."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE, _ADD, _RESTRICT, _NO_NEW_PRIVILEGES = 444, 445, 446, 38
_WRITE, _READ, _REMOVE, _MAKE, _REFER, _TRUNCATE = 1 << 1, 1 << 2, 1 << 5, 1 << 8, 1 << 13, 1 << 14
_BIND, _CONNECT = 1, 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Of the kernel's Landlock; 0 without."""
    return max(0, _LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), 1))


def confine(own: Iterable[Path], readable: Iterable[Path], connects: bool) -> bool:
    """From here on this thread, and those that it starts, write below the folders ``own`` only,
    read there and below ``readable``, and open no connection unless ``connects``. Returns whether
    the kernel can do that."""
    known = version()
    if not known:
        return False
    files = _WRITE | _READ | _REMOVE | _MAKE
    files |= (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0)
    attributes = struct.pack("<QQ", files, 0 if connects else _BIND | _CONNECT)
    size = 16 if known >= 4 else 8
    rules = _checked(_LIBC.syscall(_CREATE, attributes, ctypes.c_size_t(size), 0))
    for paths, rights in ((own, files), (readable, _READ)):
        for path in paths:
            if not path.exists():
                continue
            place = os.open(path, os.O_PATH)
            allowed = rights if path.is_dir() else rights & (_WRITE | _READ | _TRUNCATE)
            beneath = struct.pack("<Qi", allowed, place)
            _checked(_LIBC.syscall(_ADD, rules, 1, beneath, 0))
            os.close(place)
    _checked(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(_LIBC.syscall(_RESTRICT, rules, 0))
    os.close(rules)
    return True


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock")
    return result
