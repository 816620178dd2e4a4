"""Rotary positions against complex numbers and against transformers."""

import json

import pytest
import torch
from configs import model_config
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config, PhiConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.phi import modeling_phi
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from megatron.config.positions import RopeScaling, llama3_scaling
from megatron.model.rope import RotaryEmbedding, apply_rope, scaled_frequencies

CPU = torch.device("cpu")


def angles(rotation, length):
    return rotation.angles(length, None, None, CPU)


@pytest.mark.parametrize("rotated", [8, 4])
def test_rotates_pairs_as_complex_numbers(rotated):
    x_BSND = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    found = apply_rope(x_BSND, *angles(RotaryEmbedding(rotated, 100.0, 5), 5))
    half = rotated // 2
    pairs = torch.complex(x_BSND[..., :half], x_BSND[..., half:rotated])
    frequencies = 100.0 ** (-2 * torch.arange(half, dtype=torch.float64) / rotated)
    turns = torch.arange(5, dtype=torch.float64)[:, None, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(turns), turns)
    expected = torch.cat([turned.real, turned.imag, x_BSND[..., rotated:]], -1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the table is float32


def test_scores_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 1, 8).double()
    cos, sin = angles(RotaryEmbedding(8, 10000.0, 64), 64)

    def score(at_q, at_k):
        turned = [apply_rope(x, cos[at, None], sin[at, None]) for x, at in ((q, at_q), (k, at_k))]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(60, 55), abs=1e-5)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


@pytest.mark.parametrize(("mode", "base"), [(torch.inference_mode, 11.0), (FakeTensorMode, 12.0)])
def test_table_outlives_modes(mode, base):
    rotation = RotaryEmbedding(4, base, 4)  # of no other test: its table is not kept yet
    with mode():
        angles(rotation, 4)
    x = torch.randn(1, 4, 1, 4, requires_grad=True)
    apply_rope(x, *angles(rotation, 4)).sum().backward()
    assert x.grad is not None and x.grad.sum() != 0


