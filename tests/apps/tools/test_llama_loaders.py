"""tools/checkpoint/util.py with the loaders of Megatron's Llama-2 page."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from tool_modules import load_program

from megatron.checkpoint.source import open_checkpoint
from megatron.features.tokenizers.train import train_sentencepiece_model

sys.path.insert(0, str(Path(__file__).parents[2] / "golden" / "meta_llama"))
import meta_files  # noqa: E402


@pytest.fixture(scope="module")
def util():
    return load_program("tools/checkpoint/util.py")


@pytest.fixture
def llamas(tmp_path):
    """A folder with a Llama of each of two sizes."""
    meta_files.write("llama", tmp_path / "llamas" / "7B")
    meta_files.write("llama2-grouped", tmp_path / "llamas" / "13B")
    return tmp_path / "llamas"


def sentencepiece_model(folder, size):
    """A tokenizer.model of that many tokens."""
    path = folder / f"pieces-{size}.model"
    texts = ["a quick brown fox jumps over the lazy dog"] * 20
    path.write_bytes(train_sentencepiece_model(texts, "bpe", size))
    return path


def convert(util, load, save, *flags, loader="llama2", kind="meta"):
    util.reshape([
        "--model-type", "GPT", "--loader", loader, "--checkpoint-type", kind, "--load-dir",
        str(load), "--save-dir", str(save), *flags,
    ])  # fmt: skip


def assert_equal(here, there):
    here, there = open_checkpoint(here), open_checkpoint(there)
    assert here.model.flags().num_query_groups == there.model.flags().num_query_groups
    for name in here.names():
        assert torch.equal(here.tensor(name), there.tensor(name)), name


@pytest.mark.parametrize("loader", ["llama2", "llama_mistral"])
def test_metas_files(loader, util, llamas, tmp_path, capsys):
    sizes = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]
    size = "13B" if loader == "llama2" else "llama2-13B"
    convert(util, llamas, tmp_path / "a", "--model_size", size, "--bf16", *sizes, loader=loader)
    out = capsys.readouterr().out
    assert "in bfloat16 for tensor-parallel size 2" in out and "accepted and not used" not in out
    assert_equal(llamas / "13B", tmp_path / "a")
    convert(util, llamas / "13B", tmp_path / "b", "--saver", "safetensors", loader=loader)
    assert_equal(llamas / "13B", tmp_path / "b")


def test_the_tokenizer_is_written_with_the_weights(util, llamas, tmp_path):
    model = sentencepiece_model(tmp_path, meta_files.VOCABULARY)
    convert(util, llamas / "7B", tmp_path / "a", "--tokenizer-model", str(model))
    tokenizer = open_checkpoint(tmp_path / "a").tokenizer
    assert (tokenizer.tokenizer_type, tokenizer.tokenizer_model) == ("Llama2Tokenizer", str(model))
    shutil.copy(model, llamas / "tokenizer.model")  # where Meta's download has it
    convert(util, llamas / "7B", tmp_path / "b", "--saver", "safetensors")
    assert (tmp_path / "b" / "global_step0" / "tokenizer" / "tokenizer.json").is_file()


def test_what_does_not_fit_is_named(util, llamas, tmp_path):
    with pytest.raises(ValueError, match="--checkpoint-type hf: .*7B is a Llama of Meta"):
        convert(util, llamas / "7B", tmp_path / "a", kind="hf")
    with pytest.raises(ValueError, match="--tokenizer-model gone does not exist"):
        convert(util, llamas / "7B", tmp_path / "a", "--tokenizer-model", "gone")
    large = sentencepiece_model(tmp_path, 60)
    with pytest.raises(ValueError, match="has 60 tokens, but the token embedding of .* 40 rows"):
        convert(util, llamas / "7B", tmp_path / "a", "--tokenizer-model", str(large))
    with pytest.raises(ValueError, match="--bf16 and --fp16 exclude each other"):
        convert(util, llamas / "7B", tmp_path / "a", "--bf16", "--fp16")
    assert not (tmp_path / "a").exists()
