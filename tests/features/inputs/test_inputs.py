"""Inputs of a run besides its data, by content: compared at a resume, both named."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from configs import run_config
from safetensors.torch import save_file

from megatron.checkpoint.files import CheckpointError
from megatron.config import CheckpointConfig, TokenizerConfig
from megatron.features.distillation.flags import DistillationConfig
from megatron.features.inputs.compared import compared_inputs
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.retro.flags import RetroDataConfig
from megatron.training.resume import ResumeSource


def save_model(folder, value):
    """A folder that is recognised as a model of Hugging Face."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    weights = {"model.norm.weight": torch.full((64,), value)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def dpo(base, reference=None, **flags):
    preference = PreferenceConfig(preference="dpo", reference_checkpoint=reference)
    options = CheckpointConfig(pretrained_checkpoint=base, **flags)
    return run_config(checkpoint=options, sections=(preference,))


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a run, of which a function keeps the inputs."""
    folder = tmp_path / "saved" / "global_step8"
    folder.mkdir(parents=True)
    origin = ResumeSource(SimpleNamespace(folder=folder), "--load saved", continues=True)

    def keep(config):
        (folder / "state.json").write_text(json.dumps({"inputs": compared_inputs(config, None)[0]}))
        return origin

    return keep


def test_another_reference_is_refused_with_both_names(saved, tmp_path):
    one, other = save_model(tmp_path / "one", 1.0), save_model(tmp_path / "other", 2.0)
    origin = saved(dpo(one))
    _, lines = compared_inputs(dpo(one), origin)
    assert lines == []
    for config in (dpo(other), dpo(one, reference=other)):
        with pytest.raises(CheckpointError) as error:
            compared_inputs(config, origin)
        assert f"the reference model was {one} and is {other}" in str(error.value)
        assert "global_step8" in str(error.value) and "--allow-changed-data" in str(error.value)
    inputs, lines = compared_inputs(dpo(one, reference=other, allow_changed_data=True), origin)
    assert lines == [f"the reference model was {one} and is {other}"]
    assert inputs["reference model"]["path"] == other


def test_content_counts_and_not_the_place(saved, tmp_path):
    one = save_model(tmp_path / "one", 1.0)
    origin = saved(dpo(one))
    moved = shutil.move(one, tmp_path / "moved")
    (tmp_path / "moved" / "README.md").write_text("a note")
    assert compared_inputs(dpo(str(moved)), origin)[1] == []
    shutil.rmtree(moved)
    save_model(tmp_path / "one", 3.0)
    with pytest.raises(CheckpointError, match=f"content of the reference model, {one}, has change"):
        compared_inputs(dpo(one), origin)


def test_a_base_that_is_not_there_is_not_compared(saved, tmp_path):
    """A run of all weights reads it no more."""
    one = save_model(tmp_path / "one", 1.0)
    config = run_config(checkpoint=CheckpointConfig(pretrained_checkpoint=one))
    origin = saved(config)
    shutil.rmtree(one)
    inputs, lines = compared_inputs(config, origin)
    assert lines == [] and inputs["model that it began from"]["path"] == one
    assert compared_inputs(run_config(), origin) == (inputs, [])


def _teacher(tmp_path, value):
    teacher = save_model(tmp_path / f"teacher{value}", value)
    return {"sections": (DistillationConfig(kd=True, load_teacher=teacher),)}


def _tokenizer(tmp_path, value):
    folder = tmp_path / f"tokenizer{value}"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(str(value))
    tokenizer = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))
    return {"tokenizer": tokenizer, "sections": (InstructionConfig(sft=True),)}


def _template(tmp_path, value):
    path = tmp_path / f"{value}.jinja"
    path.write_text(str(value))
    return {"sections": (InstructionConfig(sft=True, chat_template=str(path)),)}


def _neighbours(tmp_path, value):
    folder = tmp_path / f"project{value}"
    (folder / "query" / "train_a").mkdir(parents=True)
    (folder / "query" / "train_a" / "0-9.hdf5").write_text(str(value))
    return {"sections": (RetroDataConfig(retro_project_dir=str(folder)),)}


def _adapter(tmp_path, value):
    adapter = save_model(tmp_path / f"adapter{value}", value)
    return {"checkpoint": CheckpointConfig(load_adapter=adapter)}


@pytest.mark.parametrize("make", [_teacher, _tokenizer, _template, _neighbours, _adapter])
def test_every_input_is_compared(saved, tmp_path, make):
    first, second = (run_config(**make(tmp_path, value)) for value in (1.0, 2.0))
    origin = saved(first)
    assert compared_inputs(first, origin)[1] == []
    with pytest.raises(CheckpointError, match=r"was .*1\.0.* and is .*2\.0"):
        compared_inputs(second, origin)


def test_a_template_that_is_added_or_left_out_is_another(saved, tmp_path):
    plain = _tokenizer(tmp_path, 1.0)
    one, other = run_config(**plain), run_config(**plain | _template(tmp_path, 2.0))
    path = str(tmp_path / "2.0.jinja")
    for before, now, names in (
        (one, other, f"was that of the tokenizer and is {path}"),
        (other, one, f"was {path} and is that of the tokenizer"),
    ):
        origin = saved(before)
        with pytest.raises(CheckpointError, match=f"the chat template {names}"):
            compared_inputs(now, origin)
        options = CheckpointConfig(allow_changed_data=True)
        kept, _ = compared_inputs(dataclasses.replace(now, checkpoint=options), origin)
        assert ("chat template" in kept) == (now is other)


def test_newer_checkpoints_of_the_base_change_nothing(saved, tmp_path, monkeypatch):
    """Unless the run compares with it."""
    base = tmp_path / "base"
    base.mkdir()
    save_model(base / "step1", 1.0), save_model(base / "step2", 2.0)
    newest = SimpleNamespace(folder=base / "step1")
    monkeypatch.setattr("megatron.features.inputs.compared.locate_checkpoint", lambda path: newest)
    config = run_config(checkpoint=CheckpointConfig(pretrained_checkpoint=str(base)))
    origin = saved(config)
    newest.folder = base / "step2"
    assert compared_inputs(config, origin)[1] == []
    shutil.rmtree(base / "step1")
    with pytest.raises(CheckpointError, match="the content of the model that it began from"):
        compared_inputs(config, origin)
