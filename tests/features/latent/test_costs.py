"""Weights and FLOPs of plans against the layer's own matrices, counted."""

import pytest
import torch
from configs import model_config
from latent_sizes import HEADS, LENGTH, PLAIN, ROTATED, SHAPES, SIZES, VALUE

from megatron.apps.planning.parameters import attention_weights
from megatron.features.latent.attention import LatentAttention
from megatron.features.latent.costs import kept_numbers, with_latents
from megatron.model.flops import TransformerShape
from megatron.parallel.tensor_parallel import TensorParallel


def matrices(config):
    with torch.device("meta"):
        layer = LatentAttention(config, 0, TensorParallel(), False)
    return sum(param.numel() for param in layer.parameters() if param.ndim == 2)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("shape", ["ranked", "direct", "biased"])
def test_weights_and_flops_are_those_of_the_layer(shape, ahead):
    """Two operations a weight and token forward, and 2 (D + V) for each key of a head; blocks that
    predict further tokens have them too, and a projection that merges two vectors."""
    config = model_config(**SIZES | SHAPES[shape] | {"mtp_num_layers": ahead or None})
    weights = matrices(config)
    assert attention_weights(config, 1) == weights
    flops = with_latents(TransformerShape.of(config), config).flops_per_token(causal=False)
    mlp = 2 * config.hidden_size * config.mlp.ffn_hidden_size
    scores = HEADS * (PLAIN + ROTATED + VALUE) * LENGTH
    assert flops == 6 * ((1 + ahead) * (weights + mlp + scores) + ahead * 2 * config.hidden_size**2)


def test_recomputation_keeps_latent_vectors_and_the_output():
    config = model_config(**SIZES)
    of_heads, latents = kept_numbers(config, 1, True)
    assert of_heads == HEADS * VALUE
    assert kept_numbers(config, 1, False)[1] == latents
    # Queries, keys, padded values, the output and its part without padding.
    assert kept_numbers(config, 1, False)[0] == HEADS * (4 * (PLAIN + ROTATED) + VALUE)
