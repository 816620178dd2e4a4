"""torch.compile for the repeated blocks, where there is a compiler."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.config.engine import GRAPH_MODES
from megatron.model.rope import rope_table
from megatron.util.processes import is_main_process


def compile_blocks(blocks: Sequence[nn.Module], mode: str, device: torch.device) -> None:
    """Compiles every block in place; without a compiler they stay eager, said in a line.

    Blocks of the same shape share what was compiled for the first. Shapes are compiled as they are:
    another sequence length is compiled for anew.

    Args:
        blocks: the blocks of this process.
        mode: what torch.compile optimises; see ``--torch-compile-mode``.
        device: where the model runs.
    """
    if device.type == "cuda":
        # Triton compiles the code that starts its kernels, against Python.
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            return _stay_eager("no C compiler found")
        if not _finds_python_headers():
            folder = sysconfig.get_path("include")
            return _stay_eager(f"no Python.h in {folder} (python3-dev, python3-devel)")
    if device.type == "cpu":
        # Seconds to import, and needed here only.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return _stay_eager("no C++ compiler found")
    # Not where the function is: the mark brings in torch's compiler, a second of every start.
    torch.compiler.assume_constant_result(rope_table)
    for block in blocks:
        block.compile(mode=mode, dynamic=False)
        if device.type == "cuda" and mode in GRAPH_MODES:
            _keep_gradients_out_of_graphs(block)


def runs_graphs(config: RunConfig, device: torch.device) -> bool:
    """Whether blocks run as CUDA graphs, so that ``torch.compiler.cudagraph_mark_step_begin`` is
    due before each pass through the model.

    A graph writes its outputs to the same place every time. Left alone, torch takes every compiled
    block for a step of its own that may overwrite the one before: without a backward pass to come,
    as in an evaluation, a block would overwrite its own input (pytorch issue 160281).
    """
    fast = config.fast_paths
    return fast.torch_compile and fast.torch_compile_mode in GRAPH_MODES and device.type == "cuda"


def _keep_gradients_out_of_graphs(block: nn.Module) -> None:
    """Has the first gradient of every parameter copied.

    Autograd would keep the graph's own output as ``grad``, which the next micro batch overwrites
    before its gradients are added: the sum is wrong, and nothing says so (pytorch issue 169545).
    """
    for param in block.parameters():
        param.register_hook(partial(_own_gradient, param))


def _own_gradient(param: nn.Parameter, grad: Tensor) -> Tensor | None:
    return grad.clone() if param.grad is None else None


def _finds_python_headers() -> bool:
    folders = [sysconfig.get_path("include")]
    for name in ("CPATH", "C_INCLUDE_PATH"):  # where gcc and clang look too
        folders += os.environ.get(name, "").split(os.pathsep)
    return any(folder and Path(folder, "Python.h").is_file() for folder in folders)


def _stay_eager(reason: str) -> None:
    if is_main_process():
        print(f"--torch-compile: {reason}; the blocks run eagerly", flush=True)
