"""Text models within models that see images: read as transformers computes them for texts, written
back into their folders with every other tensor and file untouched."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from samples import sampled

from megatron.checkpoint.files import CheckpointError
from megatron.formats.conversion.commands import export_into, to_hf
from megatron.formats.huggingface.compare import reference_of
from megatron.formats.huggingface.into import write_into
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.huggingface.within import text_content
from megatron.formats.inspection import model_of

TEXT = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip
SIGHT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "num_channels": 3,
}  # fmt: skip
_QWEN_SIGHT = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 14}
_QWEN3_SIGHT = _QWEN_SIGHT | {
    "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
_TOKENS = {
    "image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58,
    "vision_end_token_id": 57,
}  # fmt: skip
_GEMMA_TOKENS = {"image_token_index": 60, "boi_token_index": 59, "eoi_token_index": 58}


def _mrope(*section):
    return {"rope_type": "default", "rope_theta": 500.0, "mrope_section": list(section)}


def _clip(kind, **text):
    return {"text_config": {"model_type": kind} | TEXT | text, "vision_config": {
        "model_type": "clip_vision_model", "projection_dim": 16} | SIGHT}  # fmt: skip


_QWEN = {"text_config": TEXT | {"rope_parameters": _mrope(1, 1, 2)}} | _TOKENS
MODELS = {
    "qwen2_vl": _QWEN
    | {"vision_config": _QWEN_SIGHT | {"embed_dim": 16, "hidden_size": 32}},
    "qwen2_5_vl": _QWEN | {"tie_word_embeddings": True, "vision_config": _QWEN_SIGHT | {
        "intermediate_size": 24, "out_hidden_size": 32, "fullatt_block_indexes": [0]}},
    "gemma4": {"text_config": TEXT | {
        "head_dim": 8, "global_head_dim": 12, "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention"]},
        "audio_config": None, "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8,
            "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16}},
    "qwen3_vl": {"text_config": TEXT | {"head_dim": 8, "rope_parameters": _mrope(2, 1, 1)},
                 "vision_config": _QWEN3_SIGHT} | _TOKENS,
    "qwen3_vl_moe": {"text_config": TEXT | {
        "head_dim": 8, "rope_parameters": _mrope(2, 1, 1), "moe_intermediate_size": 20,
        "num_experts": 4, "num_experts_per_tok": 2}, "vision_config": _QWEN3_SIGHT} | _TOKENS,
    "qwen3_5": {"text_config": TEXT | {
        "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"]},
        "vision_config": _QWEN3_SIGHT} | _TOKENS,
    "llava": _clip("llama", num_key_value_heads=4) | {"image_token_index": 60},
    "llava_next": _clip("mistral", head_dim=12) | {"image_token_index": 60},
    "vipllava": _clip("llama", attention_bias=True) | {
        "image_token_index": 60, "vision_feature_layers": [0, 1]},
    "llava_onevision": {"text_config": {"model_type": "qwen2"} | TEXT, "vision_config": {
        "model_type": "siglip_vision_model"} | SIGHT, "image_token_index": 60,
        "video_token_index": 59},
    "internvl": {"text_config": {"model_type": "qwen2"} | TEXT, "vision_config": SIGHT | {
        "image_size": [28, 28], "patch_size": [14, 14]}, "image_token_id": 60},
    "mistral3": {"text_config": {"model_type": "mistral", "head_dim": 8} | TEXT,
                 "vision_config": {"model_type": "pixtral"} | SIGHT, "image_token_index": 60},
    "gemma3": {"text_config": TEXT | {"head_dim": 8, "sliding_window": 7,
                                      "query_pre_attn_scalar": 8},
               "vision_config": SIGHT, "mm_tokens_per_image": 4} | _GEMMA_TOKENS,
    "llama4": {"text_config": TEXT | {
        "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4,
        "attention_chunk_size": 9, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
        "vision_config": SIGHT | {"intermediate_size": 32, "vision_output_dim": 32,
                                  "projector_input_dim": 32, "projector_output_dim": 32},
        } | _GEMMA_TOKENS,
    "idefics3": {"text_config": {"model_type": "llama"} | TEXT, "vision_config": SIGHT,
                 "image_token_id": 60, "scale_factor": 2},
    "smolvlm": {"text_config": {"model_type": "llama"} | TEXT, "vision_config": SIGHT,
                "image_token_id": 60, "scale_factor": 2},
}  # fmt: skip
SAMPLE = ("qwen2_vl",)


@pytest.fixture
def saved(tmp_path):
    """Saves a model of a case, all weights random."""

    def save(name, **options):
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(name, **MODELS[name])
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for param in theirs.parameters():
                values = torch.randn(param.shape) * 0.15
                param.copy_(values + 1.0 if bool((param == 1).all()) else values)
        theirs.save_pretrained(tmp_path / name, **options)
        return tmp_path / name, theirs.eval()

    return save


class Changed(HuggingFaceFolder):
    """A folder with weights that training has changed."""

    def tensor(self, name, kind="weight"):
        return super().tensor(name, kind) * 1.5


def all_tensors(folder):
    files = folder.glob("*.safetensors")
    return {name: values for path in files for name, values in load_file(path).items()}


@pytest.mark.parametrize("name", sampled(MODELS, lambda name: name in SAMPLE))
def test_read_and_written_back(name, saved, tmp_path):
    origin, theirs = saved(name, max_shard_size="30KB")
    (origin / "preprocessor_config.json").write_text('{"size": 28}')
    source = Changed(origin)
    (line,) = source.notes
    assert f"the text model of {name} is read, and nothing else; to-hf --origin" in line
    plain = HuggingFaceFolder(origin)
    tokens = torch.randint(57, (2, 24), generator=torch.Generator().manual_seed(1))
    reference = reference_of(origin, plain.model)
    result = reference.compared_with(model_of(plain, torch.float32, torch.device("cpu")))
    assert result.agree and result.largest < 1e-10
    (tmp_path / "back").mkdir()
    assert write_into(source, origin, tmp_path / "back").architecture == source.architecture
    before, after = all_tensors(origin), all_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert all(torch.equal(after[key], before[key] * 1.5) for key in changed)
    sights = ("vis", "multi_modal", "connector", "image_newline", "embed_vis")
    assert {key for key in before if key not in changed} == {
        key for key in before if key.removeprefix("model.").startswith(sights)
    }
    for path in origin.glob("*.json"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    again, report = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        expected = {key: value * 1.5 for key, value in theirs.state_dict().items()}
        lines = again.state_dict()
        apart = [key for key in lines if torch.equal(lines[key], expected[key])]
        assert len(apart) >= len(source.names()) - 2  # fused tensors are fewer there
        assert again(input_ids=tokens).logits.isfinite().all()


def test_names_and_keys_of_other_releases(saved):
    """transformers 4 wrote Qwen2-VL's keys side by side, and LLaVA's tensors in two ways."""
    folder, _ = saved("qwen2_vl")
    expected = HuggingFaceFolder(folder)
    content = json.loads((folder / "config.json").read_text())
    text = content.pop("text_config")
    rope = text.pop("rope_parameters")
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": {
        "type": "mrope", "mrope_section": rope["mrope_section"]}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(text | older | content))
    actual = HuggingFaceFolder(folder)
    assert actual.model == expected.model
    folder, _ = saved("llava")
    shutil.copytree(folder, folder.with_name("before"))
    expected = HuggingFaceFolder(folder.with_name("before"))
    path = folder / "model.safetensors"
    tensors = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head", "lm_head")
        .replace("vision_tower.", "model.vision_tower."): values
        for name, values in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    actual = HuggingFaceFolder(folder)
    assert actual.model == expected.model and not actual.model.embedding.tied
    assert all(torch.equal(actual.tensor(name), expected.tensor(name)) for name in expected.names())
    tensors["decoder.lm_head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="contains decoder.lm_head.weight"):
        HuggingFaceFolder(folder)


def test_by_the_command(saved, tmp_path, capsys):
    """And what it refuses: another network, flags that the folder decides."""
    origin, _ = saved("qwen2_vl")
    output = tmp_path / "tuned"
    line = ["--load", str(origin), "--origin", str(origin), "--output", str(output)]
    to_hf(line)
    shown = capsys.readouterr().out
    assert "parameters replaced" in shown and "as the Qwen2 of" in shown and "agree" in shown
    assert all(
        torch.equal(values, all_tensors(output)[name])
        for name, values in all_tensors(origin).items()
    )
    with pytest.raises(ValueError, match="--dtype float16: with --origin it is that of the folder"):
        to_hf([*line, "--dtype", "float16", "--overwrite"])
    other = tmp_path / "other"
    shutil.copytree(origin, other)
    content = json.loads((other / "config.json").read_text())
    content["text_config"]["rms_norm_eps"] = 0.5
    (other / "config.json").write_text(json.dumps(content))
    (tmp_path / "back").mkdir()
    with pytest.raises(CheckpointError, match="another network: rms_norm_eps 0.5 .the checkpoint"):
        export_into(HuggingFaceFolder(origin), other, tmp_path / "back")
    assert not any((tmp_path / "back").iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "gemma3"}, "'gemma3', which sees images too, and text_config, .* missing"),
        ({"model_type": "llava", "text_config": {"model_type": 3}}, "text_config: model_type is 3"),
        ({"model_type": "mistral3", "text_config": []}, "text_config, .* is missing"),
    ],
)
def test_what_is_refused(content, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        text_content(content, tmp_path / "config.json")
