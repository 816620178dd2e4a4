"""A model is written as the architecture that it was read from, whatever it went through."""

import dataclasses
import json

import pytest
import torch
from hf_cases import CASES
from safetensors.torch import load_file
from samples import sampled

from megatron.checkpoint.source import open_checkpoint, save_copy
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.huggingface import architecture_of, architectures
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.source import HuggingFaceFolder


def write(source, folder, **options):
    """Exports; returns config.json and the lines that it says."""
    lines = []
    folder.mkdir()
    write_model(source, folder, "float32", 10**9, progress=lines.append, **options)
    return json.loads((folder / "config.json").read_text()), lines


@pytest.mark.parametrize("model_type", sampled(CASES, list(CASES)[::2].__contains__))
def test_through_our_checkpoints(model_type, hf_folder, tmp_path):
    cases = CASES[model_type]
    folder = hf_folder(model_type, **cases.get("no_window", next(iter(cases.values()))))
    theirs = HuggingFaceFolder(folder)
    directly, _ = write(theirs, tmp_path / "directly", architecture=model_type)
    write_checkpoint(tmp_path / "first", theirs, moments=False)
    save_copy("universal", open_checkpoint(tmp_path / "first"), tmp_path / "second", 1)
    write_checkpoint(tmp_path / "third", open_checkpoint(tmp_path / "second"), moments=False)
    content, lines = write(open_checkpoint(tmp_path / "third"), tmp_path / "back")
    assert content["model_type"] == model_type
    assert content == directly
    assert not [line for line in lines if "written as" in line]
    actual, expected = (
        load_file(path / "model.safetensors") for path in (tmp_path / "back", folder)
    )
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_another_can_be_asked_for(hf_folder, tmp_path):
    source = HuggingFaceFolder(hf_folder("phi3", **CASES["phi3"]["kv_heads=2,untied"]))
    content, lines = write(source, tmp_path / "back", architecture="mistral")
    assert content["model_type"] == "mistral"
    assert not [line for line in lines if "written as" in line]


def test_what_no_longer_fits_says_why(gpt_config, random_gpt, write_checkpoint, tmp_path):
    config = gpt_config(llama=True, hf_architecture="mistral", rotary_percent=0.5)
    write_checkpoint(tmp_path / "save", config, random_gpt(config))
    source = open_checkpoint(tmp_path / "save")
    content, lines = write(source, tmp_path / "hf")
    assert content["model_type"] == "phi3"
    assert lines[0] == (
        "written as Phi-3: the weights were read from Mistral, which needs --rotary-percent 1.0"
    )


def test_an_origin_that_is_not_known(gpt_config, random_gpt, write_checkpoint, tmp_path):
    config = gpt_config(hf_architecture="mamba")
    write_checkpoint(tmp_path / "save", config, random_gpt(config))
    source = open_checkpoint(tmp_path / "save")
    content, lines = write(source, tmp_path / "hf")
    assert content["model_type"] == "gpt2"
    assert lines[0] == ("written as GPT-2: the weights were read from mamba, which is not known")


def test_checkpoints_without_an_origin(gpt_config, random_gpt, write_checkpoint, tmp_path):
    """Checkpoints that were written before it was kept."""
    config = gpt_config(llama=True)
    folder = write_checkpoint(tmp_path / "save", config, random_gpt(config))
    saved = json.loads((folder / "config.json").read_text())
    del saved["model"]["hf_architecture"]
    (folder / "config.json").write_text(json.dumps(saved))
    source = open_checkpoint(tmp_path / "save", verify=False)
    content, lines = write(source, tmp_path / "hf")
    assert content["model_type"] == "llama"
    assert not [line for line in lines if "written as" in line]


def test_the_origin_goes_before_plainer_ones(gpt_config):
    model = gpt_config(llama=True).model
    fitting = [known for known in architectures() if not known.misfits(model)]
    assert len(fitting) > 2
    for known in fitting:
        read = dataclasses.replace(model, hf_architecture=known.model_type)
        assert architecture_of(read) is known
        assert architecture_of(read, "llama").model_type == "llama"
