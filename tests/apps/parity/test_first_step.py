"""Differences in the engine's first step are found, and named."""

import math

import pytest
import torch

from megatron.apps.parity.gradients import (
    SteppedSlice,
    WholeParameter,
    first_step_difference,
    gradient_difference,
)
from megatron.checkpoint.slices import Slice
from megatron.parallel.shard import Cut, Shard

VOCABULARY, NORM = "embedding.word_embeddings.weight", "final_norm.norm.weight"
LR = 1e-3
SHARDS = {VOCABULARY: Shard((8, 3), (Cut(0, unpadded=7),)), NORM: Shard((3,))}
GRADIENTS = {
    VOCABULARY: torch.linspace(0.1, 1, 24).reshape(8, 3),
    NORM: torch.tensor([0.5, -1.0, 1e-9]),
}


def reference() -> dict[str, WholeParameter]:
    return {
        name: WholeParameter(gradient.clone(), 1 - LR * gradient.sign(), LR)
        for name, gradient in GRADIENTS.items()
    }


def ranks() -> list[list[SteppedSlice]]:
    """Tensor rank 0 and 1 on two data ranks each, which share each parameter (ZeRO)."""
    found = []
    for tensor in range(2):
        for data in range(2):
            slices, place = [], {"tensor": (tensor, 2)}
            for name, shard in SHARDS.items():
                length = math.prod(shard.local_shape(place))
                start, end = (0, 2) if data == 0 else (2, length)
                held = Slice.of(shard, place, start, end)
                own = SteppedSlice(name, held, None, torch.empty(end - start))
                expected = reference()[name]
                gradient, weight = own.of(expected.gradient), own.of(expected.weight)
                slices.append(SteppedSlice(name, held, gradient.clone(), weight.clone()))
            found.append(slices)
    return found


def test_equal():
    assert first_step_difference(ranks(), reference()) is None


@pytest.mark.parametrize("name", list(SHARDS))
@pytest.mark.parametrize("off", [1e-2, math.nan])
def test_gradient(name, off):
    found = ranks()
    next(own for own in found[2] if own.name == name).gradient[0] += off
    difference = first_step_difference(found, reference())
    assert (difference.what, difference.rank) == (f"gradient of {name}", 2)


def test_rounding_is_no_difference():
    found = ranks()
    for held in found:
        for own in held:
            own.gradient.mul_(1 + 1e-6)
    assert first_step_difference(found, reference()) is None


@pytest.mark.parametrize("name", list(SHARDS))
@pytest.mark.parametrize("off", [LR / 10, math.nan])
def test_weights(name, off):
    found = ranks()
    next(own for own in found[0] if own.name == name).weight[1] += off
    difference = first_step_difference(found, reference())
    assert (difference.what, difference.rank) == (f"new weights of {name}", 0)


def test_a_gradient_before_weights():
    found = ranks()
    found[0][1].weight[0] += 1  # the norm's, which comes first in the backward pass
    found[0][0].gradient[0] += 1
    assert first_step_difference(found, reference()).what == f"gradient of {VOCABULARY}"


def test_adam_moves_weights_of_no_gradient_either_way():
    found = ranks()
    norms = [own for held in found for own in held if own.name == NORM and own.slice.start == 2]
    for own in norms:
        own.weight.add_(2 * LR)
    assert norms and first_step_difference(found, reference()) is None


def test_half_precision_has_a_bound_of_its_own():
    found = ranks()
    found[1][1].gradient.add_(0.05)
    assert gradient_difference(found, reference(), 0.1, floor=0.1) is None
    found[1][1].gradient.add_(0.1)
    assert gradient_difference(found, reference(), 0.1, floor=0.1).what == f"gradient of {NORM}"
