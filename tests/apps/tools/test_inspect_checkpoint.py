"""tools/inspect_checkpoint.py on checkpoints of known content."""

import dataclasses
import json

import pytest
import torch
from tool_modules import load_program

from megatron.checkpoint.source import open_checkpoint
from megatron.formats.inspection import tensor_differences, tensor_facts


@pytest.fixture(scope="module")
def main():
    return load_program("tools/inspect_checkpoint.py").main


@pytest.fixture
def pair(tmp_path, gpt_config, random_gpt, write_checkpoint):
    """Two checkpoints that differ in one weight."""
    config = gpt_config(llama=True)
    model = random_gpt(config)
    first = write_checkpoint(tmp_path / "a", config, model)
    with torch.no_grad():
        dict(model.canonical_parameters())["layers.1.mlp.down.weight"][0, 3] += 0.5
    second = write_checkpoint(tmp_path / "b", config, model, step=11)
    return first, second


def test_report(main, pair, capsys):
    assert main([str(pair[0].parent)]) == 0
    output = capsys.readouterr().out
    values = open_checkpoint(pair[0]).tensor("layers.0.attention.qkv.weight")
    row = next(line for line in output.splitlines() if "layers.0.attention.qkv.weight" in line)
    assert row.split()[1:5] == ["96", "x", "32", "float32"]
    assert float(row.split()[-1]) == pytest.approx(float(values.double().norm()), rel=1e-5)
    assert "iteration: 10" in output
    assert "tensor 1 x pipeline 1 x data 1, ZeRO stage 0" in output
    total = sum(facts.numel for facts in tensor_facts(open_checkpoint(pair[0])))
    assert f"\n  {total:,} parameters in " in output[: output.index("model: ")]


def test_blocks_are_in_order_however_stages_hold_them(main, pair, capsys):
    whole = json.loads((pair[0] / "index.json").read_text())
    late = {name: place for name, place in whole.items() if name.startswith("layers.0.")}
    rest = {name: place for name, place in whole.items() if name not in late}
    (pair[0] / "index.json").write_text(json.dumps(rest | late))
    main([str(pair[0]), "--no-norms"])
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "weight " in line]
    assert shown == [name for name in whole if name.endswith("weight")]


def test_without_norms_no_tensor_is_read(main, pair, capsys):
    (pair[0] / "weights-00000.safetensors").write_bytes(b"")
    assert main([str(pair[0]), "--no-norms"]) == 0
    assert "norm " not in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"weights-00000\.safetensors"):
        main([str(pair[0])])


def test_json(main, pair, capsys):
    assert main([str(pair[0]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "checkpoint of this project"
    assert found["tensors"][-1]["name"] == "final_norm.norm.weight"
    assert found["tensors"][-1]["shape"] == [32]
    assert all(tensor["finite"] for tensor in found["tensors"])


def test_difference(main, pair, capsys):
    assert main(["--diff", *map(str, pair)]) == 1
    output = capsys.readouterr().out
    assert "iteration: 10 and 11" in output
    assert "layers.1.mlp.down.weight: largest difference 0.5" in output
    assert "1 tensors differ" in output
    (found,) = tensor_differences(*map(open_checkpoint, pair))
    assert found.largest == pytest.approx(0.5)
    assert main(["--diff", str(pair[0]), str(pair[0])]) == 0
    assert "all tensors are bitwise equal" in capsys.readouterr().out


def test_models_of_other_shapes(
    main, pair, tmp_path, gpt_config, random_gpt, write_checkpoint, capsys
):
    config = gpt_config(llama=True, num_layers=1, ffn_hidden_size=64)
    other = write_checkpoint(tmp_path / "c", config, random_gpt(config))
    assert main(["--diff", str(pair[0]), str(other)]) == 1
    output = capsys.readouterr().out
    assert "model: num_layers: 2 and 1" in output
    assert "layers.1.mlp.up.weight: only in the first" in output
    assert "layers.0.mlp.down.weight: shape (32, 48) and (32, 64)" in output


def test_not_finite_is_said(main, tmp_path, gpt_config, random_gpt, write_checkpoint, capsys):
    config = gpt_config()
    model = random_gpt(config)
    with torch.no_grad():
        dict(model.canonical_parameters())["final_norm.norm.bias"][2] = torch.nan
    write_checkpoint(tmp_path, dataclasses.replace(config), model)
    main([str(tmp_path)])
    assert "1 tensors contain infinities" in capsys.readouterr().out


def test_nothing_there(main, tmp_path):
    with pytest.raises(SystemExit, match="no complete checkpoint found"):
        main([str(tmp_path)])
