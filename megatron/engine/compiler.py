"""Whether torch.compile has what it needs on this machine."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch


def missing_for_compiler(device: torch.device) -> str | None:
    """What torch.compile lacks to generate code for a device, as a phrase; None if nothing. For a
    CPU this imports torch's compiler."""
    if device.type == "cuda":
        # Triton compiles the code that launches its kernels, with Python's headers.
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            return "no C compiler found"
        if not _finds_python_headers():
            folder = sysconfig.get_path("include")
            return f"no Python.h in {folder} (python3-dev, python3-devel)"
    if device.type == "cpu":
        # These take seconds to import.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "no C++ compiler found"
    return None


def _finds_python_headers() -> bool:
    folders = [sysconfig.get_path("include")]
    for name in ("CPATH", "C_INCLUDE_PATH"):  # where gcc and clang look too
        folders += os.environ.get(name, "").split(os.pathsep)
    return any(folder and Path(folder, "Python.h").is_file() for folder in folders)
