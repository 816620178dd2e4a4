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
    "Megatron-core": ["iter_0000010/common.pt", "iter_0000010/.metadata",
                      "iter_0000010/metadata.json", "iter_0000010/__0_0.distcp"],
    "(DCP)": [".metadata", "__0_0.distcp"],
    "nanotron": ["10/checkpoint_metadata.json", "10/model_config.json",
                 "10/model/dense/model_weight_pp-rank-0.safetensors"],
    "NeMo": ["llama.nemo"],
    "NeMo, unpacked": ["model_config.yaml", "model_weights/module.decoder/.zarray"],
    "GGUF": ["llama-Q4_K_M.gguf"],
    "Orbax": ["5/_CHECKPOINT_METADATA", "5/default/manifest.ocdbt"],
    "Orbax, older": ["5/checkpoint", "5/default/_METADATA"],
    "Zarr": ["weights/layer.0/.zarray", "weights/layer.0/0.0"],
    "TensorFlow or JAX": ["model.ckpt-1000.index", "model.ckpt-1000.data-00000-of-00001"],
    "TensorFlow or JAX: Flax": ["flax_model.msgpack"],
    "ONNX": ["decoder.onnx"],
    "archive": ["model.tar.gz"],
    "archive: zip": ["model.zip"],
    "incomplete checkpoint of this project": ["global_step4/weights-00000.safetensors"],
    "models of Hugging Face, in folders": ["checkpoint-500/model.safetensors",
                                           "checkpoint-500/config.json"],
    "without a config.json": ["model.safetensors"],
    "without a config.json: several": ["pytorch_model-00001-of-00002.bin"],
    "not known": ["layers.safetensors"],
    "not known: torch": ["epoch=3.ckpt"],
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
    [("a.gguf", "is a GGUF file"), ("a.tar", "is an archive"), ("a.pt", "is weights in a form"),
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
    create(tmp_path, FILES["Megatron-core"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(CheckpointError, match=r"Megatron-core \(torch_dist\)"):
        locate_checkpoint(tmp_path)
