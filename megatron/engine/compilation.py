"""Decides whether to run a model's blocks with torch.compile, and compiles them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.config.engine import GRAPH_MODES, FastPathsConfig
from megatron.config.features import taking_part
from megatron.config.layouts import WEIGHTS_LATER
from megatron.kernels.compiler import allow_graphs, missing_compiler
from megatron.model.attention_masks import slopes_on
from megatron.model.layer_list import LayerSequence
from megatron.model.rope import rope_table
from megatron.parallel.collectives import Graphs
from megatron.util.processes import is_main_process

LONG_ENOUGH = 200
"""Minimum number of iterations for which ``--torch-compile auto`` compiles. Compiling takes an
estimated minute at the start and saves a sixth of every step: 200 steps of two seconds repay it.
Shorter steps repay it in later starts, which find the code in torch's cache."""

GRAPHS = 256
"""Maximum number of compiled versions of a block. Further ones run eagerly, with a warning. A
curriculum needs two for each sequence length, for training and evaluation. torch's default is 8."""


def to_compile(config: RunConfig, device: torch.device) -> bool:
    """Return whether to compile a run's blocks on this device. Print what ``auto`` chose on a GPU,
    that a compiler is missing, or which flags have no effect without compiled blocks."""
    asked, reason = config.fast_paths.torch_compile, why_eager(config, device)
    if reason is None:
        if asked == "auto":
            iterations = _iterations(config)
            _say(f"auto: {iterations} iterations on a GPU repay it; the blocks are compiled")
        return True
    unused = _shown(config.fast_paths)
    if asked == "on" or (asked == "auto" and (device.type == "cuda" or unused)):
        ending = f"; not used: {', '.join(unused)}" if unused else ""
        _say(f"{reason}; the blocks run eagerly{ending}")
    return False


def why_eager(config: RunConfig, device: torch.device) -> str | None:
    """Return the reason why blocks are not compiled on this device, as text that follows
    ``--torch-compile``. Return None if they are compiled."""
    asked = config.fast_paths.torch_compile
    if asked == "off":
        return asked
    if config.parallel.pipeline_schedule in WEIGHTS_LATER:
        return f"{asked}: {config.parallel.pipeline_schedule} takes backward passes of blocks apart"
    for feature in taking_part():
        reason = feature.why_eager(config, automatic=False)
        if reason is not None:
            return f"{asked}: {reason}"
    if asked == "auto":
        if device.type != "cuda":
            return f"auto: nothing is compiled on a {device.type}"
        iterations = _iterations(config)
        if iterations < LONG_ENOUGH:
            length = f"{iterations} iterations" if iterations else "a run of unknown length"
            return f"auto: {length} may not repay it (from {LONG_ENOUGH})"
        for feature in taking_part():
            reason = feature.why_eager(config, automatic=True)
            if reason is not None:
                return f"auto: {reason}"
    return missing_compiler(device.type)


def _shown(paths: FastPathsConfig) -> list[str]:
    """Return the given flags, with values, that only affect compiled blocks."""
    mode, budget = paths.torch_compile_mode, paths.activation_memory_budget
    flags = [f"--torch-compile-mode {mode}"] * (mode != "default")
    return flags + [f"--activation-memory-budget {budget}"] * (budget is not None)


def _iterations(config: RunConfig) -> int:
    """Return the approximate number of iterations that the flags request, or 0 if unknown."""
    training = config.training
    if training.skip_train:
        return 0
    batch = training.global_batch_size
    by_tokens = (training.train_tokens or 0) // config.model.seq_length // batch
    lengths = (training.train_iters, (training.train_samples or 0) // batch, by_tokens)
    return min(filter(None, lengths), default=0)


def compile_blocks(
    sequences: Sequence[LayerSequence], paths: FastPathsConfig, device: torch.device
) -> None:
    """Compile the forward pass of every block, including the last residual sum of the previous
    block. Blocks of the same shape share compiled code; each sequence length has its own."""
    # Imported late: importing torch's compiler would add a second to every start.
    import torch._functorch.config as autograd

    allow_graphs(GRAPHS)
    budget = paths.activation_memory_budget
    autograd.activation_memory_budget = 1.0 if budget is None else budget
    for table in (rope_table, slopes_on):
        torch.compiler.assume_constant_result(table)
    mode = paths.torch_compile_mode
    if mode in GRAPH_MODES:
        Graphs.between = True
    for sequence in sequences:
        sequence.hand_on()
    for block in (block for sequence in sequences for block in sequence.blocks):
        if not getattr(block, "mlp_is_plain", True):
            # Its shapes depend on values, so a graph would fit only one micro batch.
            mlp = cast(nn.Module, block.mlp)
            mlp.forward = torch.compiler.disable(mlp.forward)  # type: ignore[method-assign]
        # Not ``block`` itself: ZeRO 3's hooks around a block must stay outside its graph.
        forward = torch.compile(block.forward, mode=mode, dynamic=False)
        block.forward = forward  # type: ignore[method-assign]
        if device.type == "cuda" and mode in GRAPH_MODES:
            _keep_gradients_out_of_graphs(block)


def _keep_gradients_out_of_graphs(block: nn.Module) -> None:
    """Make autograd copy each parameter's first gradient. Autograd would keep the graph's own
    output as ``grad``, which the next micro batch overwrites before its gradients are added. The
    sum would be silently wrong (pytorch issue 169545)."""

    def own(param: nn.Parameter, grad: Tensor) -> Tensor | None:
        return grad.clone() if param.grad is None else None

    for param in block.parameters():
        param.register_hook(partial(own, param))


def _say(line: str) -> None:
    if is_main_process():
        print(f"--torch-compile: {line}", flush=True)