WIDTH, POSITIONS, BASE = 32, 512, 10000.0
LONG = {
    "rope_type": "longrope",
    "short_factor": [1 + n / 50 for n in range(WIDTH // 2)],
    "long_factor": [1 + n**1.5 for n in range(WIDTH // 2)],
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FORMS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3-other": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 9.0, "factor": 3.0},
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 0.7},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn-betas": YARN | {"beta_fast": 4.0, "beta_slow": 2.0},
    "yarn-not-rounded": YARN | {"truncate": False},
    "yarn-step": YARN | {"beta_fast": 1.001, "beta_slow": 1.0, "truncate": False},
    "yarn-shorter": YARN | {"factor": 0.5},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    "longrope": LONG,
    "longrope-factor": LONG | {"factor": 3.0},
    "longrope-shorter": LONG | {"factor": 1.0},
    "longrope-attention-factor": LONG | {"attention_factor": 1.3},
}


def llama(**form):
    return LlamaConfig(
        hidden_size=2 * WIDTH, num_attention_heads=2, max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": BASE, **form},
    )  # fmt: skip


@pytest.mark.parametrize("length", [64, 65])
@pytest.mark.parametrize("form", FORMS)
def test_scaled_frequencies_against_transformers(form, length):
    """Up to the original length, and beyond it."""
    scaling = RopeScaling.parse(json.dumps(FORMS[form]), WIDTH // 2)
    compute = ROPE_INIT_FUNCTIONS[scaling.rope_type]
    theirs, factor = compute(llama(**FORMS[form]), CPU, seq_len=length)
    plain = 1.0 / BASE ** (torch.arange(0, WIDTH, 2).float() / WIDTH)
    ours, our_factor = scaled_frequencies(plain, BASE, scaling, POSITIONS, long=length > 64)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-12)
    assert form in ("dynamic", "yarn-shorter") or not torch.allclose(ours, plain, rtol=1e-3)


def config(**changes):
    shape = {
        "num_layers": 4, "kv_channels": WIDTH, "max_position_embeddings": POSITIONS,
        "position_embedding_type": "rope",
    }  # fmt: skip
    return model_config(**shape | changes)


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_angles_against_transformers(length):
    """The length of the sequence chooses the factors, whose positions may start again within."""
    theirs = Phi3RotaryEmbedding(
        Phi3Config(
            hidden_size=2 * WIDTH, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
            max_position_embeddings=POSITIONS, original_max_position_embeddings=64,
            rope_parameters={"rope_theta": BASE, **LONG},
        )
    )  # fmt: skip
    cos_BSD, sin_BSD = theirs(torch.zeros(1), torch.arange(length)[None])
    rotation = RotaryEmbedding.of(config(rope_scaling=json.dumps(LONG)), 0)
    cos, sin = angles(rotation, length)
    torch.testing.assert_close(cos[:, 0], cos_BSD[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin[:, 0], sin_BSD[0], rtol=1e-5, atol=1e-5)
    restarted = torch.arange(length)[None] % 50
    again, _ = rotation.angles(length, restarted, None, CPU)
    assert torch.equal(again[0, :, 0], cos[restarted[0], 0])
    # Behind a cache the last position tells the length.
    last, _ = rotation.angles(1, torch.tensor([[length - 1]]), torch.tensor([[length]]), CPU)
    assert torch.equal(last[0, 0], cos[-1])


@pytest.mark.parametrize(
    ("module", "made"),
    [
        (modeling_gpt_neox.GPTNeoXRotaryEmbedding, GPTNeoXConfig),
        (modeling_phi.PhiRotaryEmbedding, PhiConfig),
    ],
    ids=["gpt-neox", "phi"],
)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.4])
def test_partial_rotation_against_transformers(module, made, share):
    theirs = made(hidden_size=160, num_attention_heads=2, max_position_embeddings=16)
    theirs.rope_parameters = {
        "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": share,
    }  # fmt: skip
    x_BNSD = torch.randn(2, 2, 7, 80)
    cos_BSD, sin_BSD = module(theirs)(x_BNSD, torch.arange(7)[None])
    apply = modeling_phi.apply_rotary_pos_emb
    if made is GPTNeoXConfig:
        expected, _ = modeling_gpt_neox.apply_rotary_pos_emb(x_BNSD, x_BNSD, cos_BSD, sin_BSD)
    else:
        width = cos_BSD.shape[-1]
        turned, _ = apply(x_BNSD[..., :width], x_BNSD[..., :width], cos_BSD, sin_BSD)
        expected = torch.cat([turned, x_BNSD[..., width:]], -1)
    shape = config(
        kv_channels=80, rotary_percent=share, rotary_base=5000.0, max_position_embeddings=16
    )
    found = apply_rope(x_BNSD.transpose(1, 2), *angles(RotaryEmbedding.of(shape, 0), 7)).transpose(
        1, 2
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_blocks_with_a_window_have_a_base_of_their_own():
    shape = config(
        sliding_window=8, window_attn_skip_freq=2, rotary_base=1e6, rotary_base_local=1e4,
        rope_scaling=json.dumps(FORMS["linear"]),
    )  # fmt: skip
    local, whole = RotaryEmbedding.of(shape, 0), RotaryEmbedding.of(shape, 1)
    assert (local.base, local.scaling.rope_type) == (1e4, "default")
    assert (whole.base, whole.scaling.factor) == (1e6, 2.5)
    assert RotaryEmbedding.of(model_config(position_embedding_type="alibi"), 0) is None


def test_use_rope_scaling_is_llama_3_1():
    """Its config.json says: factor 8, low 1, high 4, original length 8192."""
    published = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    }  # fmt: skip
    assert json.loads(llama3_scaling(8.0).to_json()) == published
    assert RopeScaling.parse(json.dumps(published), 64) == llama3_scaling(8.0)
