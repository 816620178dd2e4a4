"""tools/convert_checkpoint.py as people call it."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_modules import load_program
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron.checkpoint.source import open_checkpoint
from megatron.config import PrecisionConfig
from megatron.formats import huggingface
from megatron.formats.conversion.output import parse_size
from megatron.formats.huggingface.entries import SAME
from megatron.tokenizer.plain import NullTokenizer


@pytest.fixture(scope="module")
def tool():
    return load_program("tools/convert_checkpoint.py")


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
        dataclasses.replace(entry, form=SAME)
        if entry.ours == "layers.{n}.attention.proj.weight" else entry
        for entry in huggingface.GPT2.entries
    )  # fmt: skip
    table = dataclasses.replace(huggingface.GPT2, entries=wrong)
    monkeypatch.setattr(huggingface, "architectures", lambda: (table,))
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
        ("from-hg", "from-hg: the commands are to-hf, from-hf"),
        ("from-hf --output x", "--input is missing"),
        ("from-hf --input x", "--output is missing"),
        ("from-hf --input x --output y", "--input x: no such folder; expected"),
        ("from-hf --input . --output y", "--input .: config.json not found"),
        ("to-hf --load x --output y --private", "--private concerns the repository"),
        ("to-hf --load x --output y --public", "--public concerns the repository"),
        ("to-hf --load x --output y --push-to-hub a/b --public --private", "contradict each other"),
        ("to-hf --load x --output y --push-to-hub a/b/c", "--push-to-hub a/b/c: Repo id must"),
        ("to-hf --output x", "--load is missing"),
        ("to-hf --load x", "--output is missing"),
        ("to-hf --load x --output y", "x: no such folder"),
        ("to-hf --load x --output y --max-shard-size 5GBs", "5GBs is not a size"),
        ("to-hf --load x --output y --max-shard-size 0", "0 is not a size"),
    ],
)
def test_bad_command_lines(tool, command_line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        tool.main(command_line.split())
    assert not list(tmp_path.iterdir())


def test_sizes():
    assert parse_size("5GB") == 5 * 10**9
    assert parse_size("1.5 GiB") == 3 * 2**29
    assert parse_size("500mb") == 5 * 10**8
    assert parse_size("1234") == 1234


def test_without_transformers(tool, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for arguments in (["to-hf", "--load", "x"], ["from-hf", "--input", "x"]):
        with pytest.raises(SystemExit, match="pip install transformers"):
            tool.main([*arguments, "--output", str(tmp_path / "hf")])


def test_help_names_the_commands(tool, capsys):
    with pytest.raises(SystemExit) as end:
        tool.main(["--help"])
    assert end.value.code == 0
    assert "to-hf" in capsys.readouterr().out


@pytest.fixture
def downloaded(tmp_path):
    """Folders as they are downloaded."""

    def make(name="theirs", tokenizer=True, **settings):
        config = AutoConfig.for_model(
            "qwen2", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=40,
            bos_token_id=None, eos_token_id=None, **settings,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn(param.shape, generator=generator) * 0.15)
        model.save_pretrained(tmp_path / name)
        if tokenizer:
            NullTokenizer(60).save_pretrained(tmp_path / name)
            (tmp_path / name / "generation_config.json").write_text(
                json.dumps({"eos_token_id": [60, 7], "temperature": 0.6, "do_sample": True})
            )
        return tmp_path / name

    return make


def test_there_and_back(tool, downloaded, tmp_path, capsys):
    theirs, ours, back = downloaded(), tmp_path / "ours", tmp_path / "back"
    tool.main(["from-hf", "--input", str(theirs), "--output", str(ours)])
    *_, line, hint = capsys.readouterr().out.splitlines()
    # Queries, keys and values are one tensor in ours, and gate and up too.
    tensors = load_file(theirs / "model.safetensors").values()
    count = sum(values.numel() for values in tensors)
    assert "Qwen2 of " in line
    assert f"{count:,} parameters in 17 tensors; logits of 80 tokens agree" in line
    assert hint == f"train on it with --load {ours} --use-checkpoint-args"
    assert sorted(path.name for path in ours.iterdir()) == [
        "global_step0", "latest", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    ours.rename(tmp_path / "moved")  # nothing in it says where it was
    shutil.move(theirs, tmp_path / "elsewhere")
    reader = open_checkpoint(tmp_path / "moved")
    assert reader.state == {} and reader.model.attention.qkv_bias
    assert reader.tokenizer.tokenizer_model == str(
        tmp_path / "moved" / "global_step0" / "tokenizer"
    )
    tool.main(["to-hf", "--load", str(tmp_path / "moved"), "--output", str(back)])
    said = capsys.readouterr().out
    assert f"ForCausalLM, {count:,} parameters in {len(tensors)} tensors, float32\n" in said
    found, wanted = (
        load_file(path / "model.safetensors") for path in (back, tmp_path / "elsewhere")
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    generation = json.loads((back / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [60, 7], "temperature": 0.6, "do_sample": True}
    assert AutoConfig.from_pretrained(back).eos_token_id == [60, 7]
    # transformers 5 makes Qwen2's tokenizer of any files next to a config.json of Qwen2.
    assert "warning: in a folder with model_type qwen2, AutoTokenizer" in said
    tokenizer = PreTrainedTokenizerFast.from_pretrained(back)
    assert tokenizer("3 7 59")["input_ids"] == [3, 7, 59]


def test_from_hf_without_a_tokenizer_says_so(tool, downloaded, tmp_path, capsys):
    theirs = downloaded(tokenizer=False)
    tool.main(["from-hf", "--input", str(theirs), "--output", str(tmp_path / "ours")])
    assert f"no tokenizer: {theirs} has no tokenizer files" in capsys.readouterr().out
    assert not (tmp_path / "ours" / "global_step0" / "tokenizer").exists()
    assert open_checkpoint(tmp_path / "ours").tokenizer is None


def test_from_hf_in_several_files(tool, downloaded, tmp_path):
    arguments = ["from-hf", "--input", str(downloaded()), "--output", str(tmp_path / "ours")]
    tool.main([*arguments, "--max-shard-size", "20KB"])
    assert len(list((tmp_path / "ours" / "global_step0").glob("weights-*.safetensors"))) > 2
    with pytest.raises(SystemExit, match="ours is not empty; give --overwrite"):
        tool.main(arguments)
    tool.main([*arguments, "--overwrite"])
    assert len(list((tmp_path / "ours" / "global_step0").glob("weights-*.safetensors"))) == 1


def test_from_hf_refuses_other_logits(tool, downloaded, tmp_path, monkeypatch):
    def exchanged(entry):
        if entry.ours != "layers.{n}.attention.qkv.bias":
            return entry
        query, key, value = entry.theirs
        return dataclasses.replace(entry, theirs=(query, value, key))

    wrong = dataclasses.replace(
        huggingface.QWEN2, entries=tuple(exchanged(entry) for entry in huggingface.QWEN2.entries)
    )
    monkeypatch.setattr(huggingface, "architectures", lambda: (wrong,))
    with pytest.raises(SystemExit, match="other logits than transformers .* is not written"):
        tool.main(
            ["from-hf", "--input", str(downloaded()), "--output", str(tmp_path / "a" / "ours")]
        )
    assert not list((tmp_path / "a").iterdir())


def test_from_hf_refuses_what_it_cannot_represent(tool, downloaded, tmp_path):
    theirs = downloaded()
    content = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(content | {"hidden_act": "tanh"}))
    with pytest.raises(SystemExit, match="config.json: hidden_act is 'tanh'"):
        tool.main(["from-hf", "--input", str(theirs), "--output", str(tmp_path / "ours")])
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_forced_architecture(tool, saved, tmp_path):
    arguments = ["to-hf", "--load", saved(llama=True), "--output", str(tmp_path / "hf")]
    tool.main([*arguments, "--architecture", "mistral"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "MistralForCausalLM" and model.config.sliding_window is None


def test_push(tool, saved, tmp_path, monkeypatch, capsys):
    """After the logits agree, the folder as it is; see tests/formats for the client."""
    pushed = []

    def push(folder, repository, private):
        pushed.append((folder, repository, private, sorted(p.name for p in folder.iterdir())))
        return "https://hub/me/model"

    monkeypatch.setattr("megatron.formats.conversion.commands.push", push)
    output = tmp_path / "hf"
    arguments = ["to-hf", "--load", saved(), "--output", str(output), "--push-to-hub", "me/model"]
    tool.main(arguments)
    assert capsys.readouterr().out.splitlines()[-1] == "pushed to https://hub/me/model"
    ((folder, repository, private, names),) = pushed
    assert (folder, repository, private) == (output, "me/model", True)
    assert "model.safetensors" in names and "tokenizer.json" in names
    for flag, private in (("--private", True), ("--public", False)):
        tool.main([*arguments, "--overwrite", flag])
        assert pushed[-1][2] is private

    def refuse(*_):
        raise OSError("no network")

    monkeypatch.setattr("megatron.formats.conversion.commands.push", refuse)
    with pytest.raises(SystemExit, match="error: no network"):
        tool.main([*arguments, "--overwrite"])
    assert (output / "model.safetensors").exists()


def test_weights_that_are_not_finite_are_named_in_both_directions(tool, downloaded, tmp_path):
    theirs = downloaded(tokenizer=False)
    tensors = load_file(theirs / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, theirs / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match="final_norm.norm.weight has 1 of 32 elements that are"):
        tool.main(["to-hf", "--load", str(theirs), "--output", str(tmp_path / "back")])
    with pytest.raises(SystemExit, match="logits that are not finite, so --output .* not written"):
        tool.main(["from-hf", "--input", str(theirs), "--output", str(tmp_path / "ours")])
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_commands(tool, capsys):
    commands = {"show": lambda: print, "fail": lambda: int}
    tool.run_command(commands, "Text.", ["show", "--help"])
    assert capsys.readouterr().out == "['--help']\n"
    with pytest.raises(ValueError, match="shw: the commands are show, fail"):
        tool.run_command(commands, "Text.", ["shw"])
    with pytest.raises(ValueError, match="no command: the commands are show, fail"):
        tool.run_command(commands, "Text.", [])
    with pytest.raises(SystemExit):
        tool.run_command(commands, "Text.", ["--help"])
    assert "show, fail; each has --help" in capsys.readouterr().out
