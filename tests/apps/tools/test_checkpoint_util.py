"""tools/checkpoint/util.py and to-megatron as people call them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_files import rank_file
from tool_modules import load_program

from megatron.checkpoint.source import open_checkpoint
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(scope="module")
def util():
    return load_program("tools/checkpoint/util.py")


@pytest.fixture(scope="module")
def convert():
    return load_program("tools/convert_checkpoint.py")


@pytest.fixture
def saved(tmp_path, gpt_config, random_gpt, write_checkpoint):
    def make(**changes):
        config = gpt_config(**changes)
        model = random_gpt(config)
        write_checkpoint(tmp_path / "save", config, model)
        return str(tmp_path / "save")

    return make


def assert_equal(here, there, names=None):
    here, there = open_checkpoint(here), open_checkpoint(there)
    assert set(here.names()) == set(there.names())
    for name in names or here.names():
        assert torch.equal(here.tensor(name), there.tensor(name)), name


def reshape(util, load, save, *flags):
    util.main(["--model-type", "GPT", "--load-dir", str(load), "--save-dir", str(save), *flags])


@pytest.mark.parametrize("llama", [False, True])
def test_reshape_there_and_back(llama, util, saved, tmp_path, capsys):
    load = saved(llama=llama)
    sizes = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]
    reshape(util, load, tmp_path / "a", *sizes)
    assert len(list((tmp_path / "a" / "iter_0000010").glob("mp_rank_*"))) == 4
    assert "read back and equal, bit by bit" in capsys.readouterr().out
    reshape(
        util, tmp_path / "a", tmp_path / "b", "--target-tensor-parallel-size", "4", "--no-checking"
    )
    assert "pipeline-parallel size 2; " in capsys.readouterr().out, "kept"
    assert (tmp_path / "b" / "iter_0000010" / "mp_rank_03_001").is_dir()
    reshape(util, tmp_path / "b", tmp_path / "c", "--saver", "safetensors")
    for other in "abc":
        assert_equal(load, tmp_path / other)


def test_flags_of_megatrons_scripts(util, saved, tmp_path, capsys):
    flags = ["--loader", "megatron", "--max-queue-size", "50", "--megatron-path", "/x"]
    reshape(util, saved(), tmp_path / "a", *flags)
    out = capsys.readouterr().out
    for flag in ("--loader megatron", "--max-queue-size 50", "--megatron-path /x"):
        assert f"{flag} is accepted and not used" in out


def test_true_vocab_size(util, saved, tmp_path, capsys):
    reshape(util, saved(), tmp_path / "a")
    path = tmp_path / "a" / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    content = rank_file(path)
    del content["args"].unpadded_vocab_size
    torch.save(content, path)
    capsys.readouterr()
    reshape(util, tmp_path / "a", tmp_path / "b")
    assert "the token embedding has 128 rows" in capsys.readouterr().out
    reshape(
        util, tmp_path / "a", tmp_path / "c", "--true-vocab-size", "61", "--saver", "safetensors"
    )
    assert_equal(tmp_path / "save", tmp_path / "c")
    for size in ("129", "0"):
        with pytest.raises(SystemExit, match=f"--true-vocab-size {size}: the token embed"):
            reshape(util, tmp_path / "a", tmp_path / "d", "--true-vocab-size", size)
    with pytest.raises(SystemExit, match="--true-vocab-size 60: .* says that it is 61"):
        reshape(util, tmp_path / "save", tmp_path / "d", "--true-vocab-size", "60")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model-type is missing"),
        (["--model-type", "BERT"], "--load-dir is missing"),
        (["--model-type", "GPT"], "--load-dir is missing"),
        (["--model-type", "GPT", "--load-dir", "nowhere", "--save-dir", "x"],
         "nowhere: no such folder"),
        (["--model-type", "GPT", "--load-dir", "x", "--save-dir", "x", "--saver", "mcore"],
         "--saver mcore: expected one of megatron, safetensors"),
    ],
)  # fmt: skip
def test_wrong_flags(flags, message, util):
    with pytest.raises(SystemExit, match=message):
        util.main(flags)


def test_sizes_that_do_not_divide(util, saved, tmp_path):
    with pytest.raises(SystemExit, match="--target-tensor-parallel-size 3 must divide"):
        reshape(util, saved(), tmp_path / "a", "--target-tensor-parallel-size", "3")


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_to_megatron(dtype, convert, saved, tmp_path, capsys):
    load = saved()
    flags = [] if dtype is None else ["--dtype", dtype]
    output = str(tmp_path / "megatron")
    convert.main(["to-megatron", "--load", load, "--output", output, "--release", *flags])
    source = open_checkpoint(output)
    assert isinstance(source, MegatronCheckpoint) and source.folder.name == "release"
    assert source.dtype("final_norm.norm.bias") == (dtype or "float32")
    if dtype is None:
        assert_equal(load, output)
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"in {dtype or 'float32'} for tensor-parallel size 1 and" in last
    with pytest.raises(SystemExit, match="release exists already"):
        convert.main(["to-megatron", "--load", load, "--output", output, "--release"])


def test_a_defect_of_the_export_leaves_nothing(convert, saved, tmp_path, monkeypatch):
    from megatron.formats.legacy_megatron import writer

    monkeypatch.setattr(writer, "_megatron_order", lambda name, share, model, size: share)
    arguments = ["to-megatron", "--load", saved(), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="attention.qkv.weight differs from"):
        convert.main(arguments)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_runs_as_a_program(saved, tmp_path):
    command = [
        sys.executable, str(TOOLS / "checkpoint" / "util.py"), "--model-type", "GPT",
        "--load-dir", saved(), "--save-dir", str(tmp_path / "a"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "load it with --no-load-optim --no-load-rng" in done.stdout
