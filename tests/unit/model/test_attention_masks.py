"""Masks of small sequences as they are written down, and ALiBi against transformers' BLOOM."""

import math

import pytest
import torch
from configs import model_config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from megatron.model.attention_backends import AttentionScoring
from megatron.model.attention_masks import (
    AttentionMasks,
    alibi_slopes,
    causal_mask,
    distance_biases,
    document_mask,
    window_mask,
)
from megatron.parallel.mesh import Group

CPU = torch.device("cpu")


def test_causal_mask_puts_the_last_query_at_the_last_key():
    assert causal_mask(2, 4, CPU).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_window_counts_the_query_itself():
    assert window_mask(4, 4, 2, CPU).int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1],
    ]  # fmt: skip
    assert window_mask(2, 4, 2, CPU).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_document_mask():
    mask = document_mask(torch.tensor([[0, 0, 1]]))
    assert mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_window_within_documents():
    mask = AttentionMasks(torch.tensor([[0, 0, 0, 1]])).visible(4, 4, 2, CPU)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1],
    ]  # fmt: skip


def test_distances_end_at_the_query():
    found = distance_biases(2, 3, (1.0, 0.5), CPU)
    assert found.tolist() == [
        [[-1.0, 0.0, 1.0], [-2.0, -1.0, 0.0]],
        [[-0.5, 0.0, 0.5], [-1.0, -0.5, 0.0]],
    ]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 112])
def test_slopes_against_transformers(heads):
    """Its biases differ from ours by the same for all keys of a query, which a softmax ignores."""
    theirs_NT = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32).view(heads, 2)
    slopes = torch.tensor(alibi_slopes(heads))
    torch.testing.assert_close(slopes, theirs_NT[:, 1] - theirs_NT[:, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_slopes_of_their_heads(heads, size):
    config = model_config(num_attention_heads=heads, position_embedding_type="alibi")
    found = [
        AttentionScoring.of(config, 0, Group(tuple(range(size)), rank)) for rank in range(size)
    ]
    assert tuple(slope for scores in found for slope in scores.slopes) == alibi_slopes(heads)


def test_scores_of_a_configuration():
    config = model_config(
        num_layers=4, num_attention_heads=4, query_pre_attn_scalar=16.0, sliding_window=5,
        window_attn_skip_freq=3, attn_logit_softcapping=50.0,
    )  # fmt: skip
    found = [AttentionScoring.of(config, layer) for layer in range(4)]
    assert found[0] == AttentionScoring(scale=1 / math.sqrt(16), softcap=50.0, window=5)
    assert [scores.window for scores in found] == [5, 5, None, 5]
    assert config.windows == (5, 5, None, 5)
    assert AttentionScoring.of(model_config(), 0) == AttentionScoring()
