"""Each kind of difference between records of one step is found, and named."""

import dataclasses
import math

import pytest
import torch

from megatron.apps.parity.gradients import Gradient, GradientRecord, first_difference
from megatron.model.layer_list import LayerSpec
from megatron.parallel.shard import Cut, Shard

LAYERS = [LayerSpec(name, torch.nn.Identity) for name in ("embedding", "layers.0", "head")]
NORM, LINEAR = "layers.0.norm.weight", "layers.0.linear.weight"
SHARDS = {LINEAR: Shard((4, 6), (Cut(0),)), NORM: Shard((6,))}
TENSORS = {
    "embedding": torch.arange(12.0).reshape(1, 2, 6).double(),
    "layers.0": torch.ones(1, 2, 6).double(),
    "head": torch.tensor(0.5).double(),
    NORM: torch.arange(6.0).double(),
    LINEAR: torch.arange(24.0).reshape(4, 6).double(),
}


def record(rank: int = 0, size: int = 1) -> GradientRecord:
    """The share of a tensor-parallel rank: rows of the linear layer."""
    place = {"tensor": (rank, size)}
    found = [
        Gradient(name, shard, shard.counted(place), shard.cut(TENSORS[name], place))
        for name, shard in SHARDS.items()
    ]
    outputs = {
        0: TENSORS["embedding"],
        1: TENSORS["layers.0"],
        2: TENSORS["head"],
    }
    return GradientRecord(place, 2.0, 3.0, found, {n: t.clone() for n, t in outputs.items()})


def ranks() -> list[GradientRecord]:
    return [record(rank, 2) for rank in range(2)]


def compare(records):
    return first_difference(records, record(), LAYERS)


def with_gradient(found: GradientRecord, name: str, values) -> GradientRecord:
    changed = [
        dataclasses.replace(g, values=values(g.values)) if g.name == name else g
        for g in found.gradients
    ]
    return dataclasses.replace(found, gradients=changed)


def test_equal():
    assert compare([record()]) is None
    assert compare(ranks()) is None


def test_slices_of_the_sequence_are_compared_with_theirs():
    records = ranks()
    for rank, found in enumerate(records):
        found.outputs[1] = TENSORS["layers.0"].chunk(2, 1)[rank]
    assert compare(records) is None
    records[1].outputs[1] = records[1].outputs[1] + 1e-9
    assert "output of layers.0 on rank 1" in str(compare(records))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("off", [1e-9, math.nan])
def test_output(place, off):
    records = ranks()
    records[1].outputs[place].view(-1)[-1] += off
    difference = compare(records)
    what = ("output of embedding", "output of layers.0", "loss of the first micro batch")[place]
    assert difference.what == what
    assert difference.rank == 1 and not difference.found <= difference.allowed


def test_the_first_layer_is_named():
    records = ranks()
    for place in (1, 2):
        records[0].outputs[place] += 1
    records[1].outputs[1] += 1
    assert compare(records).what == "output of layers.0"


def test_output_of_no_rank():
    records = ranks()
    for found in records:
        del found.outputs[1]
    assert str(compare(records)) == "output of layers.0: on no rank"


def test_output_of_another_shape():
    records = ranks()
    records[0].outputs[0] = records[0].outputs[0][..., :3].repeat(1, 1, 3)
    assert "output of embedding on rank 0: inf off" in str(compare(records))


@pytest.mark.parametrize("name", [NORM, LINEAR])
@pytest.mark.parametrize("factor", [1 + 1e-9, math.nan])
def test_gradient(name, factor):
    first, second = ranks()
    difference = compare([first, with_gradient(second, name, lambda g: g * factor)])
    assert difference.what == f"gradient of {name}" and difference.rank == 1


def test_the_first_gradient_of_the_backward_pass_is_named():
    first, second = ranks()
    for name in (NORM, LINEAR):
        second = with_gradient(second, name, lambda g: g + 1)
    assert compare([first, second]).what == f"gradient of {list(SHARDS)[-1]}"


def test_missing_gradient():
    first, second = ranks()
    second = dataclasses.replace(second, gradients=second.gradients[1:])
    assert str(compare([first, second])) == f"gradient of {LINEAR} (12 elements): on no rank"


def test_gradient_of_zero_in_theory():
    """It is compared with the model's largest instead."""
    nothing = {**TENSORS, NORM: torch.zeros(6).double()}
    expected = record()
    expected = with_gradient(expected, NORM, lambda g: g * 0)
    found = with_gradient(record(), NORM, lambda g: nothing[NORM] + 1e-16)
    assert first_difference([found], expected, LAYERS) is None
    found = with_gradient(record(), NORM, lambda g: nothing[NORM] + 1e-12)
    assert first_difference([found], expected, LAYERS).what == f"gradient of {NORM}"


@pytest.mark.parametrize(("field", "what"), [("loss", "loss"), ("norm", "gradient norm")])
@pytest.mark.parametrize("factor", [1 + 1e-9, math.nan])
def test_numbers(field, what, factor):
    first, second = ranks()
    second = dataclasses.replace(second, **{field: getattr(second, field) * factor})
    difference = compare([first, second])
    assert difference.what == what and difference.rank == 1
