"""tools/list_models.py: the page is what the installed transformers and the tables give, and what
another release would change is reported."""

import copy
import json
import re

import pytest
import transformers
from tool_modules import load_program
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron.formats.huggingface import architectures

SAMPLE = ("bert", "deepseek_v2", "mamba")
AGAIN = "run python tools/list_models.py --write"


@pytest.fixture(scope="module")
def tool():
    return load_program("tools/list_models.py")


@pytest.fixture(scope="module")
def page(tool):
    """The page, of the installed release."""
    text = tool.PAGE.read_text()
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip(f"the page is that of another transformers than {transformers.__version__}")
    return text


def test_the_page_has_every_architecture(tool, page):
    """A new table appears on the page, in the snapshot, and is not refused."""
    here = dict(re.findall(r"\| `([^`]+)` \|.*\| ([^|]+) \|", page))
    stored = json.loads(tool.SNAPSHOT.read_text())
    known = {form.model_type: form.title for form in architectures()}
    installed = known.keys() & CONFIG_MAPPING.keys()
    assert {name: here.get(name) for name in installed} == {name: known[name] for name in installed}
    assert stored["transformers"] == transformers.__version__
    assert set(stored["architectures"]) == installed, AGAIN
    assert stored["model_types"] == list(tool.classes()), AGAIN


def test_a_sample_of_the_page(tool, page):
    lines = page.splitlines()
    for row in tool.rows(SAMPLE):
        assert tool.cells(row) in lines, f"{row}: {AGAIN}"


@pytest.mark.proof
def test_the_whole_page(tool, page):
    table = tool.rows()
    assert tool.markdown(table) == page, AGAIN
    assert tool.to_text(tool.snapshot(table)) == tool.SNAPSHOT.read_text(), AGAIN


def test_reasons_are_keys_of_the_configuration(tool):
    """Models that no table reads: the trait that comes first, or what the plainest refuses."""
    assert tool.missing({"is_encoder_decoder": True, "num_experts": 8}, "causal") == (
        "encoder and decoder (is_encoder_decoder)"
    )
    assert tool.missing({"text_config": {"num_local_experts": 8}}, "causal") == (
        "experts (num_local_experts = 8)"
    )
    assert tool.missing({"layer_types": ["full_attention", "mamba"]}, "causal") == (
        "recurrent or convolutional layers (layer_types has mamba)"
    )
    assert tool.missing({"no_such_key": 3}, "causal") == (
        "as Llama: the effect of no_such_key is not known"
    )
    with pytest.raises(ValueError, match="--only lama: transformers .* has no such language model"):
        tool.rows(["lama"])


def test_what_another_release_changes(tool):
    """A key renamed, two projections fused, a model that is new and one that is gone."""
    before = json.loads(tool.SNAPSHOT.read_text())
    assert list(tool.changes(before, before)) == [
        f"transformers {before['transformers']} to {before['transformers']}"
    ]
    after = copy.deepcopy(before)
    after["model_types"] = [name for name in after["model_types"] if name != "ctrl"] + ["llama9"]
    keys = after["architectures"]["llama"]["keys"]
    keys[keys.index("rms_norm_eps")] = "norm_eps"
    mlp = "model.layers.{n}.mlp"
    after["architectures"]["qwen2"]["tensors"] = [
        name.replace("up_proj", "gate_up_proj")
        for name in after["architectures"]["qwen2"]["tensors"]
        if "gate_proj" not in name
    ]
    del after["architectures"]["opt"]
    assert list(tool.changes(before, after))[1:] == [
        "model types added: llama9",
        "model types gone: ctrl",
        "llama: keys of config.json added: norm_eps",
        "llama: keys of config.json gone: rms_norm_eps",
        f"qwen2: tensors added: {mlp}.gate_up_proj.weight",
        f"qwen2: tensors gone: {mlp}.gate_proj.weight, {mlp}.up_proj.weight",
        "opt: no longer read, or no longer in transformers",
    ]
