"""Engine for a model that is evaluated but not trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron.config import RunConfig
from megatron.config.features import taking_part
from megatron.engine.build import backend_class, check_device, kernel_states
from megatron.engine.compilation import compile_blocks, to_compile
from megatron.engine.train_engine import ModelEngine
from megatron.model.layer_list import canonical_parameters
from megatron.model.spec import ModelSpec, training_dtype
from megatron.parallel.mesh import Mesh
from megatron.util.processes import is_main_process

_UNPARTITIONED = {"zero_optimization": {"stage": 0}}


class Evaluator(ModelEngine):
    """Engine for a model in a parallel layout, without gradients and optimizer. Built by
    :func:`build_evaluator`."""

    def initialise(self) -> None:
        """Set all weights to the values with which training would start."""
        for param, name in self.names.items():
            self.backend.initialise(name, param)
        self.kernels.invalidate()


def build_evaluator(
    config: RunConfig, spec: ModelSpec, mesh: Mesh, device: torch.device
) -> Evaluator:
    """Build the model in a run's parallel layout and dtype, except that a CPU never uses float16.
    The weights are undefined until a checkpoint is loaded. ZeRO is not used, since it partitions
    training state."""
    check_device(config, device)
    if config.engine.zero_stage > 1 and is_main_process():
        print(
            f"--zero-stage {config.engine.zero_stage}: an evaluation has neither optimizer nor "
            "gradients to partition; every data-parallel rank has its whole model",
            flush=True,
        )
    dtype = training_dtype(config)
    if dtype == torch.float16 and device.type == "cpu":
        # float16 GEMMs on a CPU take about two hundred times as long as float32 ones (torch 2.13).
        dtype = torch.float32
        if is_main_process():
            print("--fp16: on a CPU a model is evaluated in float32", flush=True)
    with default_dtype(dtype), device:
        backend = backend_class(config)(config, _UNPARTITIONED, spec, mesh, device)
    backend.model.requires_grad_(False).eval()
    names = {param: name for name, param in canonical_parameters(backend.model, backend.layers)}
    blocks = [block for sequence in backend.sequences for block in sequence.blocks]
    for feature in taking_part():
        feature.kernels(blocks, config)
    if to_compile(config, device):
        compile_blocks(backend.sequences, config.fast_paths, device)
    kernels = kernel_states(blocks, names, config, mesh, partitioned=False)
    backend.start_without_training()
    return Evaluator(config, spec, mesh, device, backend, names, kernels)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within this context, create new tensors in this dtype by default, so that weights need no
    conversion."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
