"""Compression in every layout against one process, in float64: groups and masks are those of whole
matrices. The reference is the engine itself on one process, whose layers
tests/features/compression compares with DeepSpeed's."""

import json

import pytest
import torch
from against_one_process import layers_of
from samples import sampled
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS, TINY, depth, gradients, train

from megatron.apps.parity.gradients import first_difference
from megatron.apps.parity.layouts import flags_for, parse_layout

MODEL = [*TINY, "--micro-batch-size", "2", "--train-iters", "1"]
MODEL += "--hidden-dropout 0 --attention-dropout 0".split()
EXPERTS = "--num-experts 4 --moe-router-topk 2".split()


def technique(kind, params, modules=("encoder.layers",), offset=0, **shared):
    group = {"params": params, "modules": list(modules)}
    return {
        kind: {
            "shared_parameters": {"enabled": True, "schedule_offset": offset, **shared},
            "different_groups": {"g": group},
        }
    }


WEIGHTS = {"start_bits": 8, "target_bits": 4, "quantization_period": 1}
EVERYWHERE = ("encoder.layers", "embedding")
LEARNED = (
    technique("sparse_pruning", {"dense_ratio": 0.6}, method="topk")
    | technique("row_pruning", {"dense_ratio": 0.6}, ("mlp",), method="topk")
    | technique("head_pruning", {"dense_ratio": 0.5}, ("self_attention.dense",), num_heads=4)
)
FIXED = technique("sparse_pruning", {"dense_ratio": 0.6}) | technique(
    "row_pruning", {"dense_ratio": 0.6}, ("mlp.dense",)
)
INPUTS = technique("activation_quantization", {"bits": 8}, quantization_type="asymmetric")
KINDS = {
    "after-updates": technique(
        "weight_quantization", WEIGHTS, EVERYWHERE, quantize_groups=4, rounding="stochastic"
    )
    | INPUTS,
    "in-forward": technique(
        "weight_quantization", WEIGHTS, EVERYWHERE, quantize_groups=8,
        quantize_weight_in_forward=True, quantization_type="asymmetric",
    )
    | LEARNED,
    "fixed-masks": FIXED,
}  # fmt: skip
"""All techniques: weights, inputs and masks."""


def flags(section) -> list[str]:
    return ["--compression-training", json.dumps(section)]


def compared(pool, argv, layout):
    parsed = parse_layout(layout)
    count = parsed.fewest_micro_batches * 2 * parsed.data
    argv = [*argv, "--global-batch-size", str(count)]
    (reference,) = pool.run(1, gradients, argv)
    records = pool.run(parsed.processes, gradients, [*argv, *flags_for(parsed)])
    assert first_difference(records, reference, layers_of(*argv)) is None
    return reference


@pytest.mark.parametrize("kind", sampled(KINDS, "in-forward".__eq__))
@pytest.mark.parametrize("layout", sampled((*LAYOUTS, *CONTEXT_LAYOUTS), "tp2-sp".__eq__))
def test_gradients(pool, layout, kind):
    compared(pool, [*MODEL, *depth(layout), *flags(KINDS[kind])], layout)


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["tp2", "ep2-dp2", "tp2-ep2-dp2", "pp2-dp2"])
def test_experts(pool, layout, kind):
    """The groups and masks of an expert are its own."""
    section = {k: v for k, v in KINDS[kind].items() if k != "row_pruning"}
    compared(pool, [*MODEL, *EXPERTS, "--num-layers", "4", *flags(section)], layout)


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["tp4", "tp4-sp"])
def test_more_ranks_than_heads_of_keys(pool, layout):
    argv = [*MODEL, "--num-layers", "2", "--num-query-groups", "2"]
    section = {k: v for k, v in KINDS["in-forward"].items() if k != "row_pruning"}
    compared(pool, [*argv, *flags(section)], layout)


def train_in_float64(argv):
    """For the pool."""
    torch.set_default_dtype(torch.float64)
    try:
        return train(argv)
    finally:
        torch.set_default_dtype(torch.float32)


STATIC = technique(
    "activation_quantization", {"bits": 8}, offset=2, quantization_type="asymmetric",
    range_calibration="static",
)  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "pp2", "tp2-pp2"])
def test_several_steps(pool, layout):
    """Schedules of bits, and ranges of inputs, which follow from earlier steps."""
    argv = [*MODEL, "--num-layers", "4", "--train-iters", "6", "--global-batch-size", "4"]
    argv += flags(
        technique("weight_quantization", WEIGHTS, EVERYWHERE, offset=1, quantize_groups=4) | STATIC
    )
    parsed = parse_layout(layout)
    (reference,) = pool.run(1, train_in_float64, argv)
    records = pool.run(parsed.processes, train_in_float64, [*argv, *flags_for(parsed)])
    assert records[0].losses == pytest.approx(reference.losses, rel=1e-12)


@pytest.mark.proof
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_zero_stages(pool, stage, kind):
    """Partitions of ZeRO come together as whole matrices. A number that is rounded to another
    level, for float32's own rounding, moves the losses of later steps by 1e-5."""
    argv = [*MODEL, "--num-layers", "2", "--train-iters", "4", "--global-batch-size", "4"]
    argv += [*flags(KINDS[kind]), "--zero-stage"]
    first, other = (pool.run(2, train, [*argv, str(each)])[0] for each in (1, stage))
    assert first.losses[:2] == pytest.approx(other.losses[:2], abs=2e-6)
    assert first.losses == pytest.approx(other.losses, abs=1e-4)
    (alone,) = pool.run(1, train, [*argv, str(stage)])
    assert alone.losses[0] == pytest.approx(first.losses[0], abs=2e-6)
    assert alone.losses == pytest.approx(first.losses, abs=1e-3)
