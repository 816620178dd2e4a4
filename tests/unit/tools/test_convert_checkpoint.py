"""tools/convert_checkpoint.py as people call it."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.checkpoint.huggingface import GPT2, registry
from megatron.config import PrecisionConfig
from megatron.tokenizer.null import NullTokenizer

TOOL = Path(__file__).parents[3] / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("convert_checkpoint", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the flags read the help texts from a class's module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def saved(tmp_path, gpt_config, random_gpt, write_checkpoint):
    def make(step=10, precision=None, **changes):
        config = gpt_config(**changes)
        if precision is not None:
            config = dataclasses.replace(config, precision=precision)
        write_checkpoint(
            tmp_path / "save", config, random_gpt(config, seed=step), NullTokenizer(60), step
        )
        return str(tmp_path / "save")

    return make


@pytest.mark.parametrize("llama", [False, True])
def test_to_hf(llama, tool, saved, tmp_path, capsys):
    tool.main(["to-hf", "--load", saved(llama=llama), "--output", str(tmp_path / "hf")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "global_step10 in float32; logits of 48 tokens agree, largest difference" in last
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")).__name__ == (
        "LlamaForCausalLM" if llama else "GPT2LMHeadModel"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "save"]


@pytest.mark.parametrize(
    ("precision", "flag", "expected"),
    [
        (None, [], "float32"),
        (PrecisionConfig(bf16=True), [], "bfloat16"),
        (PrecisionConfig(fp16=True), [], "float16"),
        (PrecisionConfig(bf16=True), ["--dtype", "float32"], "float32"),
        (None, ["--dtype", "bfloat16", "--max-shard-size", "20KB"], "bfloat16"),
    ],
)
def test_dtype(precision, flag, expected, tool, saved, tmp_path, capsys):
    load = saved(precision=precision, llama=True)
    tool.main(["to-hf", "--load", load, "--output", str(tmp_path / "hf"), *flag])
    assert f"in {expected}; logits" in capsys.readouterr().out
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["torch_dtype"] == expected
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == ("20KB" in flag)


def test_iteration_and_overwrite(tool, saved, tmp_path, random_gpt, gpt_config, canonical):
    saved(step=5)
    load = saved(step=6)
    output = tmp_path / "hf"
    arguments = ["to-hf", "--load", load, "--output", str(output)]
    tool.main(arguments)
    with pytest.raises(SystemExit, match="hf is not empty; give --overwrite"):
        tool.main(arguments)
    tool.main([*arguments, "--iteration", "5", "--overwrite"])
    expected = canonical(random_gpt(gpt_config(), seed=5))["final_norm.norm.weight"]
    theirs = AutoModelForCausalLM.from_pretrained(output)
    assert torch.equal(theirs.transformer.ln_f.weight, expected)
    with pytest.raises(SystemExit, match="no complete checkpoint global_step7"):
        tool.main([*arguments, "--iteration", "7", "--overwrite"])
    assert output.exists()


def test_other_logits_are_refused(tool, saved, tmp_path, monkeypatch):
    wrong = tuple(
        dataclasses.replace(entry, transposed=False)
        if entry.ours == "layers.{n}.attention.proj.weight" else entry
        for entry in GPT2.entries
    )  # fmt: skip
    monkeypatch.setattr(registry, "ARCHITECTURES", (dataclasses.replace(GPT2, entries=wrong),))
    with pytest.raises(SystemExit, match="computes other logits .* largest difference is") as error:
        tool.main(["to-hf", "--load", saved(), "--output", str(tmp_path / "hf")])
    assert isinstance(error.value.code, str)  # printed to stderr, exit status 1
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_damaged_checkpoint_is_refused(tool, saved, tmp_path):
    load = saved()
    weights = Path(load, "global_step10", "weights-00000.safetensors")
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(content)
    with pytest.raises(SystemExit, match="weights-00000.safetensors is damaged"):
        tool.main(["to-hf", "--load", load, "--output", str(tmp_path / "hf")])
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_no_architecture(tool, saved, tmp_path):
    load = saved(normalization="RMSNorm")
    with pytest.raises(SystemExit, match="GPT-2 needs --normalization LayerNorm"):
        tool.main(["to-hf", "--load", load, "--output", str(tmp_path / "hf")])
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("", "no command: the commands are to-hf"),
        ("from-hg", "from-hg: the commands are to-hf"),
        ("to-hf --output x", "--load is missing"),
        ("to-hf --load x", "--output is missing"),
        ("to-hf --load x --output y", "x: there is no complete checkpoint"),
        ("to-hf --load x --output y --max-shard-size 5GBs", "5GBs is no size"),
        ("to-hf --load x --output y --max-shard-size 0", "0 is no size"),
    ],
)
def test_bad_command_lines(tool, command_line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        tool.main(command_line.split())
    assert not list(tmp_path.iterdir())


def test_sizes(tool):
    assert tool.parse_size("5GB") == 5 * 10**9
    assert tool.parse_size("1.5 GiB") == 3 * 2**29
    assert tool.parse_size("500mb") == 5 * 10**8
    assert tool.parse_size("1234") == 1234


def test_without_transformers(tool, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install transformers"):
        tool.main(["to-hf", "--load", "x", "--output", str(tmp_path / "hf")])


def test_help_names_the_commands(tool, capsys):
    tool.main(["--help"])
    assert "to-hf" in capsys.readouterr().out
