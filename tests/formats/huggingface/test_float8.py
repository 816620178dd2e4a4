"""Weights of 8 bits with a scale for each block, against what transformers makes of them."""

import json

import pytest
import torch
from hf_more_cases import MORE_CASES
from safetensors.torch import load_file, save_file
from test_against_hf import assert_same_logits
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megatron.checkpoint.files import CheckpointError
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.packed.float8 import BLOCK, DTYPE, SCALES, scaled
from megatron.formats.huggingface.source import HuggingFaceFolder

SIZES = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64, "rotary_dim": 32}
CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["gate", "lm_head"],
}  # fmt: skip
WHOLE = ("norm", "embed_tokens", "lm_head", "block_sparse_moe.gate", "bias")


def quantised(weight):
    """Numbers and scales, of which a block's largest number has the largest magnitude."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.stack(
        [
            torch.stack([part.abs().max() / 448 for part in row.split(BLOCK, 1)])
            for row in weight.split(BLOCK, 0)
        ]
    )
    assert scales.shape == (rows, columns)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (weight / wide[: weight.shape[0], : weight.shape[1]]).to(DTYPE), scales


@pytest.fixture
def folder(hf_model, tmp_path):
    """A MiniMax-M2 in 8 bits, as it is published."""
    case = MORE_CASES["minimax_m2"]["plain"] | SIZES
    theirs = hf_model("minimax_m2", scale=0.06, **case)
    theirs.save_pretrained(tmp_path)
    tensors = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if any(word in name for word in WHOLE):
            tensors[name] = weight
        else:
            tensors[name], tensors[name + SCALES] = quantised(weight)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": CONFIG}))
    return tmp_path


def changed(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256)])
def test_numbers_against_transformers(shape):
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(shape, generator=draw).to(DTYPE)
    scales = torch.rand(*shape[:-2], *(size // BLOCK for size in shape[-2:]), generator=draw)
    expected = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32)
    assert torch.equal(scaled(numbers, scales), expected)
    assert torch.equal(
        scaled(numbers, scales.bfloat16()), scaled(numbers, scales.bfloat16().float())
    )


def test_blocks_at_the_edges_are_smaller():
    """As the 576 rows of DeepSeek-V3's latents, by their definition."""
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(200, 300, generator=draw).to(DTYPE)
    scales = torch.rand(2, 3, generator=draw)
    actual = scaled(numbers, scales)
    for row, column in ((0, 0), (127, 127), (128, 127), (199, 255), (199, 299)):
        expected = numbers[row, column].float() * scales[row // BLOCK, column // BLOCK]
        assert actual[row, column] == expected


def test_a_folder_is_what_transformers_dequantises(folder):
    source = HuggingFaceFolder(folder)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    ).eval()
    assert_same_logits(source, theirs, "minimax_m2")
    actual = source.tensor("layers.1.attention.proj.weight")
    assert torch.equal(actual, theirs.state_dict()[NAME])
    (folder / "back").mkdir()
    write_model(source, folder / "back", "bfloat16", 10**9)
    assert "quantization_config" not in json.loads((folder / "back/config.json").read_text())
    stored, written = (load_file(f / "model.safetensors") for f in (folder, folder / "back"))
    assert {*written} == {name for name in stored if not name.endswith(SCALES)}
    for name, weight in written.items():
        if name + SCALES in stored:
            expected = scaled(stored[name], stored[name + SCALES]).bfloat16()
            assert torch.equal(weight, expected), name
    assert HuggingFaceFolder(folder / "back").model == source.model


NAME = "model.layers.1.self_attn.o_proj.weight"
WRONG = {
    "scales of another shape": (
        lambda t: t | {NAME + SCALES: torch.ones(2, 1)},
        rf"model\.safetensors: {NAME}: a weight \(256, 256\) .*\(2, 2\), not \(2, 1\)"),
    "scales for rows alone": (
        lambda t: t | {NAME + SCALES: torch.ones(3)}, r"scales \(2, 2\), not \(3,\)"),
    "no scales": (
        lambda t: {n: v for n, v in t.items() if n != NAME + SCALES},
        rf"model\.safetensors: {NAME}: numbers of 8 bits \(torch.float8_e4m3fn\) require scales"),
    "integers": (
        lambda t: t | {NAME: torch.ones(256, 256, dtype=torch.int8)},
        rf"{NAME}: a weight with scales must be torch\.float8_e4m3fn.*int8"),
    "scales of a missing weight": (
        lambda t: t | {"model.x.weight_scale_inv": torch.ones(1, 1)}, r"contains model\.x\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("why", WRONG)
def test_what_is_wrong_is_named(why, folder):
    change, message = WRONG[why]
    changed(folder, change)
    with pytest.raises(CheckpointError, match=message):
        source = HuggingFaceFolder(folder)
        for name in source.names():
            source.tensor(name)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"quant_method": "quark"}, "quantised weights of quark are not read here; those of awq"),
        (CONFIG | {"weight_block_size": [1, 0]}, r"weight_block_size \[1, 0\] is not two sizes"),
        (CONFIG | {"fmt": "e5m2"}, "fmt 'e5m2' is not e4m3"),
    ],
)
def test_other_methods_are_refused(form, message, folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": form}))
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceFolder(folder)
