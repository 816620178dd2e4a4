"""Step time: FLOPs against the counts of the training metrics, bubbles against the timeline."""

from dataclasses import replace
from fractions import Fraction

import pytest

from megatron.apps.planning.parameters import rank_shares
from megatron.apps.planning.pipeline_times import waiting_ratio
from megatron.apps.planning.step_time import Hardware, bubble_ratio, rank_flops, step_time
from megatron.config.layouts import Layout
from megatron.families import family_of
from megatron.features.global_heads.costs import with_global_heads
from megatron.features.global_heads.flags import of_block

KINDS = ("gpt2", "llama", "wide heads", "bert", "t5", "t5 untied", "retro", "gemma4")


@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_flops_against_those_of_the_metrics(small, kind, tensor, pipeline):
    """With the sequence cut: else each tensor-parallel rank computes all of BERT's dense head."""
    # Ranks that share a head of keys would compute it twice.
    model = small(kind, tensor, **{"global_num_query_groups": 2} if kind == "gemma4" else {})
    layout = Layout(tensor=tensor, sequence=tensor > 1, pipeline=pipeline)
    shares = rank_shares(model, layout)
    counted = tensor * sum(rank_flops(model, layout, 3, share) for share in shares)
    shape = with_global_heads(family_of(model.family).shape(model), model)
    if shape.windows:
        # Plans count all pairs of windows, too.
        channels = [2 * of_block(model, n).attention.kv_channels for n in range(model.num_layers)]
        shape = replace(shape, windows=(), full_channels=sum(channels) // model.num_layers)
    assert counted == pytest.approx(shape.flops_per_step(3, causal=False), rel=1e-12)


def test_recomputation_against_korthikanti(small):
    """Hardware over model FLOPs with selective recomputation is 1 + s / 6h for large h, equation 9;
    full recomputation adds a third."""
    heads = {"num_attention_heads": 32, "num_query_groups": 32, "kv_channels": 128}
    lengths = {"seq_length": 1024, "max_position_embeddings": 1024}
    model = small(hidden_size=4096, ffn_hidden_size=4 * 4096, **heads, **lengths)
    flops = {}
    for recompute in (None, "selective", "uniform"):
        layout = Layout(recompute=recompute)
        (share,) = rank_shares(model, layout)
        flops[recompute] = rank_flops(model, layout, 1, share)
    ratio = 1 + 1024 / (6 * 4096)
    assert flops["selective"] / flops[None] == pytest.approx(ratio, rel=0.03)
    assert flops["uniform"] / flops[None] == pytest.approx(4 / 3, rel=0.01)


@pytest.mark.parametrize("schedule, chunks", [
    ("1f1b", 1), ("interleaved", 2), ("dualpipev", 2), ("zbh1", 1), ("dualpipev_zb", 2),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("recompute, backward", [(None, 2), ("uniform", 3)])
def test_bubble_against_the_timeline(schedule, chunks, ranks, recompute, backward):
    timeline = pytest.importorskip("megatron.parallel.timeline")
    count = 3 * ranks
    real = timeline.PipelineSchedule(schedule, ranks, chunks, count)
    waited = waiting_ratio(timeline.simulate(real, 1, backward, weight_time=1))
    layout = Layout(pipeline=ranks, schedule=schedule, chunks=chunks, recompute=recompute)
    assert Fraction(bubble_ratio(layout, count)).limit_denominator(1000) == waited


def test_no_pipeline_no_bubble():
    assert bubble_ratio(Layout(), 4) == 0


def test_parts_add_up(small):
    model, layout = small(), Layout(tensor=2, data=4, zero=3, precision="bf16")
    fast = {"peak_tflops": 1.0, "utilisation": 0.5, "tensor_overlap": 0.0}
    hardware = Hardware(8, data_overlap=0.25, intra_node_bandwidth=1.0, **fast)
    shares = rank_shares(model, layout)
    time, sent = step_time(model, layout, 1, 3, shares, hardware)
    assert time.compute == pytest.approx(3 * rank_flops(model, layout, 1, shares[0]) / 0.5e12)
    assert time.tensor == pytest.approx(sent.tensor / 1e9)
    assert time.data == pytest.approx(0.75 * sent.data / 1e9)
    assert time.pipeline == time.bubble == 0
    assert time.total == time.compute + time.tensor + time.data


def test_the_slowest_rank_sets_the_pace(small):
    """The last one has the head."""
    model, layout = small(), Layout(pipeline=2, precision="bf16", zero=1)
    shares = rank_shares(model, layout)
    time, _ = step_time(model, layout, 1, 4, shares, Hardware(2))
    slowest = 4 * rank_flops(model, layout, 1, shares[-1]) / Hardware().flops
    assert time.compute == pytest.approx(slowest)
    assert time.bubble == pytest.approx(slowest / 4)


@pytest.mark.parametrize("zero, exposed", [(0, 1), (1, 1), (2, 1), (3, 0.25)])
def test_data_traffic_overlaps_where_deepspeed_overlaps_it(small, zero, exposed):
    """By default at stage 3 only."""
    model, layout = small(), Layout(data=2, zero=zero)
    hardware = Hardware(2, data_overlap=0.75, intra_node_bandwidth=1.0)
    time, sent = step_time(model, layout, 1, 2, rank_shares(model, layout), hardware)
    assert time.data == pytest.approx(exposed * sent.data / 1e9)


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_a_tied_embedding_costs_two_exposed_exchanges(small, overlap):
    """The gradients of its copies are averaged over replicas and summed over the two stages."""
    layout = Layout(pipeline=2, data=4, zero=1, precision="bf16")
    hardware = Hardware(8, pipeline_overlap=overlap, intra_node_bandwidth=1.0)
    times, volumes = [], []
    for kind in ("gpt2 untied", "gpt2"):
        model = small(kind)
        shares = rank_shares(model, layout)
        time, sent = step_time(model, layout, 1, 4, shares, hardware)
        times.append(time)
        volumes.append(sent)
    table = 2 * model.vocabulary.padded * model.hidden_size
    assert volumes[1].pipeline - volumes[0].pipeline == table
    assert volumes[1].data - volumes[0].data == pytest.approx(2 * 3 / 4 * table)
    assert times[1].pipeline - times[0].pipeline == pytest.approx(table / 1e9)
    assert times[1].data - times[0].data == pytest.approx(2 * 3 / 4 * table / 1e9)
