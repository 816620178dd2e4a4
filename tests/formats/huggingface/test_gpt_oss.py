"""Files of gpt-oss besides experts: MXFP4 against transformers' own dequantisation, and
the keys of its config.json."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.checkpoint.files import CheckpointError
from megatron.config.positions import RopeScaling
from megatron.formats.huggingface.config_reader import HFConfigReader, read_rope, read_windows
from megatron.formats.huggingface.packed.mxfp4 import check_quantization, unpacked
from megatron.formats.huggingface.weight_files import WeightFiles
from megatron.model.rope import scaled_frequencies

NAME = "model.layers.0.mlp.experts.gate_up_proj"


def packed(experts: int = 3, rows: int = 5, groups: int = 2):
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (experts, rows, groups, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(100, 150, (experts, rows, groups), generator=draw, dtype=torch.uint8)
    return blocks, scales


def test_mxfp4_against_transformers():
    blocks, scales = packed()
    blocks.view(-1)[:256] = torch.arange(256)
    scales[0] = torch.tensor([1, 254], dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    actual = unpacked(blocks, scales)
    assert actual.dtype == torch.bfloat16 and actual.shape == (3, 64, 5)
    assert torch.equal(actual, expected)


def test_mxfp4_by_its_definition():
    """Low nibble first, sign before exponent and mantissa; a scale of 255 is not a number."""
    blocks, scales = torch.zeros(1, 1, 2, 16, dtype=torch.uint8), torch.tensor([[[126, 255]]])
    blocks[0, 0, 0, :2] = torch.tensor([0x1F, 0xA7], dtype=torch.uint8)
    actual = unpacked(blocks, scales.byte())
    assert actual[0, :4, 0].tolist() == [-3.0, 0.25, 3.0, -0.5]
    assert not actual[0, 4:32].any() and actual[0, 32:].isnan().all()


@pytest.mark.parametrize("spread", [False, True], ids=["one file", "two files"])
def test_a_weight_in_mxfp4_is_one_tensor(tmp_path, spread):
    blocks, scales = packed()
    bias = torch.ones(3, 5)
    first = {f"{NAME}_blocks": blocks, f"{NAME}_bias": bias}
    second = {f"{NAME}_scales": scales}
    if spread:
        save_file(first, tmp_path / "a.safetensors")
        save_file(second, tmp_path / "b.safetensors")
        places = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
        index = str({"weight_map": places}).replace("'", '"')
        (tmp_path / "model.safetensors.index.json").write_text(index)
    else:
        save_file(first | second, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert set(files.files) == {NAME, f"{NAME}_bias"} and NAME in files
    assert files.shape(NAME) == (3, 64, 5) and files.dtype(NAME) == torch.bfloat16
    assert torch.equal(files.tensor(NAME), convert_moe_packed_tensors(blocks, scales))
    assert torch.equal(files.tensor(f"{NAME}_bias"), bias) and files.shape(f"{NAME}_bias") == (3, 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks, scales: (blocks[..., :15], scales), lambda b, s: (b, s[:, :4]),
        lambda b, s: (b.int(), s), lambda b, s: (b[0], s[0]),
    ],
)  # fmt: skip
def test_other_tensors_are_refused(tmp_path, change):
    blocks, scales = (x.contiguous() for x in change(*packed()))
    save_file({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{NAME}: MXFP4 requires blocks .* both uint8, not"):
        WeightFiles(tmp_path).tensor(NAME)


LAYERS = 24
PUBLISHED = {
    "head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "max_position_embeddings": 131072, "num_hidden_layers": LAYERS, "sliding_window": 128,
    "rope_theta": 150000, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
    },
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4",
    },
}  # fmt: skip
"""Keys of openai/gpt-oss-20b."""
FIELDS = {"kv_channels": 64, "max_position_embeddings": 131072}


def reader(**changes):
    return HFConfigReader(PUBLISHED | changes, Path("config.json"), "gpt-oss", "gpt_oss")


def test_its_windows_and_positions_can_be_represented():
    """Frequencies against those of transformers' configuration, which are not rounded."""
    given = reader()
    fields = read_rope(given, FIELDS) | read_windows(given, 128, PUBLISHED["layer_types"])
    assert (fields["sliding_window"], fields["window_attn_skip_freq"]) == (128, 2)
    assert fields["rotary_base"] == 150000 and fields["rotary_percent"] == 1.0
    config = GptOssConfig(**{k: v for k, v in PUBLISHED.items() if k != "quantization_config"})
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    plain = 1.0 / 150000 ** (torch.arange(0, 64, 2).float() / 64)
    scaling = RopeScaling.parse(fields["rope_scaling"], 32)
    ours, our_factor = scaled_frequencies(plain, 150000.0, scaling, 131072, False)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-12) and not scaling.truncate


def test_other_quantisation_is_refused():
    check_quantization(reader())
    check_quantization(reader(quantization_config=None))
    other = reader(quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="gptq.*only mxfp4 is read"):
        check_quantization(other)
