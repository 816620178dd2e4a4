"""Bytes sent, against the volumes that the papers give."""

import dataclasses

import pytest

from megatron.apps.planning.parameters import rank_shares
from megatron.apps.planning.step_time import (
    data_bytes,
    hidden_bytes,
    pipeline_bytes,
    tensor_bytes_per_block,
    tied_bytes,
)
from megatron.config.layouts import Layout
from megatron.parallel.pipeline_schedules import PipelineSchedule
from megatron.parallel.timeline import transfer_of

HALF = {"precision": "bf16", "zero": 1}
LENGTH = 128
"""Tokens of a sample of the small models."""


def test_tensor_parallelism_is_four_all_reduces(small):
    model = small()
    hidden = 2 * 3 * model.seq_length * model.hidden_size
    layout = Layout(tensor=4, **HALF)
    assert hidden_bytes(model, layout, 3 * LENGTH) == hidden
    assert tensor_bytes_per_block(model, layout, 3) == 4 * 2 * 3 / 4 * hidden
    assert tensor_bytes_per_block(model, Layout(**HALF), 3) == 0


def test_sequence_parallelism_gathers_two_inputs_again(small):
    model, layout = small(), Layout(tensor=4, **HALF)
    split = dataclasses.replace(layout, sequence=True)
    more = tensor_bytes_per_block(model, split, 1) - tensor_bytes_per_block(model, layout, 1)
    assert more == 2 * 3 / 4 * hidden_bytes(model, layout, LENGTH)


def test_full_recomputation_sends_the_forward_again(small):
    model, layout = small(), Layout(tensor=2, **HALF)
    full = dataclasses.replace(layout, recompute="uniform")
    whole = tensor_bytes_per_block(model, full, 1)
    # All but the sum that leaves the block, after which nothing is kept.
    assert whole == pytest.approx(1.25 * tensor_bytes_per_block(model, layout, 1))
    wet = small(hidden_dropout=0.1)
    assert tensor_bytes_per_block(wet, full, 1) == pytest.approx(1.2 * whole)


def test_pipeline_sends_forward_and_backward(small):
    model = small()
    one = hidden_bytes(model, Layout(**HALF), 2 * LENGTH)
    layout = Layout(tensor=2, pipeline=4, **HALF)
    assert pipeline_bytes(model, layout, 2, 8) == 2 * 8 * one
    twice = dataclasses.replace(layout, schedule="interleaved", chunks=2)
    assert pipeline_bytes(model, twice, 2, 8) == 2 * 2 * 8 * one
    assert pipeline_bytes(model, dataclasses.replace(layout, sequence=True), 2, 8) == 8 * one
    # Of two ranks one sends hidden states and one their gradients.
    assert pipeline_bytes(model, dataclasses.replace(layout, pipeline=2), 2, 8) == 8 * one
    assert pipeline_bytes(model, Layout(**HALF), 2, 8) == 0


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2)])
def test_pipeline_against_the_messages(small, schedule, chunks):
    """A rank in the middle, where every stage has neighbours elsewhere."""
    real = PipelineSchedule(schedule, 4, chunks, 8)
    sends = [transfer_of(real, action) for action in real.actions(1)]
    layout = Layout(pipeline=4, schedule=schedule, chunks=chunks, **HALF)
    one = hidden_bytes(small(), layout, LENGTH)
    assert pipeline_bytes(small(), layout, 1, 8) == one * sum(send is not None for send in sends)


def test_data_parallelism_against_zero():
    """Section 7 of the ZeRO paper: 2 Psi, 2 Psi and 3 Psi elements for large d, a micro batch."""
    for zero, volume in {0: 2, 1: 2, 2: 2, 3: 3}.items():
        sent = data_bytes(Layout(data=1000, zero=zero, precision="fp32"), 7000, 1)
        assert sent / 4 == pytest.approx(volume * 7000, rel=2e-3)


def test_gradients_that_are_cut_travel_with_every_micro_batch():
    def sent(zero, count):
        return data_bytes(Layout(data=2, zero=zero, precision="bf16"), 100, count)

    assert sent(1, 8) == sent(1, 1)
    assert sent(2, 8) == 100 * (8 + 1)
    assert sent(3, 8) == 8 * sent(3, 1)


def test_copies_of_a_tied_table_exchange_their_gradients(small):
    """V H / t elements of a sum over two ranks; only where there are two copies."""
    tied, layout = small(tensor=2), Layout(tensor=2, pipeline=2, **HALF)
    elements = tied.vocabulary.padded * tied.hidden_size / 2

    def of_first(model, layout):
        held, sent = tied_bytes(layout, rank_shares(model, layout)[0])
        assert held == sent  # a ring of two
        return held

    assert of_first(tied, layout) == 2 * elements
    assert of_first(tied, dataclasses.replace(layout, grads_in_fp32=True)) == 4 * elements
    assert of_first(tied, dataclasses.replace(layout, zero=0)) == 4 * elements
    assert of_first(tied, dataclasses.replace(layout, pipeline=1)) == 0
    assert of_first(small("gpt2 untied", 2), layout) == 0
    both_ends = dataclasses.replace(layout, schedule="dualpipev", chunks=2)
    assert of_first(tied, both_ends) == 0
