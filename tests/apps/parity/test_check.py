"""The verdict on a layout's training."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.apps.parity.check import PlainRun, _training_difference
from megatron.apps.parity.gradients import SteppedSlice, WholeParameter
from megatron.apps.parity.runs import Drift, RunRecord
from megatron.checkpoint.slices import Slice
from megatron.config.layouts import Layout

LOSSES, NORMS = [5.0, 4.0, 3.0], [1.0, 0.5, 2.0]
NOISE = 1e-6
GRADIENT, WEIGHT = torch.ones(4), torch.zeros(4)
PLAIN = PlainRun(
    RunRecord(losses=LOSSES, norms=NORMS),
    Drift(np.full(3, NOISE), np.full(3, NOISE)),
    {"norm.weight": WholeParameter(GRADIENT, WEIGHT, 1e-3)},
)
SLICES = [[SteppedSlice("norm.weight", Slice.whole((4,)), GRADIENT, WEIGHT)]]


def verdict(step=None, loss=0.0, norm=0.0, layout=None, slices=None, **record):
    """With loss and relative norm of a step moved by this much."""
    losses, norms = list(LOSSES), list(NORMS)
    if step is not None:
        losses[step] += loss
        norms[step] *= 1 + norm
    values = {"losses": losses, "norms": norms, "scales": [1.0] * 3, "skipped": [False] * 3}
    found = RunRecord(**{**values, **record})
    return _training_difference(layout or Layout(), found, slices or SLICES, PLAIN)


def test_equal():
    assert verdict() == ""


@pytest.mark.parametrize(("step", "allowed"), [(0, 1e-6 * 5), (1, 4 * NOISE), (2, 4 * NOISE)])
def test_loss(step, allowed):
    allowed = min(allowed, 4 * NOISE)
    assert verdict(step, loss=0.9 * allowed) == ""
    assert verdict(step, loss=-1.1 * allowed).startswith(f"loss of step {step + 1}: ")
    assert verdict(step, loss=math.nan).startswith(f"loss of step {step + 1}: nan off")


@pytest.mark.parametrize(("step", "allowed"), [(0, 1e-6), (1, 4 * NOISE)])
def test_norm(step, allowed):
    assert verdict(step, norm=0.9 * allowed) == ""
    assert verdict(step, norm=1.1 * allowed).startswith(f"gradient norm of step {step + 1}: ")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision):
    layout = Layout(zero=1, precision=precision)
    assert verdict(1, loss=4e-3 * 4, norm=0.01, layout=layout) == ""
    assert verdict(1, loss=6e-3 * 4, layout=layout).startswith("loss of step 2")
    assert verdict(1, norm=0.03, layout=layout).startswith("gradient norm of step 2")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_is_named_first(precision):
    slices = [[replace(SLICES[0][0], gradient=2 * GRADIENT)]]
    found = verdict(0, norm=1.0, layout=Layout(zero=1, precision=precision), slices=slices)
    assert found.startswith("gradient of norm.weight on rank 0: 1.0e+00 off")
    assert found.endswith("(first step through DeepSpeed's engine)")


def test_skipped_step():
    found = verdict(skipped=[False, True, False], scales=[8.0, 8.0, 4.0])
    assert found.startswith("step 2 was skipped: gradients overflowed at loss scale 8")


def test_missing_steps():
    assert verdict(losses=[5.0], norms=[1.0]) == "1 steps were trained instead of 3"
