"""What a new activation needs next to its function: each part of the code knows all of them."""

import pytest
from configs import model_config

from megatron.apps.planning.activations import MLP_WIDTHS
from megatron.config.blocks import MLP_ACTIVATIONS, MLPConfig
from megatron.formats.huggingface import config_reader
from megatron.formats.huggingface.decoders.ungated import APERTUS


def test_memory_of_every_activation_is_known():
    assert set(MLP_WIDTHS) == set(MLP_ACTIVATIONS)


def test_every_activation_has_a_name_in_hugging_face():
    assert set(config_reader.ACTIVATION_NAMES) == set(MLP_ACTIVATIONS)


@pytest.mark.parametrize("activation", MLP_ACTIVATIONS)
def test_flags_give_the_activation_back(activation):
    mlp = MLPConfig(ffn_hidden_size=24, activation=activation, bias=True)
    assert model_config(**mlp.flags()).mlp == mlp


def test_flags_give_a_changed_gate_back():
    mlp = MLPConfig(
        ffn_hidden_size=24, activation="quick_geglu", bias=True, glu_linear_offset=1.0,
        activation_func_clamp_value=7.0,
    )  # fmt: skip
    assert model_config(**mlp.flags()).mlp == mlp


@pytest.mark.parametrize("activation", MLP_ACTIVATIONS)
def test_its_hugging_face_name_gives_the_activation_back(activation):
    gated = MLPConfig(ffn_hidden_size=24, activation=activation, bias=True).gated
    known = config_reader.GATES if gated else APERTUS.activations
    flags = known[config_reader.ACTIVATION_NAMES[activation]]
    assert model_config(**flags).mlp.activation == activation
