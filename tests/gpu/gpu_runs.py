"""Where the tests of this folder run, and training runs within the test process."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from flat_partitions import set_gradients
from torch import Tensor

if TYPE_CHECKING:
    from megatron.apps.parity.runs import RunRecord
    from megatron.training.trainer import Trainer

ON_CPU = os.environ.get("MEGATRON_GPU_TESTS_ON") == "cpu"
"""True if the CPU replaces a GPU."""
if ON_CPU:
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
# Without it cuBLAS may add in an order of chance; it is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ON_GPU = torch.cuda.is_available() and not ON_CPU
CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0) if ON_GPU else torch.device("cpu")

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="only a GPU has this")
"""Mark of tests in which the CPU cannot replace a GPU."""

SHAPE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--attention-dropout 0 --hidden-dropout 0 --swiglu --use-rotary-position-embeddings "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
).split()
RUN = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 2e-3 --weight-decay 0.1 --clip-grad 1.0 "
    "--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 499 --mock-data "
    "--num-workers 0 --eval-iters 0 --peak-tflops 1 --log-interval 1000 --train-iters 6"
).split()
TINY = [*SHAPE, *RUN]
"""Flags of a Llama that trains in a second, without dropout: devices draw other masks."""

_LINEAR = F.linear


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """On a GPU: whatever makes the host wait for the device raises."""
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def trainer(argv: Sequence[str]) -> Iterator[Trainer]:
    """The trainer of a run with these flags, in this process; closed at the end."""
    from megatron.engine.environment import distributed
    from megatron.run.run import parse_run
    from megatron.training.build import build_trainer

    with own_environment():
        run = parse_run(None, argv)
        with distributed(run.config.parallel) as mesh:
            built = build_trainer(run, mesh)
            try:
                yield built
            finally:
                built.engine.close()


def train(argv: Sequence[str]) -> RunRecord:
    """A whole run with these flags, in this process."""
    from megatron.apps.parity import runs

    with own_environment():
        record = runs.train(argv)
    forget_engines()
    return record


def peak_of_update(update: Any, wrapper: Any, params: Sequence[Tensor]) -> int:
    """Most bytes that an update makes next to what there was; of the second one, since the first
    makes the moments and compiles."""
    held = torch.zeros((), device=DEVICE)
    for _ in range(2):
        set_gradients(wrapper, [[torch.ones_like(param) for param in params]])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        update.step(None, held)
    return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Undoes changes of the environment and of torch's threads: a run sets its port there."""
    threads = torch.get_num_threads()
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(threads)


def forget_engines() -> None:
    """Forgets what an engine left in torch's and DeepSpeed's globals, and compiled code."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if dist.is_initialized():
        dist.destroy_process_group()
    if "deepspeed.comm.comm" in sys.modules:
        # Its backend outlives torch's groups, and so do the groups it keeps by name.
        sys.modules["deepspeed.comm.comm"].cdb = None
        groups = sys.modules["deepspeed.utils.groups"]
        groups._release_process_group_references()
        groups.mpu = None
    if "deepspeed.runtime.torch_autocast" in sys.modules:
        # Set for good by the first run with autocast; ZeRO then reduces in other formats.
        sys.modules["deepspeed.runtime.torch_autocast"].TORCH_AUTOCAST_INITIALIZED = False
    F.linear = _LINEAR  # ZeRO 3 leaves its own
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
