"""Checks of whether torch.compile can be used. Only the check for CPUs imports torch's compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch._compile import _disable_dynamo

FIRST_CAPABILITY = (7, 0)
"""Compute capability of the oldest GPUs that Triton supports."""


untraced = _disable_dynamo
"""Decorator for functions that torch's compiler must not trace. Unlike ``torch.compiler.disable``,
it imports the compiler at the first call and not when the function is defined. That import fails
while ZeRO 3 builds a model, because torch's constructors are replaced then."""


@cache
def missing_compiler(device_type: str) -> str | None:
    """Return a message about what torch.compile lacks on a type of device ("cpu", "cuda"). Return
    None if nothing is missing. For CPUs this imports torch's compiler, which takes seconds."""
    if device_type == "cuda":
        return _missing_for_gpus()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler found"
    return None


def allow_graphs(count: int) -> None:
    """Allow at least ``count`` compiled versions of a function, by raising torch's limit. Above the
    limit, torch runs a function uncompiled. This imports the settings of torch's compiler."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, count)


def _missing_for_gpus() -> str | None:
    # Triton compiles the code that launches its kernels, which includes Python's headers.
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "no C compiler found"
    if not _finds_python_headers():
        folder = sysconfig.get_path("include")
        return f"no Python.h in {folder} (python3-dev, python3-devel)"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        needed = ".".join(map(str, FIRST_CAPABILITY))
        return f"Triton needs a GPU of compute capability {needed} or more"
    return None


def _finds_python_headers() -> bool:
    folders = [sysconfig.get_path("include")]
    for name in ("CPATH", "C_INCLUDE_PATH"):  # gcc and clang search these, too
        folders += os.environ.get(name, "").split(os.pathsep)
    return any(folder and Path(folder, "Python.h").is_file() for folder in folders)
