"""tools/hf2megads_weight_converter.py: both directions, and what does not fit."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron.checkpoint.source import open_checkpoint
from megatron.formats.conversion.megatron_programs import convert
from megatron.formats.conversion.output import write_checkpoint

SIZES = {
    "--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4",
    "--ffn-hidden-size": "48", "--seq-length": "8", "--max-position-embeddings": "8",
    "--tensor-model-parallel-size": "2", "--pipeline-model-parallel-size": "2",
    "--train-iters": "3500", "--lr": "2e-5", "--normalization": "rmsnorm",
}  # fmt: skip
MORE = (
    "--disable-bias-linear --use-rotary-position-embeddings --untie-embeddings-and-output-weights "
    "--swiglu --repeated-dataloader --deepspeed --bf16"
).split()


def flags(**changes):
    given = SIZES | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return [word for pair in given.items() for word in pair] + MORE


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama with a vocabulary that no rank's share divides, and 40 positions."""
    folder = tmp_path_factory.mktemp("llama") / "hf"
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=40,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="10KB")
    return folder


def from_hf(llama, save, *more, mode="auto", **changes):
    own = ["--hf-ckpt-dir", str(llama), "--load-mode", mode, "--save", str(save)]
    convert(None, [*own, *more, *flags(**changes)])


def test_there_and_back(llama, tmp_path, capsys):
    from_hf(llama, tmp_path / "mds", "--hf-ckpt-num-shards", "-1")
    out = capsys.readouterr().out
    assert "logits of 80 tokens agree" in out and "accepted and not used" not in out
    source = open_checkpoint(tmp_path / "mds")
    assert source.model.attention.num_query_groups == 2, "config.json's, which no flag gives"
    back = ["--to-hf-ckpt", "--hf-ckpt-dir", str(llama), "--load", str(tmp_path / "mds")]
    convert(None, [*back, "--save", str(tmp_path / "hf-out"), *flags()])
    before = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "hf-out", dtype=torch.bfloat16)
    theirs = before.state_dict()
    assert theirs.keys() == after.state_dict().keys()
    assert all(torch.equal(theirs[name], value) for name, value in after.state_dict().items())
    config = json.loads((tmp_path / "hf-out" / "config.json").read_text())
    assert (config["torch_dtype"], config["max_position_embeddings"]) == ("bfloat16", 40)


def test_the_original_says_how_long_a_sequence_may_be(llama, tmp_path):
    """A training on shorter sequences does not change it."""
    source = open_checkpoint(llama)
    trained = dataclasses.replace(source.model.flags(), max_position_embeddings=8, seq_length=8)
    source.model = trained.resolve().with_vocabulary(61)
    write_checkpoint(tmp_path / "mds", source, iteration=3, moments=False)
    for original, longest in ((str(llama), 40), ("", 8)):
        save = tmp_path / f"out{longest}"
        words = ["--to-hf-ckpt", "--load", str(tmp_path / "mds"), "--save", str(save)]
        convert(None, [*words, *(["--hf-ckpt-dir", original] if original else [])])
        config = json.loads((save / "config.json").read_text())
        assert config["max_position_embeddings"] == longest


def test_load_modes(llama, tmp_path):
    with pytest.raises(ValueError, match=r"--load-mode torchbin: .* has model-00001-of-.*use auto"):
        from_hf(llama, tmp_path / "a", mode="torchbin")
    count = len(list(llama.glob("*.safetensors")))
    with pytest.raises(ValueError, match=rf"--hf-ckpt-num-shards 2: .* has {count}; -1 takes any"):
        from_hf(llama, tmp_path / "a", "--hf-ckpt-num-shards", "2", mode="safetensor")
    from_hf(llama, tmp_path / "a", "--hf-ckpt-num-shards", str(count), mode="safetensor")
    older = tmp_path / "older"
    older.mkdir()
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    torch.save(model.state_dict(), older / "pytorch_model.bin")
    (older / "config.json").write_text((llama / "config.json").read_text())
    from_hf(older, tmp_path / "b", "--hf-ckpt-num-shards", "1", mode="torchbin")
    here, there = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert all(torch.equal(here.tensor(name), there.tensor(name)) for name in here.names())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, r"--hidden-size 64: .*config\.json has 32; leave the flag out"),
        ({"num_layers": "4"}, r"--num-layers 4: .*config\.json has 2"),
        ({"ffn_hidden_size": "64"}, r"--ffn-hidden-size 64: .*config\.json has 48"),
    ],
)
def test_sizes_that_are_not_those_of_the_model(changes, message, llama, tmp_path):
    with pytest.raises(ValueError, match=message):
        from_hf(llama, tmp_path / "a", **changes)
    assert not (tmp_path / "a").exists()


def test_what_is_missing_is_named(llama, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--save is missing"):
        convert(None, ["--hf-ckpt-dir", str(llama)])
    with pytest.raises(ValueError, match="--hf-ckpt-dir is missing"):
        convert(None, ["--save", str(tmp_path / "a")])
    with pytest.raises(ValueError, match="--load is missing"):
        convert(None, ["--to-hf-ckpt", "--save", str(tmp_path / "a")])
    with pytest.raises(ValueError, match="--hf-ckpt-dir gone: no such folder"):
        convert(None, ["--hf-ckpt-dir", "gone", "--save", str(tmp_path / "a")])
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ValueError, match=r"--save .*used exists already; remove it"):
        from_hf(llama, tmp_path / "used")
    monkeypatch.setenv("RANK", "1")
    from_hf(llama, tmp_path / "a")
    assert not (tmp_path / "a").exists(), "the first process converts alone"
