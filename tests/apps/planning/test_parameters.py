"""Counted parameters against models that are really built, on torch's meta device."""

import pytest
import torch
from configs import model_config

from megatron.apps.planning.extent import _on_rank
from megatron.apps.planning.parameters import layer_shares, model_parameters, rank_shares, stages_of
from megatron.config import ParallelConfig
from megatron.config.layouts import Layout
from megatron.engine.pipeline_module import layer_bounds
from megatron.families import build_model, family_of, spec_of
from megatron.families.gpt import gpt_layers
from megatron.model.layer_list import LayerStack
from megatron.parallel.mesh import Group
from megatron.parallel.pipeline_schedules import stage_bounds
from megatron.parallel.tensor_parallel import TensorParallel

KINDS = (
    "gpt2", "gpt2 untied", "llama", "llama tied", "one key head", "bias on qkv",
    "bias in attention", "wide heads",
    "bloom", "gemma2", "gemma4", "qwen3", "neox", "gpt-oss", "opt",
)  # fmt: skip


def ranks(size):
    """Return rank 0 of ``size`` tensor-parallel ranks, to build its share."""
    return TensorParallel(Group(tuple(range(size))))


def numel(module):
    return sum(param.numel() for param in module.parameters())


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_against_built_layers(small, kind, tensor):
    model = small(kind, tensor)
    with torch.device("meta"):
        whole = numel(build_model(model, tp=ranks(tensor)))
    layers = layer_shares(model, tensor)
    assert [layer.block for layer in layers] == [False, False, *[True] * 4, False, False]
    (share,) = rank_shares(model, Layout(tensor=tensor))
    assert share.parameters == whole
    assert share.blocks == (4,) and share.first and share.last


@pytest.mark.parametrize("data, context", [(4, 1), (2, 2), (1, 4)])
def test_zero_3_divides_over_the_ranks_of_a_sequence_too(small, data, context):
    model = small("llama")
    layout = Layout(zero=3, data=data, context=context)
    (share,) = rank_shares(model, layout)
    assert _on_rank(layout, share) == share.parameters // 4


OTHERS = ("bert", "bert post-norm", "bert lm only", "t5", "t5 relative", "t5 untied", "retro",
          "umt5", "bart", "modernbert")  # fmt: skip


@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_against_built_stages(small, kind, tensor, pipeline):
    """Every parameter of every rank, tied ones once; all together, whole or with copies."""
    model = small(kind, tensor)
    layers, layout = spec_of(model).layers(ranks(tensor)), Layout(tensor=tensor, pipeline=pipeline)
    parallel = ParallelConfig(pipeline_model_parallel_size=pipeline)
    bounds = layer_bounds(layers, parallel)
    shares = rank_shares(model, layout)
    for share, first, end in zip(shares, bounds, bounds[1:], strict=False):
        with torch.device("meta"):
            stack = LayerStack(layers[first:end], parallel)
        assert share.parameters == numel(stack)
        assert share.blocks == (len(stack.blocks()),)
    with torch.device("meta"):
        whole = numel(build_model(model, tp=ranks(tensor)))
    assert sum(share.parameters for share in shares) >= whole
    lengths = family_of(model.family).block_lengths(model)
    assert sum((share.stages[0] for share in shares), ()) == lengths


def test_against_the_formula_of_narayanan():
    """Narayanan et al. 2021 (arXiv:2104.04473), equation 2: 12 L h^2 (1 + 13/12h + (V + s)/12Lh);
    it leaves out the final norm."""
    layers, hidden, vocab, length = 96, 12288, 51200, 2048
    model = model_config(
        num_layers=layers, hidden_size=hidden, ffn_hidden_size=4 * hidden, num_attention_heads=96,
        num_query_groups=96, kv_channels=128, seq_length=length, max_position_embeddings=length,
        unpadded_vocab_size=vocab, padded_vocab_size=vocab,
    )  # fmt: skip
    expected = layers * (12 * hidden**2 + 13 * hidden) + (vocab + length) * hidden
    assert model_parameters(model) == expected + 2 * hidden


@pytest.mark.parametrize("kind", KINDS)
def test_padding_counts_only_when_told(small, kind):
    model = small(kind, 4)
    assert (model.vocabulary.padded, model.vocabulary.size) == (64, 61)
    with torch.device("meta"):
        stack = build_model(model)
    tables = 1 if model.embedding.tied else 2
    assert model_parameters(model, padded=True) == numel(stack)
    assert model_parameters(model) == numel(stack) - 3 * 64 * tables


@pytest.mark.parametrize("partition", ["blocks", "parameters", "2,1,3"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_uneven_stages_against_built_layers(small, kind, partition):
    model, layout = small(kind, 2, num_layers=6), Layout(tensor=2, pipeline=3)
    recipes = gpt_layers(model, ParallelConfig(), ranks(2))
    with torch.device("meta"):
        built = [numel(recipe.build()) for recipe in recipes]
    bounds = stage_bounds([recipe.block for recipe in recipes], built, 3, partition)
    shares = rank_shares(model, layout, partition)
    assert [share.parameters for share in shares] == [
        sum(built[first:end]) for first, end in zip(bounds, bounds[1:], strict=False)
    ]
    assert [share.first for share in shares] == [True, False, False]
    assert [share.last for share in shares] == [False, False, True]
    if partition == "2,1,3":
        assert [share.blocks for share in shares] == [(2,), (1,), (3,)]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "dualpipev"])
def test_stages_against_the_schedule(schedule):
    schedules = pytest.importorskip("megatron.parallel.pipeline_schedules")
    layout = Layout(pipeline=4, schedule=schedule, chunks=1 if schedule == "1f1b" else 2)
    real = schedules.PipelineSchedule(schedule, 4, layout.chunks, 8)
    for rank in range(4):
        assert all(real.rank_of(stage) == rank for stage in stages_of(layout, rank))
    assert sorted(s for rank in range(4) for s in stages_of(layout, rank)) == [
        *range(4 * layout.chunks)
    ]


def test_a_tied_table_counts_once_a_rank(small):
    model = small("gpt2", num_layers=4)
    table = model.vocabulary.padded * model.hidden_size
    one_by_one = rank_shares(model, Layout(pipeline=2))
    both_ways = rank_shares(model, Layout(pipeline=2, schedule="dualpipev", chunks=2))
    whole = model_parameters(model, padded=True)
    assert sum(share.parameters for share in one_by_one) == whole + table
    assert sum(share.parameters for share in both_ways) == whole


def test_blocks_in_8_bits_are_counted_by_stage(small):
    """The last three of four blocks, in two stages of two ranks each."""
    layout = Layout(pipeline=2, schedule="dualpipev", chunks=2, float8=True)
    shares = rank_shares(small("llama", 1), layout, float8=range(1, 4))
    assert [share.float8 for share in shares] == [(0, 1), (1, 1)]
