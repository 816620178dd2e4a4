"""A folder of Hugging Face as a checkpoint: every form of weights, and whatever can be wrong."""

import json
import pickle
import struct

import pytest
import torch
from hf_cases import CASES
from safetensors.torch import load_file, save_file

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.slices import Slice
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.tokenizer.plain import NullTokenizer


@pytest.fixture
def folder(hf_folder):
    return hf_folder("llama", **CASES["llama"]["kv_heads=2,untied"])


def tensors_of(folder):
    source = HuggingFaceFolder(folder)
    return {name: source.tensor(name) for name in source.names()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def rewrite(folder, change):
    """Changes the tensors of model.safetensors by a function."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_whole_parameters_and_parts(folder):
    source = HuggingFaceFolder(folder)
    assert source.state == {} and source.run is None and source.tokenizer is None
    assert source.model.vocabulary.size == 61 and source.model.seq_length == 40
    assert source.names()[0] == "embedding.word_embeddings.weight"
    name = "layers.1.attention.qkv.weight"
    assert source.shape(name) == (64, 32) and source.kinds(name) == ["weight"]
    whole = source.tensor(name)
    assert torch.equal(source.read(name, "weight", Slice.whole((64, 32))).view(64, 32), whole)
    with pytest.raises(CheckpointError, match="no exp_avg of layers.1.attention.qkv.weight"):
        source.tensor(name, "exp_avg")
    with pytest.raises(CheckpointError, match="has no parameter layers.9"):
        source.tensor("layers.9.mlp.up.weight")


@pytest.mark.parametrize("form", ["safetensors", "bin", "old bin", "shards", "bin shards"])
def test_every_form_of_weights(form, folder, hf_model):
    expected = tensors_of(folder)
    tensors = load_file(folder / "model.safetensors")
    if form == "shards":
        (folder / "model.safetensors").unlink()
        model = hf_model("llama", **CASES["llama"]["kv_heads=2,untied"])
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    elif form.endswith("bin"):
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin",
                   _use_new_zipfile_serialization=form == "bin")  # fmt: skip
    elif form == "bin shards":
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = {"pytorch_model-00001-of-00002.bin": names[:9],
                 "pytorch_model-00002-of-00002.bin": names[9:]}  # fmt: skip
        for file, members in parts.items():
            torch.save({name: torch.nn.Parameter(tensors[name]) for name in members}, folder / file)
        weight_map = {name: file for file, members in parts.items() for name in members}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert equal(tensors_of(folder), expected)


def test_half_precision_is_widened(hf_folder, hf_model, tmp_path):
    model = hf_model("bloom", **CASES["bloom"]["tied"]).bfloat16()
    model.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    name = "layers.0.mlp.up.weight"
    assert source.dtype(name) == "bfloat16"
    actual = source.tensor(name)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, model.transformer.h[0].mlp.dense_h_to_4h.weight.float())


@pytest.mark.parametrize(
    ("model_type", "prefix"),
    [("gpt2", "transformer."), ("bloom", "transformer."), ("opt", "model."),
     ("gpt_neox", "gpt_neox.")],
)  # fmt: skip
def test_names_without_the_first_part(model_type, prefix, hf_folder):
    """As files have them that were saved from the model without a head (openai-community/gpt2)."""
    case = "untied" if model_type == "gpt_neox" else "tied"
    folder = hf_folder(model_type, **CASES[model_type][case])
    expected = tensors_of(folder)

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)

    rewrite(folder, strip)
    assert not any(name.startswith(prefix) for name in load_file(folder / "model.safetensors"))
    assert equal(tensors_of(folder), expected)


@pytest.mark.parametrize(
    ("model_type", "case", "buffers"),
    [
        ("gpt2", "tied", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("llama", "kv_heads=4,untied", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        ("gpt_neox", "untied", ["gpt_neox.layers.0.attention.bias",
                                "gpt_neox.layers.1.attention.masked_bias",
                                "gpt_neox.layers.1.attention.rotary_emb.inv_freq"]),
    ],
)  # fmt: skip
def test_buffers_of_older_files_are_passed_over(model_type, case, buffers, hf_folder):
    folder = hf_folder(model_type, **CASES[model_type][case])
    expected = tensors_of(folder)
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(2) for name in buffers}))
    assert equal(tensors_of(folder), expected)


def test_a_tied_head_may_be_there_twice(hf_folder):
    folder = hf_folder("falcon", **CASES["falcon"]["7b"])
    expected = tensors_of(folder)
    table = load_file(folder / "model.safetensors")["transformer.word_embeddings.weight"]
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    assert equal(tensors_of(folder), expected)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][3, 4].add_(1e-3))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from transformer.word_emb"):
        HuggingFaceFolder(folder)


def test_neox_head_by_its_newer_name(hf_folder):
    folder = hf_folder("gpt_neox", **CASES["gpt_neox"]["untied"])
    expected = tensors_of(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t.pop("embed_out.weight")}))
    assert equal(tensors_of(folder), expected)


def drop(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)


def cut(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"model.safetensors lacks model.layers.1.mlp.up_proj.weight; .*Llama"),
        (
            add,
            r"model.safetensors contains model.layers.0.self_attn.q_proj.bias; .*no such tensors",
        ),
        (cut, r"model.safetensors: model.norm.weight has the shape \(31,\); .* makes it \(32,\)"),
    ],
)
def test_other_tensors_are_refused(change, message, folder):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceFolder(folder)


def test_an_untied_model_without_a_head(folder):
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight"):
        HuggingFaceFolder(folder)


@pytest.mark.parametrize("size", [0, 7, 500, 30000])
def test_a_truncated_file(size, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        HuggingFaceFolder(folder)


class Shouts:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_pickle_runs_nothing(wrapped, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    content = {"model.norm.weight": Shouts(tmp_path / "ran")}
    if wrapped:
        torch.save(content, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        HuggingFaceFolder(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "contains list, not tensors"),
        ({"model.norm.weight": 3.0}, "'model.norm.weight' is float, not a tensor"),
    ],
)
def test_a_pickle_of_something_else(content, message, folder):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"pytorch_model.bin.*{message}"):
        HuggingFaceFolder(folder)


def header_of(**tensors):
    content = json.dumps(tensors).encode()
    return struct.pack("<Q", len(content)) + content


FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**6) + b"[" * 10**6,
        header_of(**{"model.norm.weight": FLOATS, "x": FLOATS}) + bytes(8),
        header_of(**{"model.norm.weight": {**FLOATS, "shape": [2**40]}}) + bytes(8),
        header_of(**{"model.norm.weight": {**FLOATS, "shape": [2**62, 4]}}) + bytes(8),
        header_of(**{"model.norm.weight": {**FLOATS, "data_offsets": [0, 2**62]}}) + bytes(8),
    ],
    ids=["length", "nesting", "overlap", "shape", "overflow", "offsets"],
)
def test_headers_that_lie(content, folder):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        HuggingFaceFolder(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index.json is not valid JSON"),
        ("[]", "index.json has no weight_map"),
        ('{"weight_map": {"model.norm.weight": "a.safetensors"}}', "a.safetensors is missing"),
        (
            '{"weight_map": {"model.norm.weight": "../a"}}',
            "names '../a', which is not a file of this",
        ),
        ('{"weight_map": {"model.nrom.weight": "all.safetensors"}}', "lacks model.nrom.weight"),
    ],
)
def test_a_wrong_index(index, message, folder):
    (folder / "model.safetensors").rename(folder / "all.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceFolder(folder)


def test_what_the_index_does_not_name_counts_too(folder):
    (folder / "model.safetensors").rename(folder / "all.safetensors")
    weight_map = dict.fromkeys(load_file(folder / "all.safetensors"), "all.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    HuggingFaceFolder(folder)
    tensors = load_file(folder / "all.safetensors") | {"extra": torch.zeros(1)}
    save_file(tensors, folder / "all.safetensors")
    with pytest.raises(CheckpointError, match="contains extra"):
        HuggingFaceFolder(folder)


def test_locate(folder, tmp_path):
    assert HuggingFaceFolder.locate(folder, None) == folder
    assert HuggingFaceFolder.locate(tmp_path, None) is None
    assert HuggingFaceFolder.locate(tmp_path / "nothing", None) is None
    with pytest.raises(CheckpointError, match="is a model of Hugging Face, and has no 7"):
        HuggingFaceFolder.locate(folder, "7")
    (folder / "model.safetensors").unlink()
    assert HuggingFaceFolder.locate(folder, None) == folder
    with pytest.raises(CheckpointError, match="has none of model.safetensors, "):
        HuggingFaceFolder(folder)
    (folder / "config.json").write_text('{"model": {"num_layers": 2}}')  # one of this project
    assert HuggingFaceFolder.locate(folder, None) is None


def test_tokenizer(folder, tmp_path):
    assert not HuggingFaceFolder(folder).copy_tokenizer(tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()
    NullTokenizer(60).save_pretrained(folder)
    source = HuggingFaceFolder(folder)
    assert source.tokenizer.tokenizer_type == "HFTokenizer"
    assert source.tokenizer.tokenizer_model == str(folder)
    assert source.copy_tokenizer(tmp_path / "tokenizer")
    assert sorted(path.name for path in (tmp_path / "tokenizer").iterdir()) == [
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
