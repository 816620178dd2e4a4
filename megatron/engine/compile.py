"""torch.compile for the repeated blocks, where there is a compiler."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import torch
from torch import nn

from megatron.engine.environment import is_main_process
from megatron.model.rope import rope_table


def compile_blocks(blocks: Sequence[nn.Module], mode: str, device: torch.device) -> None:
    """Compiles every block in place; without a compiler they stay eager, said in a line.

    Blocks of the same shape share what was compiled for the first. Shapes are compiled as they are:
    another sequence length is compiled for anew.

    Args:
        blocks: the blocks of this process.
        mode: what torch.compile optimises; see ``--torch-compile-mode``.
        device: where the model runs.
    """
    if device.type == "cuda" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        # Triton compiles the code that starts its kernels.
        return _stay_eager("C")
    if device.type == "cpu":
        # Seconds to import, and needed here only.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return _stay_eager("C++")
    # Not where the function is: the mark brings in torch's compiler, a second of every start.
    torch.compiler.assume_constant_result(rope_table)
    for block in blocks:
        block.compile(mode=mode, dynamic=False)


def _stay_eager(language: str) -> None:
    if is_main_process():
        print(f"--torch-compile: no {language} compiler found; the blocks run eagerly", flush=True)
