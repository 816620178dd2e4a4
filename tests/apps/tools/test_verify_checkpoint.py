"""tools/verify_checkpoint.py: whole ones pass, damage is named, the status says so."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.manifest import file_facts, manifest, write_manifest
from megatron.checkpoint.source import open_checkpoint
from tools.verify_checkpoint import main


@pytest.fixture
def save(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config()
    for step in (10, 20):
        write_checkpoint(tmp_path / "save", config, random_gpt(config), step=step)
    return tmp_path / "save"


def test_nothing_is_wrong(save, capsys):
    assert main([str(save)]) == 0
    (titles, line) = capsys.readouterr().out.splitlines()
    assert titles.split() == ["checkpoint", "files", "MB", "tensors", "seconds"]
    assert line.split()[0] == str(save / "global_step20") and line.endswith("whole")
    assert line.split()[1] == "5" and line.split()[3] == "28"
    assert main([str(save), "--all"]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    assert main([str(save / "global_step10"), str(save)]) == 0
    assert capsys.readouterr().out.count("whole") == 2


def test_a_damaged_one_among_others(save, capsys):
    path = save / "global_step10" / "weights-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert main([str(save)]) == 0
    capsys.readouterr()
    assert main([str(save), "--all"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("whole") == 1 and shown.out.count("DAMAGED") == 1
    assert f"damaged: {path} is damaged" in shown.err


def resign(folder):
    files = list(manifest(folder))
    (folder / "manifest.json").unlink()
    write_manifest(folder, {name: file_facts(folder / name) for name in files})


def lacks(tensors):
    tensors.pop("final_norm.norm.weight")


def shorter(tensors):
    tensors["final_norm.norm.weight"] = tensors["final_norm.norm.weight"][1:].clone()


def half(tensors):
    tensors["final_norm.norm.weight"] = tensors["final_norm.norm.weight"].to(torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacks, "has no tensor final_norm.norm.weight"),
        (shorter, "final_norm.norm.weight has 31 elements, the index says 32"),
        (half, "final_norm.norm.weight is F16"),
    ],
)
def test_tensors_that_the_index_does_not_describe(save, capsys, change, message):
    path = save / "global_step20" / "weights-00000.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    resign(save / "global_step20")
    assert main([str(save)]) == 1
    assert f"{path}" in (error := capsys.readouterr().err) and message in error


def test_a_tracker_that_names_nothing(save, capsys):
    (save / "latest").write_text("global_step30\n")
    assert main([str(save), "--all"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("whole") == 2
    assert "latest names 'global_step30'" in shown.err


@pytest.mark.parametrize("file", ["manifest", "index", "config", "state", "weights"])
@pytest.mark.parametrize("place", [".", "global_step20"])
@pytest.mark.parametrize("tracker", [True, False])
def test_a_lost_file_is_named(save, capsys, file, place, tracker):
    (lost,) = (save / "global_step20").glob(f"{file}*")
    lost.unlink()
    if not tracker:
        (save / "latest").unlink()
    if not tracker and file == "manifest" and place == ".":
        assert main([str(save)]) == 0  # loading takes the older one
        assert main([str(save), "--all"]) == 1
    else:
        assert main([str(save / place)]) == 1
    error = capsys.readouterr().err
    assert f"{lost} is missing" in error and error.startswith("damaged: ")
    assert "global_step10: write the tag" in error or not (
        tracker and file == "manifest" and place == "."
    )


def test_a_lost_manifest_of_the_only_checkpoint(save, capsys):
    shutil.rmtree(save / "global_step10")
    (save / "global_step20" / "manifest.json").unlink()
    assert main([str(save)]) == 1
    assert f"{save / 'global_step20' / 'manifest.json'} is missing" in capsys.readouterr().err


def test_a_lost_manifest_of_a_wanted_iteration(save):
    (save / "global_step20" / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match="step20: .*manifest.json is missing.*it has .*step10"
    ):
        open_checkpoint(save, "20")


def test_what_is_none(tmp_path, capsys):
    for name, reason in (("absent", "no such folder"), ("empty", "no complete checkpoint found")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert main([str(tmp_path / name), "--all"]) == 1
        shown = capsys.readouterr()
        assert shown.err == f"error: {tmp_path / name}: {reason}\n"
        assert shown.out.splitlines()[1].endswith("not found") and "DAMAGED" not in shown.out
    (tmp_path / "empty").rmdir()
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 7}))
    assert main([str(tmp_path)]) == 1
    assert "manifest.json is not a manifest of format 2" in capsys.readouterr().err
