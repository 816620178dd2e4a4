"""The manifest protects the files, itself, and what it must list; an index tiles parameters."""

import json
import random

import pytest

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.manifest import file_facts, manifest, verify, write_manifest
from megatron.checkpoint.reader import CheckpointReader


@pytest.fixture
def folder(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config()
    return write_checkpoint(tmp_path / "save", config, random_gpt(config))


def test_every_bit_of_the_manifest_counts(folder):
    path = folder / "manifest.json"
    content = path.read_bytes()
    manifest(folder)
    places = random.Random(3).sample(range(8 * len(content)), 400)
    for place in [*places, 8 * len(content) - 1]:
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(bytes(flipped))
        with pytest.raises(CheckpointError, match="manifest.json"):
            manifest(folder)
    for changed in (content + b" ", content[:-1], content.replace(b"\n", b"\r\n")):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="manifest.json"):
            manifest(folder)


def rewritten(folder, change):
    """Changes the entries and signs them again, as only a deliberate edit does."""
    files = manifest(folder)
    change(files)
    (folder / "manifest.json").unlink()
    write_manifest(folder, files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.pop("index.json"), "does not list index.json"),
        (lambda files: files.pop("state.json"), "does not list state.json"),
        (lambda files: files.pop("weights-00000.safetensors"), "weights-00000.*does not list"),
        (lambda files: files.update({"../x": {"bytes": 0, "sha256": ""}}), "entries"),
        (lambda files: files.update({"/x": {"bytes": 0, "sha256": ""}}), "entries"),
        (lambda files: files.update({"x": {"bytes": 0, "sha256": ""}}), "x is missing"),
        (lambda files: files.update({"x": 3}), "entries"),
        (lambda files: files["state.json"].update(bytes=5), "state.json has .* bytes"),
        (lambda files: files["state.json"].update(sha256="0" * 64), "state.json is damaged"),
        (lambda files: files["state.json"].pop("bytes"), "entries"),
    ],
)
def test_edited_entries_are_refused(folder, change, message):
    rewritten(folder, change)
    with pytest.raises(CheckpointError, match=message):
        verify(folder)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"format": 1, "files": {}}', '{"format": 2, "files": {}}', "3"]
)
def test_other_json_is_no_manifest(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest.json"):
        manifest(folder)


NORM, UP = "final_norm.norm.weight", "layers.0.mlp.up.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.clear(), "lists no parameter"),
        (lambda index: index[NORM].clear(), "no slice of final_norm"),
        (lambda index: index[NORM].append(index[NORM][0]), "overlap"),
        (lambda index: index[NORM][0].update(end=31), "overlap or leave a gap"),
        (lambda index: index[NORM][0].update(start=1, end=33), "overlap or leave a gap"),
        (lambda index: index[NORM][0].update(shape=[31]), "overlap or leave a gap"),
        (lambda index: index[UP][0].update(dim=0, ranges=[[0, 47]]), "overlap or leave a gap"),
        (lambda index: index[UP][0].update(dim=7, ranges=[[0, 48]]), "overlap or leave a gap|not"),
        (lambda index: index[NORM][0].update(files={}), "differ in shape or kinds"),
        (lambda index: index[NORM][0]["files"].update(weight="x"), "which the manifest does not"),
        (lambda index: index[NORM][0].pop("start"), "is not an index"),
        (lambda index: index[NORM][0].update(start="0"), "is not an index"),
        (lambda index: index[NORM][0].update(ranges=3), "is not an index"),
        (lambda index: index.update({NORM: 3}), "is not an index"),
    ],
)
def test_indices_that_are_none(folder, change, message):
    index = read_json(folder / "index.json")
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    rewritten(folder, lambda files: files.update({"index.json": file_facts(folder / "index.json")}))
    with pytest.raises(CheckpointError, match=f"index.json.*({message})"):
        verify(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("state.json", '{"iteration": 1' + "0" * 30 + "}", "iteration is 1000.*below 2.63"),
        ("state.json", '{"iteration": 1, "loss_scaler": {"cur_scale": NaN}}', "NaN is not a num"),
        ("state.json", '{"iteration": 1, "iteration": 2}', '"iteration" occurs twice'),
        ("state.json", "[" * 100_000, "nested more than 100 levels"),
        ("config.json", '{"model": {}, "model": {}}', '"model" occurs twice'),
        ("index.json", '{"a": [], "a": []}', '"a" occurs twice'),
    ],
)
def test_what_no_run_writes(name, text, message, folder):
    """Signed again, as only a deliberate edit does."""
    (folder / name).write_text(text)
    rewritten(folder, lambda files: files.update({name: file_facts(folder / name)}))
    with pytest.raises(CheckpointError, match=f"{name}.*{message}"):
        verify(folder)
        CheckpointReader(folder)


def test_a_run_with_an_infinite_rate_is_read(folder):
    """As a flag it is legal, and the older checkpoints of such a run are whole."""
    path = folder / "config.json"
    content = read_json(path)
    content["optimizer"]["lr"] = float("inf")
    path.write_text(json.dumps(content))
    rewritten(folder, lambda files: files.update({"config.json": file_facts(path)}))
    verify(folder)
    assert CheckpointReader(folder).config.optimizer.lr == float("inf")


def test_numbers_of_layers_that_no_network_has(folder):
    path = folder / "config.json"
    content = read_json(path)
    content["model"]["num_layers"] = 10**9
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"config.json.*must be from 1 to 16,384"):
        CheckpointReader(folder)
