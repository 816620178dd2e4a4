"""The written folder: what transformers makes of it, shards, dtypes, all or nothing."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatron.checkpoint.files import CheckpointError, write_json
from megatron.checkpoint.reader import CheckpointReader
from megatron.formats.conversion.output import published
from megatron.formats.huggingface import architecture_of
from megatron.formats.huggingface.compare import compare_logits
from megatron.formats.huggingface.export import plan_shards, write_model
from megatron.tokenizer.plain import NullTokenizer


@pytest.fixture
def reader_of(tmp_path, gpt_config, random_gpt, write_checkpoint):
    def make(tokenizer=None, **changes):
        config = gpt_config(**changes)
        return CheckpointReader(
            write_checkpoint(tmp_path / "save", config, random_gpt(config), tokenizer)
        )

    return make


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "hf").mkdir()
    return tmp_path / "hf"


@pytest.mark.parametrize("llama", [False, True])
def test_one_file(llama, reader_of, folder):
    reader = reader_of(NullTokenizer(60), llama=llama)
    lines = []
    write_model(reader, folder, "float32", 10**9, progress=lines.append)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == model.config.bos_token_id == 60
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 60
    assert AutoTokenizer.from_pretrained(folder)("3 7 59")["input_ids"] == [3, 7, 59]
    stored = load_file(folder / "model.safetensors")
    expected = dict(architecture_of(reader.config.model).to_hf(reader.config.model, reader.tensor))
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    assert any("tokenizer.json" in line for line in lines)
    assert not any("warning" in line for line in lines)


def test_rope_base_is_read_by_transformers(reader_of, folder):
    write_model(reader_of(llama=True, rotary_base=500.0), folder, "float32", 10**9)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.rope_parameters["rope_theta"] == 500.0
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 500.0


def test_without_tokenizer_no_token_ids_are_made_up(reader_of, folder):
    lines = []
    write_model(reader_of(), folder, "float32", 10**9, progress=lines.append)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert config.bos_token_id is config.eos_token_id is None
    assert any("no tokenizer" in line for line in lines)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, reader_of, folder):
    reader = reader_of(llama=True)
    write_model(reader, folder, dtype, 10**9)
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == getattr(torch, dtype)
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    expected = reader.tensor("final_norm.norm.weight").to(getattr(torch, dtype))
    assert torch.equal(stored, expected)


@pytest.mark.parametrize("llama", [False, True])
def test_shards_equal_one_file(llama, reader_of, folder):
    reader = reader_of(llama=llama, untie_embeddings_and_output_weights=True)
    write_model(reader, folder, "float32", 8000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in
                     range(1, len(files) + 1)]  # fmt: skip
    assert len(files) > 3
    stored = {}
    for name in files:
        part = load_file(folder / name)
        assert all(index["weight_map"][key] == name for key in part)
        size = sum(tensor.nbytes for tensor in part.values())
        assert size <= 8000 or len({key.rsplit(".", 2)[0] for key in part}) == 1
        stored |= part
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(theirs[name], stored[name]) for name in stored)


@pytest.mark.parametrize("llama", [False, True])
@pytest.mark.parametrize("shard_bytes", [10**9, 8000])
def test_accelerate_places_it(llama, shard_bytes, reader_of, folder, tmp_path):
    """By device_map="auto", whole or in part on the disk, in the dtype of the files; a tied head
    stays one tensor."""
    pytest.importorskip("accelerate")
    write_model(reader_of(llama=llama), folder, "bfloat16", shard_bytes)
    stored = [name for path in folder.glob("*.safetensors") for name in load_file(path)]
    assert "lm_head.weight" not in stored and len(stored) == len(set(stored))
    tokens = torch.arange(20).reshape(2, 10)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")(tokens).logits
    auto = {"device_map": "auto"}
    small = auto | {"max_memory": {"cpu": 30_000}, "offload_folder": tmp_path / "offload"}
    for options in (auto, small, {"low_cpu_mem_usage": True}):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True, **options
        )
        assert model.dtype == torch.bfloat16
        assert not report["missing_keys"] and not report["unexpected_keys"]
        if options is small:
            assert {"cpu", "disk"} == set(model.hf_device_map.values())
        else:
            head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            assert head.weight is embedding.weight
        assert torch.equal(model(tokens).logits.cpu(), expected)


def test_no_more_than_a_shard_is_read_ahead(reader_of, folder, monkeypatch):
    """When a shard is written, no parameter behind it has been read."""
    reader = reader_of()
    events = []
    read = reader.tensor

    def reading(name):
        events.append(name)
        return read(name)

    monkeypatch.setattr(reader, "tensor", reading)
    monkeypatch.setattr(
        "megatron.formats.huggingface.export.save_tensors",
        lambda tensors, path, metadata: (events.append(len(tensors)), path.touch()),
    )
    write_model(reader, folder, "float32", 8000)
    names = [event for event in events if isinstance(event, str)]
    assert len(names) == len(set(names)) == len(reader.names())
    read_since = 0
    for event in events:
        if isinstance(event, str):
            read_since += 1
        else:
            assert event == read_since
            read_since = 0


def test_plan_keeps_order_and_size(gpt_config):
    model = gpt_config().model
    parameters = list(architecture_of(model).parameters(model))
    sizes = {parameter.ours: 10 + 7 * number for number, parameter in enumerate(parameters)}
    shards = list(plan_shards(parameters, sizes, 100))
    assert [parameter for shard in shards for parameter in shard] == parameters
    for shard in shards:
        assert len(shard) == 1 or sum(sizes[parameter.ours] for parameter in shard) <= 100
    assert list(plan_shards(parameters, sizes, 10**9)) == [parameters]


def test_checkpoint_that_is_not_what_its_config_says(reader_of, folder):
    reader = reader_of()
    index = json.loads((reader.folder / "index.json").read_text())
    index["layers.7.mlp.up.weight"] = index.pop("layers.1.mlp.up.weight")
    write_json(reader.folder / "index.json", index)
    with pytest.raises(
        CheckpointError, match="missing layers.1.mlp.up.weight; unexpected layers.7"
    ):
        write_model(CheckpointReader(reader.folder), folder, "float32", 10**9)


@pytest.mark.parametrize("dtype, value", [("float32", torch.nan), ("float16", 70_000.0)])
def test_a_model_that_is_not_finite_is_not_written(dtype, value, reader_of, folder, monkeypatch):
    """Also where only the dtype of the export is too small."""
    reader = reader_of()
    tensor = reader.tensor

    def changed(name, kind="weight"):
        actual = tensor(name, kind)
        if name == "layers.1.mlp.up.weight":
            actual.view(-1)[7] = value
        return actual

    monkeypatch.setattr(reader, "tensor", changed)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up.weight has 1 of [\d,]+ elements"):
        write_model(reader, folder, dtype, 10**9)


def test_full_disk_is_named(reader_of, folder, monkeypatch):
    def full(tensors, path, metadata):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="model.safetensors cannot be written.*No space"):
        write_model(reader_of(), folder, "float32", 10**9)


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_files_have_the_permissions_of_others(reader_of, folder, mask):
    before = os.umask(mask)
    try:
        write_model(reader_of(), folder, "float32", 10_000)
        (folder / "other").touch()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) > 5 and set(modes.values()) == {modes["other"]}


def test_comparison_notices_one_weight(reader_of, folder, random_gpt, gpt_config):
    reader = reader_of()
    write_model(reader, folder, "float32", 10**9)
    config = gpt_config()
    model = random_gpt(config)
    same = compare_logits(model, folder, config.model)
    assert same.agree and same.largest < 1e-5 and same.magnitude > 0.5
    with torch.no_grad():
        dict(model.canonical_parameters())["layers.1.mlp.down.bias"][3] += 1e-3
    other = compare_logits(model, folder, config.model)
    assert not other.agree and other.largest > 1e-5


def test_rounding_is_no_difference(gpt_config, random_gpt, write_checkpoint, tmp_path):
    """Large weights make large rounding errors in a right export; float64 tells them from a wrong
    one."""
    config = gpt_config(num_layers=24)
    model = random_gpt(config)
    with torch.no_grad():
        for _, param in model.canonical_parameters():
            if param.dim() == 2:
                param.mul_(8.0)
    reader = CheckpointReader(write_checkpoint(tmp_path / "save", config, model))
    (tmp_path / "hf").mkdir()
    write_model(reader, tmp_path / "hf", "float32", 10**9)
    right = compare_logits(model, tmp_path / "hf", config.model)
    assert right.agree and right.largest < 1e-8
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    with torch.no_grad():
        dict(model.canonical_parameters())["layers.3.mlp.down.bias"][3] += 1e-3
    wrong = compare_logits(model, tmp_path / "hf", config.model)
    assert not wrong.agree


def test_comparison_sees_the_last_positions(gpt_config, random_gpt, write_checkpoint, tmp_path):
    config = gpt_config(max_position_embeddings=300)
    model = random_gpt(config)
    reader = CheckpointReader(write_checkpoint(tmp_path / "save", config, model))
    (tmp_path / "hf").mkdir()
    write_model(reader, tmp_path / "hf", "float32", 10**9)
    with torch.no_grad():
        dict(model.canonical_parameters())["embedding.position_embeddings.weight"][-1, 3] += 1.0
    assert not compare_logits(model, tmp_path / "hf", config.model).agree


def test_comparison_crosses_a_sliding_window(gpt_config, random_gpt, write_checkpoint, tmp_path):
    shape = {"llama": True, "max_position_embeddings": 400}
    config = gpt_config(**shape, sliding_window=140)
    reader = CheckpointReader(write_checkpoint(tmp_path / "save", config, random_gpt(config)))
    (tmp_path / "hf").mkdir()
    write_model(reader, tmp_path / "hf", "float32", 10**9)
    assert compare_logits(random_gpt(config), tmp_path / "hf", config.model).agree
    without = random_gpt(gpt_config(**shape))  # the same weights
    assert not compare_logits(without, tmp_path / "hf", config.model).agree


def test_comparison_refuses_missing_weights(reader_of, folder):
    reader = reader_of()
    write_model(reader, folder, "float32", 10**9)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    with pytest.raises(CheckpointError, match="missing_keys.*transformer.h.2"):
        compare_logits(None, folder, reader.config.model)


def test_folder_appears_when_it_is_complete(tmp_path):
    output = tmp_path / "a" / "hf"
    with published(output, False, tmp_path / "source") as folder:
        assert folder.parent == output.parent and folder.name.startswith(".")
        (folder / "generation_config.json").write_text("{}")
        assert not output.exists()
    assert [path.name for path in output.parent.iterdir()] == ["hf"]
    with published(output, True, tmp_path / "source") as folder:
        (folder / "new").write_text("")
    assert [path.name for path in output.iterdir()] == ["new"]
    assert [path.name for path in output.parent.iterdir()] == ["hf"]


def test_folder_is_as_before_after_an_error(tmp_path):
    output = tmp_path / "hf"
    output.mkdir()
    (output / "generation_config.json").write_text("old")
    with pytest.raises(RuntimeError), published(output, True, tmp_path / "source") as folder:
        (folder / "generation_config.json").write_text("new")
        raise RuntimeError
    assert (output / "generation_config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_is_never_replaced(tmp_path):
    source = tmp_path / "save" / "global_step1"
    source.mkdir(parents=True)
    (source / "index.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for output, overwrite, message in (
        (source.parent, False, "is not empty; give --overwrite"),
        (source.parent, True, "contain each other"),
        (source, True, "contain each other"),
        (tmp_path / "file", True, "is a file"),
    ):
        with (
            pytest.raises(CheckpointError, match=message),
            published(output, overwrite, source),
        ):
            pass
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("")
    with (
        pytest.raises(CheckpointError, match="is not a converted model"),
        published(tmp_path / "home", True, source),
    ):
        pass
    assert (tmp_path / "home" / "letter.txt").exists()
