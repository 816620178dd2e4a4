"""Files of other programs are named and refused, not passed over: a run would start from random
weights."""

import dataclasses

import pytest

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint, open_checkpoint
from megatron.config import CheckpointConfig
from megatron.formats.inspection import verify_all
from megatron.training.resume import find_origin

FILES = {
    "(DCP)": [".metadata", "__0_0.distcp"],
    "nanotron": ["10/checkpoint_metadata.json", "10/model_config.json",
                 "10/model/dense/model_weight_pp-rank-0.safetensors"],
    "NeMo": ["llama.nemo"],
    "NeMo, unpacked": ["model_config.yaml", "model_weights/module.decoder/.zarray"],
    "from before GGUF": ["llama-q4_0.ggml"],
    "Orbax": ["5/_CHECKPOINT_METADATA", "5/default/manifest.ocdbt"],
    "Orbax, older": ["5/checkpoint", "5/default/_METADATA"],
    "Zarr": ["weights/layer.0/.zarray", "weights/layer.0/0.0"],
    "TensorFlow or JAX": ["model.ckpt-1000.index", "model.ckpt-1000.data-00000-of-00001"],
    "Flax": ["flax_model.msgpack"],
    "TensorFlow for transformers": ["tf_model.h5"],
    "Keras": ["model.weights.h5", "metadata.json"],
    "MaxText": ["checkpoints/0/items/manifest.ocdbt", "checkpoints/0/_CHECKPOINT_METADATA"],
    "T5X": ["checkpoint", "target.encoder.layers_0.mlp/.zarray"],
    "MLX": ["weights.00.npz"],
    "ONNX": ["decoder.onnx"],
    "ONNX: its runtime's": ["model.ort"],
    "OpenVINO": ["openvino_model.xml", "openvino_model.bin"],
    "TensorRT-LLM": ["rank0.safetensors"],
    "TensorRT-LLM: built": ["rank0.engine"],
    "CTranslate2": ["model.bin", "shared_vocabulary.json"],
    "MLC": ["params_shard_0.bin", "ndarray-cache.json"],
    "ExLlama": ["output-00001-of-00002.safetensors"],
    "another runtime": ["a.mlpackage/Manifest.json", "a.mlpackage/Data/weights/weight.bin"],
    "llama.cpp before GGUF": ["ggml-model-q4_0.bin"],
    "diffusers": ["model_index.json", "unet/diffusion_pytorch_model.safetensors"],
    "sentence-transformers": ["modules.json", "0_Transformer/sentence_bert_config.json"],
    "peft without": ["adapter_model.safetensors"],
    "Meta or Mistral AI without": ["consolidated.00.pth"],
    "PyTorch Lightning": ["epoch=3-step=10.ckpt"],
    "archive": ["model.tar.gz"],
    "archive: zip": ["model.zip"],
    "incomplete checkpoint of this project": ["global_step4/weights-00000.safetensors"],
    "models of Hugging Face, in folders": ["checkpoint-500/model.safetensors",
                                           "checkpoint-500/config.json"],
    "without a config.json": ["model.safetensors"],
    "without a config.json: several": ["pytorch_model-00001-of-00002.bin"],
    "not known": ["layers.safetensors"],
    "not known: torch": ["model_3.ckpt"],
    "not known: deeper": ["a/b/c/step_10.pth"],
}  # fmt: skip


def create(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize("what", FILES)
def test_it_is_named(what, tmp_path):
    folder = create(tmp_path / "other", FILES[what])
    pattern = what.partition(":")[0].partition(", unp")[0].partition(", old")[0]
    pattern = pattern.replace("(", r"\(").replace(")", r"\)")
    for read in (locate_checkpoint, open_checkpoint):
        with pytest.raises(CheckpointError, match=f"other has .*{pattern}.* not read here: "):
            read(folder)
    (verdict,) = verify_all(folder)
    assert "not read here" in (verdict.error or "")
    for save in (None, str(folder), str(tmp_path / "new")):
        with pytest.raises(CheckpointError, match=pattern):
            find_origin(CheckpointConfig(load=str(folder), save=save))
    assert locate_checkpoint(folder, others=True) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["flax_model.msgpack"], "weights of Flax .*not read here: transformers 4"),
        (["onnx/model.onnx"], r"a model for ONNX \(onnx/model.onnx\)"),
        (["weights.npz"], "a model of MLX .*mlx_lm convert --dequantize"),
        (["model-00001-of-00002.safetensors"], "model-00001-of-00002.* no index of their tensors"),
        ([], "none of model.safetensors, model.safetensors.index.json, pytorch_model.bin"),
    ],
)
def test_a_config_of_hugging_face_with_weights_of_others(names, message, tmp_path):
    create(tmp_path, names)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=f"{tmp_path} has {message}"):
        open_checkpoint(tmp_path)


def test_weights_packed_by_mlx(tmp_path):
    create(tmp_path, ["model.safetensors"])
    content = '{"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}}'
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="config.json: quantization is .* packed by MLX"):
        open_checkpoint(tmp_path)


def test_a_new_run_has_no_weights(tmp_path):
    """Its log, its record, data and what a killed save has left."""
    names = [
        "train.log", "run/001/changes.patch", "tensorboard/events.out", "metrics.jsonl", ".lock",
        "corpus_text_document.bin", "corpus_text_document.idx", "wandb/a/model.pt", "ds.json",
        ".global_step4.incomplete/weights-00000.safetensors", "tokenizer.model",
    ]  # fmt: skip
    folder = create(tmp_path / "run", names)
    assert locate_checkpoint(folder) is None
    options = CheckpointConfig(load=str(folder), save=str(folder))
    assert find_origin(options) is None
    assert find_origin(CheckpointConfig(load=str(tmp_path / "absent"))) is None
    (tmp_path / "empty").mkdir()
    assert find_origin(CheckpointConfig(load=str(tmp_path / "empty"))) is None
    with pytest.raises(CheckpointError, match="no checkpoint of a known format among its files"):
        find_origin(dataclasses.replace(options, save=str(tmp_path / "new")))


@pytest.mark.parametrize(
    ("name", "what"),
    [("a.ggml", "from before GGUF"), ("a.tar", "is an archive"), ("a.pt", "is weights in a form"),
     ("mp_rank_00_model_states.pt", "give the folder with all of them"),
     ("weights.safetensors", "not read here"), ("a.nemo", "NeMo")],
)  # fmt: skip
def test_a_file(name, what, tmp_path):
    with pytest.raises(CheckpointError, match=what):
        locate_checkpoint(create(tmp_path, [name]) / name)


def test_a_file_of_a_model(tmp_path):
    create(tmp_path, ["model.safetensors", "config.json"])
    with pytest.raises(CheckpointError, match=f"one file of a model: give its folder, {tmp_path}"):
        locate_checkpoint(tmp_path / "model.safetensors")


def test_weights_next_to_a_tracker_are_named(tmp_path):
    create(tmp_path, FILES["Orbax"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(CheckpointError, match=r"Orbax \(JAX\)"):
        locate_checkpoint(tmp_path)
