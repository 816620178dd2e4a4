"""Offloaded runs have the same bits as others in every layout; those in tiles are within rounding.

The reference is the same run without the flag, in the same layout: losses, norms, weights and
moments after three steps, with dropout. In float64 the gradients of tiles are those of plain torch
on one process.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from against_one_process import difference
from live_bytes import LiveBytes
from pool import tensor_group
from samples import sampled
from training_jobs import TINY, train

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.features.context import offload
from megatron.features.context.partition import DividedInputs

FLAGS = [*TINY, "--seq-length", "64", "--train-iters", "3"]
LAYOUTS = (
    "tp2 tp2-sp dp2-zero1 dp2-zero2 dp2-zero3 pp2 pp2-interleaved pp2-dualpipev tp2-sp-pp2 "
    "dp2-zero3-bf16 dp2-zero0-bf16 tp2-sp-dp2-zero1-bf16"
).split()
SAMPLE = {"dp2-zero3-blocks", "tp2-sp-tiles"}
SAVING = {
    "blocks": ([], ["--cpu-offloading"]),
    "first": (["--recompute-granularity", "selective"], ["--cpu-offloading-num-layers", "1"]),
    "inputs": (["--recompute-granularity", "full"], ["--checkpoint-in-cpu"]),
    "uniform-2": (
        ["--recompute-granularity", "full", "--recompute-num-layers", "2"],
        ["--checkpoint-in-cpu"],
    ),
}


def without_smallest(argv):
    """Train with storages of any size on the host."""
    offload.SMALLEST = 0
    return train(argv)


def cells(kinds):
    for layout in LAYOUTS:
        for kind in kinds:
            marks = () if f"{layout}-{kind}" in SAMPLE else (pytest.mark.proof,)
            yield pytest.param(layout, kind, marks=marks)


@pytest.mark.parametrize(("layout", "kind"), list(cells(SAVING)))
def test_offloaded_is_bitwise(pool, layout, kind):
    parsed = parse_layout(layout)
    layers = max(2, parsed.pipeline * parsed.chunks)
    both, flags = SAVING[kind]
    argv = [*FLAGS, "--num-layers", str(layers), *flags_for(parsed), *both]
    without = pool.run(parsed.processes, train, argv)
    record = pool.run(parsed.processes, without_smallest, [*argv, *flags])
    for expected, got in zip(without, record, strict=True):
        assert got.losses == expected.losses
        assert got.norms == expected.norms
        assert all(np.array_equal(got.state[k], x) for k, x in expected.state.items())


DIVIDED = {
    "device": ["--partition-activations"],
    "host": ["--distribute-saved-activations", "--checkpoint-in-cpu"],
    "pairs": ["--partition-activations", "--recompute-num-layers", "2"],
}
DIVIDED_LAYOUTS = ("tp2", "tp2-dp2-zero3-bf16", "tp2-pp2", "tp2-pp2-dualpipev", "cp2-tp2")


@pytest.mark.parametrize(
    ("layout", "kind"),
    sampled(product(DIVIDED_LAYOUTS, DIVIDED), lambda case: case == ("tp2", "host")),
)
def test_divided_inputs_are_bitwise(pool, layout, kind):
    """Each tensor-parallel rank keeps half of the inputs, which the backward pass gathers."""
    parsed = parse_layout(layout)
    layers = max(2, parsed.pipeline * parsed.chunks)
    argv = [*FLAGS, "--num-layers", str(layers), *flags_for(parsed)]
    argv += ["--recompute-granularity", "full"]
    without = pool.run(parsed.processes, train, argv)
    record = pool.run(parsed.processes, without_smallest, [*argv, *DIVIDED[kind]])
    for expected, got in zip(without, record, strict=True):
        assert got.losses == expected.losses
        assert all(np.array_equal(got.state[k], x) for k, x in expected.state.items())


def halves(shape):
    """Bytes that are kept of a tensor that two operations save, and whether its gradient is right;
    for the pool."""
    divided = DividedInputs(tensor_group())
    x = torch.arange(float(math.prod(shape))).view(shape).requires_grad_()
    with LiveBytes() as live:
        hidden = x * 1.0
        with offload.Offload(torch.device("cpu")).saving((), True, divided, False):
            y, z = hidden.square(), hidden.square()
        del hidden
        kept = live.bytes(without=[y, z])
    (y + z).sum().backward()
    return kept, torch.equal(x.grad, 4 * x)


def test_half_of_an_input_is_kept_once(pool):
    assert pool.run(2, halves, (6, 4)) == [(6 * 4 * 4 / 2, True)] * 2
    assert pool.run(2, halves, (3, 5)) == [(3 * 5 * 4, True)] * 2  # not even: whole


@pytest.mark.parametrize(("layout", "kind"), list(cells(["tiles"])))
def test_tiles_against_plain_torch(pool, layout, kind):
    parsed = parse_layout(layout)
    layers = max(2, parsed.pipeline * parsed.chunks)
    argv = [*FLAGS, "--num-layers", str(layers), "--train-iters", "1"]
    argv += ["--attention-dropout", "0", "--hidden-dropout", "0"]
    flags = [*flags_for(parsed), "--mlp-chunks-for-training", "3"]
    assert difference(pool, parsed.processes, argv, flags) is None


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_train_as_without(pool, layout):
    """Sums over tiles have another order: in float32 the bound is that of rounding, 1e-6 of a
    loss, and in bfloat16 2e-2."""
    parsed = parse_layout(layout)
    layers = max(2, parsed.pipeline * parsed.chunks)
    argv = [*FLAGS, "--num-layers", str(layers), *flags_for(parsed)]
    without = pool.run(parsed.processes, train, argv)
    record = pool.run(parsed.processes, train, [*argv, "--mlp-chunks-for-training", "3"])
    bound = 2e-2 if "bf16" in layout else 1e-6
    for expected, got in zip(without, record, strict=True):
        np.testing.assert_allclose(got.losses, expected.losses, rtol=bound)
        np.testing.assert_allclose(got.norms, expected.norms, rtol=10 * bound)
