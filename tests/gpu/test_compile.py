"""Training with compiled blocks on a GPU, against the same with eager ones."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from gpu_runs import ON_GPU, TINY, needs_gpu, train

RUN = [*TINY, "--bf16"]


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def losses_of(*flags: str) -> tuple[list[float], int]:
    """Losses of a training, and how many graphs it took."""
    from torch._dynamo.utils import counters

    counters.clear()
    record = train([*RUN, *flags])
    return record.losses, graphs()


@pytest.fixture(scope="module")
def eager() -> list[float]:
    return losses_of("--torch-compile", "off")[0]


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_takes_one_graph(eager, stage):
    found, graphs_taken = losses_of("--torch-compile", "--zero-stage", str(stage))
    if stage:  # stage 0 runs bf16 as autocast
        np.testing.assert_allclose(found, eager, rtol=2e-2)
    assert graphs_taken <= (3 if stage else 2), "the block, and on a GPU the loss and the update"


@needs_gpu
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
def test_modes(eager, mode):
    found, _ = losses_of("--torch-compile", "--torch-compile-mode", mode)
    np.testing.assert_allclose(found, eager, rtol=2e-2)


def test_a_long_run_is_compiled_without_being_asked(eager, capsys):
    """The last iterations of such a run are left out."""
    end = ["--train-iters", "200", "--exit-interval", "6", "--lr-decay-iters", "6"]
    found, graphs_taken = losses_of(*end)
    said = re.findall("^--torch-compile: auto: (.*)$", capsys.readouterr().out, re.M)
    assert said == (["200 iterations on a GPU repay it; the blocks are compiled"] * ON_GPU)
    assert bool(graphs_taken) == ON_GPU
    np.testing.assert_allclose(found[:6], eager, rtol=2e-2)


@needs_gpu
def test_a_memory_budget_takes_less_memory():
    peaks = []
    for budget in ("1", "0.5", "0"):
        torch.cuda.reset_peak_memory_stats()
        flags = ["--torch-compile", "--activation-memory-budget", budget]
        losses_of(*flags, "--num-layers", "8", "--seq-length", "1024", "--train-iters", "2")
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] > peaks[1] > peaks[2]


ALLOCATE = """
import torch
from megatron.engine import environment
environment._let_segments_grow()
kept = torch.ones(2**22, device="cuda")
print(all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
"""


@needs_gpu
def test_the_allocator_extends_its_memory():
    """In a process of its own: the variable is read at the first allocation."""
    done = subprocess.run([sys.executable, "-c", ALLOCATE], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
