"""Models and tokenizers of checkpoints, as any layout wrote them."""

import dataclasses
import shutil

import pytest
import torch
from gpt_forward import forward

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ConfigError, ParallelConfig, PrecisionConfig, TokenizerConfig
from megatron.inference import load_model, load_tokenizer
from megatron.inference.load import training_dtype
from megatron.tokenizer.huggingface import HFTokenizer
from megatron.tokenizer.null import NullTokenizer

CPU = torch.device("cpu")


def test_same_logits(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config(llama=True)
    model = random_gpt(config)
    write_checkpoint(tmp_path, config, model)
    loaded, found = load_model(open_checkpoint(tmp_path), device=CPU)
    assert found == config
    assert not loaded.training
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(forward(loaded, tokens)[..., :61], forward(model, tokens)[..., :61])


def test_a_tensor_parallel_run_loads_on_one_process(
    tmp_path, gpt_config, random_gpt, write_checkpoint
):
    """Its table has other padding; the tokens are the same."""
    config = gpt_config(make_vocab_size_divisible_by=16)
    model = random_gpt(config)
    parallel = dataclasses.replace(
        config, parallel=ParallelConfig(tensor_model_parallel_size=2)
    ).with_vocabulary(61)
    write_checkpoint(tmp_path, parallel, model)
    loaded, _ = load_model(open_checkpoint(tmp_path), device=CPU)
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(
            forward(loaded, tokens)[..., :61], forward(model, tokens)[..., :61]
        )


def test_which_checkpoint(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config()
    for step in (5, 6):
        write_checkpoint(tmp_path, config, random_gpt(config, seed=step), step=step)

    def bias(model):
        return dict(model.canonical_parameters())["layers.0.mlp.up.bias"]

    for wanted, step in ((None, 6), ("5", 5), ("global_step5", 5)):
        loaded, _ = load_model(open_checkpoint(tmp_path, wanted), device=CPU)
        assert torch.equal(bias(loaded), bias(random_gpt(config, seed=step)))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        open_checkpoint(tmp_path / "absent")


def test_dtypes(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = dataclasses.replace(gpt_config(), precision=PrecisionConfig(bf16=True))
    write_checkpoint(tmp_path, config, random_gpt(config))
    loaded, _ = load_model(open_checkpoint(tmp_path), device=CPU)
    assert {param.dtype for param in loaded.parameters()} == {torch.float32}
    loaded, _ = load_model(open_checkpoint(tmp_path), dtype=torch.bfloat16, device=CPU)
    assert {param.dtype for param in loaded.parameters()} == {torch.bfloat16}
    assert training_dtype(config) == torch.bfloat16
    half = dataclasses.replace(config, precision=PrecisionConfig(fp16=True))
    assert training_dtype(half) == torch.float16
    assert training_dtype(gpt_config()) == torch.float32


def with_tokenizer(config, **values):
    return dataclasses.replace(config, tokenizer=TokenizerConfig(**values))


def test_tokenizer_of_the_run_comes_first(tmp_path, gpt_config):
    config = with_tokenizer(gpt_config(), tokenizer_type="NullTokenizer", vocab_size=60)
    assert isinstance(load_tokenizer(config, tmp_path), NullTokenizer)


def test_tokenizer_of_the_checkpoint_when_files_are_gone(tmp_path, gpt_config):
    original = tmp_path / "original"
    NullTokenizer(60).save_pretrained(original)
    config = with_tokenizer(
        gpt_config(), tokenizer_type="HFTokenizer", tokenizer_model=str(original)
    )
    checkpoint = tmp_path / "global_step5"
    NullTokenizer(60).save_pretrained(checkpoint / "tokenizer")
    shutil.rmtree(original)
    tokenizer = load_tokenizer(config, checkpoint)
    assert isinstance(tokenizer, HFTokenizer)
    assert tokenizer.tokenize("7 8") == [7, 8]
    shutil.rmtree(checkpoint)
    with pytest.raises(FileNotFoundError, match="original"):
        load_tokenizer(config, checkpoint)


def test_no_tokenizer_at_all(tmp_path, gpt_config):
    with pytest.raises(ConfigError, match="--tokenizer-type is missing"):
        load_tokenizer(gpt_config(), tmp_path)


def test_tokenizer_that_grew_is_refused(tmp_path, gpt_config):
    config = with_tokenizer(gpt_config(), tokenizer_type="NullTokenizer", vocab_size=61)
    with pytest.raises(ValueError, match="62 tokens, the model of .* has 61"):
        load_tokenizer(config, tmp_path)


@pytest.mark.parametrize(
    "family, said",
    [("bert", "'bert', which does not generate text"), ("bret", "'bret' is unknown")],
)
def test_a_family_that_does_not_generate_is_refused(
    tmp_path, gpt_config, random_gpt, write_checkpoint, family, said
):
    config = gpt_config()
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, family=family))
    write_checkpoint(tmp_path, other, random_gpt(config))
    with pytest.raises(ConfigError, match=said):
        load_model(open_checkpoint(tmp_path), device=CPU)
