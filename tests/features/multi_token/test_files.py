"""Files of Hugging Face with multi-token prediction, against transformers' MtpModel."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from mtp_files import hf_losses, names_of, written
from safetensors.torch import load_file, save_file

from megatron.data.gpt_batch import GPTBatch
from megatron.families import spec_of
from megatron.features.experts.layer import Router
from megatron.features.multi_token.layers import with_losses_ahead
from megatron.features.recurrent.costs import with_states
from megatron.formats.conversion.commands import export_hf
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.compare import reference_of
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import model_of
from megatron.model.flops import TransformerShape
from megatron.parallel.shard import shard_of

GLM = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
    "num_experts_per_tok": 2, "n_routed_experts": 8, "moe_intermediate_size": 20, "head_dim": 12,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
SHARED = {
    key: value for key, value in GLM.items() if key not in ("head_dim", "use_qk_norm")
}  # fmt: skip
DEEPSEEK = SHARED | {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 10, "n_group": 1, "topk_group": 1,
    "attention_bias": False,
}  # fmt: skip
DELTA = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
SPARSE = DELTA | {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
CASES = {
    "deepseek_v3": ("deepseek_v3", DEEPSEEK, 1),
    "glm4_moe": ("glm4_moe", GLM, 1),
    "glm4_moe-2": ("glm4_moe", GLM, 2),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        DEEPSEEK | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        1,
    ),
    "qwen3_next": ("qwen3_next", SPARSE, 1),
    "qwen3_5": ("qwen3_5_text", DELTA, 1),
    "qwen3_5_moe": ("qwen3_5_moe_text", SPARSE, 1),
}


PARAMS = [
    pytest.param(name, marks=() if name == "deepseek_v3" else pytest.mark.proof) for name in CASES
]


@pytest.fixture(scope="module", params=PARAMS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param.replace("-", "_"))
    model_type, keys, depth = CASES[request.param]
    return path, *written(model_type, keys, depth, path), depth


def test_losses_and_gradients_of_transformers(folder):
    path, main, predicting, depth = folder
    source = HuggingFaceFolder(path)
    source.read_ahead()
    assert source.model.blocks_ahead == depth
    stack = model_of(source, torch.float32, torch.device("cpu")).double().requires_grad_()
    for module in stack.modules():
        if isinstance(module, Router):
            module.dtype = None  # it computes in float32, whatever the weights have
    spec = with_losses_ahead(spec_of(source.model), source.model)
    text_BT = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(0))
    batch = GPTBatch(text_BT[:, :-1], text_BT[:, 1:], torch.ones(2, 12), None, None)
    losses = stack(spec.begin(batch)).losses
    main.double(), predicting.double()
    rotary = main.model.rotary_emb
    width = 2 * len(rotary.inv_freq)
    rotary.inv_freq = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    expected = hf_losses(main, predicting, text_BT)
    for name, reference in zip(spec.losses, expected, strict=True):
        torch.testing.assert_close(losses[name], reference, rtol=1e-10, atol=0)
    spec.total(losses).backward()
    (expected[0] + 0.1 * sum(expected[1:]) / depth).backward()
    ours = {
        name: shard_of(param).join([param.grad]) for name, param in stack.canonical_parameters()
    }
    theirs = {f"model.{name}": p for name, p in main.model.named_parameters()}
    theirs["lm_head.weight"] = main.lm_head.weight
    for at, layer in enumerate(predicting.layers):
        block, modules = names_of(source.architecture.model_type, 2, at)
        theirs |= {f"{block}.{name}": p for name, p in layer.mtp_block.named_parameters()}
        theirs |= {f"{modules[n]}.weight": getattr(layer, n).weight for n in modules}
        for kind, stacked in (("up", "gate_up_proj"), ("down", "down_proj")):
            if f"{block}.mlp.experts.{stacked}" not in theirs:
                continue
            gradient = ours[f"mtp.{at}.block.mlp.experts.{kind}.weight"]
            assert_alike(gradient, theirs.pop(f"{block}.mlp.experts.{stacked}").grad, block)
    compared = set()
    for parameter in source.architecture.parameters(source.model):
        if parameter.ours in ours:
            for name, gradient in parameter.to_hf(ours[parameter.ours]).items():
                if name in theirs:
                    assert_alike(gradient, theirs[name].grad, name)
                    compared.add(name)
    assert {name for name in theirs if ".experts." not in name} == compared


def assert_alike(gradient: torch.Tensor, reference: torch.Tensor, name: str) -> None:
    bound = 1e-10 * max(float(reference.abs().max()), 1e-4)
    assert float((gradient - reference).abs().max()) < bound, name


def test_files_are_written_as_they_were(folder, tmp_path):
    path = folder[0]
    export_hf(HuggingFaceFolder(path), tmp_path, 2**30, "float32")
    before, after = (load_file(each / "model.safetensors") for each in (path, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = HuggingFaceFolder(tmp_path)
    again.read_ahead()
    assert again.model.blocks_ahead == folder[-1]


def test_files_are_read_without_by_default(folder):
    source = HuggingFaceFolder(folder[0])
    assert source.model.blocks_ahead == 0
    assert not [name for name in source.names() if name.startswith("mtp.")]
    (note,) = source.notes
    merge = names_of(source.architecture.model_type, 2, 0)[1]["eh_proj"]
    assert f"{merge}.weight" in note and "--mtp-num-layers" in note
    source.read_ahead()
    assert not source.notes


def test_tensors_that_transformers_does_not_read_are_no_alarm(folder):
    lines, handler = [], logging.Handler()
    handler.emit = lines.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        reference_of(folder[0], HuggingFaceFolder(folder[0]).model)
    finally:
        logger.removeHandler(handler)
    assert not lines


def test_a_missing_tensor_is_named(folder, tmp_path):
    tensors = load_file(folder[0] / "model.safetensors")
    model_type = HuggingFaceFolder(folder[0]).architecture.model_type
    missing = f"{names_of(model_type, 2, 0)[1]['hnorm']}.weight"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=f"lacks {re.escape(missing)}"):
        HuggingFaceFolder(tmp_path).read_ahead()


def test_weights_of_images_stay_out(tmp_path):
    """A published Qwen3.5 sees images too: the text model and its predictions are read alone."""
    main, _ = written("qwen3_5_text", DELTA, 1, tmp_path)
    path, content = (
        tmp_path / "model.safetensors",
        json.loads((tmp_path / "config.json").read_text()),
    )
    renamed = {
        re.sub(r"^model\.", "model.language_model.", name): values
        for name, values in load_file(path).items()
    }
    image = {"model.visual.patch_embed.proj.weight": torch.ones(4, 4)}
    save_file(renamed | image, path, {"format": "pt"})
    whole = {"model_type": "qwen3_5", "text_config": content, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    source = HuggingFaceFolder(tmp_path)
    source.read_ahead()
    assert source.model.blocks_ahead == 1
    assert torch.equal(source.tensor("mtp.0.merge.weight"), renamed["mtp.fc.weight"])
    first = main.model.layers[0].mlp.down_proj.weight
    assert torch.equal(source.tensor("layers.0.mlp.down.weight"), first)
    (note,) = source.notes
    assert "the text model of qwen3_5 is read, and nothing else" in note
    assert "--mtp-num-layers" not in note


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_num_layers": 2}, "no --mtp-num-layers"),
        ({"linear_attention_freq": "[1,1]"}, "with --mtp-num-layers attention in the last layer"),
    ],
)
def test_predictions_without_names_are_refused(changes, message):
    content = {"model_type": "qwen3_5_text"} | DELTA | {"layer_types": DELTA["layer_types"][:2]}
    known = architecture_named(content, Path("config.json"))
    flags = known.model(content, Path("config.json")).flags()
    fits, other = (
        dataclasses.replace(flags, **{"mtp_num_layers": 1} | each).resolve().with_vocabulary(61)
        for each in ({}, changes)
    )
    assert known.misfits(fits) == []
    assert known.misfits(other) == [message]


@pytest.mark.parametrize(("freq", "times"), [("[1,0]", 1), ("[0,1]", 2)])
def test_operations_of_blocks_with_states(freq, times):
    """A block ahead is as the last: it has a state, which is counted, or none."""
    content = {"model_type": "qwen3_5_text"} | DELTA | {"layer_types": DELTA["layer_types"][:2]}
    known = architecture_named(content, Path("config.json"))
    flags = known.model(content, Path("config.json")).flags()
    alone, ahead = (
        with_states(TransformerShape.of(model), model)
        for model in (
            dataclasses.replace(flags, linear_attention_freq=freq, mtp_num_layers=number)
            .resolve()
            .with_vocabulary(61)
            for number in (0, 1)
        )
    )
    assert ahead.within == pytest.approx([times * each for each in alone.within])
    assert len(ahead.windows) == 3 and ahead.windows.count(0) == times
