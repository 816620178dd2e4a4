"""torch.compile for the repeated blocks, where there is a compiler."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import torch
from torch import nn

from megatron.engine.environment import is_main_process


def compile_blocks(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Compiles every block in place; without a compiler they stay eager, said in a line."""
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
    for block in blocks:
        block.compile()


def _stay_eager(language: str) -> None:
    if is_main_process():
        print(f"--torch-compile: no {language} compiler found; the blocks run eagerly", flush=True)
