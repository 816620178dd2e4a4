"""Models of checkpoints on one process, as any layout wrote them."""

import dataclasses

import pytest
import torch
from gpt_forward import forward

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ParallelConfig
from megatron.formats.inspection import model_of

CPU = torch.device("cpu")


def loaded(folder, name=None, dtype=torch.float32):
    return model_of(open_checkpoint(folder, name), dtype, CPU)


def test_same_logits(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config(llama=True)
    model = random_gpt(config)
    write_checkpoint(tmp_path, config, model)
    actual = loaded(tmp_path)
    assert not actual.training
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(forward(actual, tokens)[..., :61], forward(model, tokens)[..., :61])


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
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(
            forward(loaded(tmp_path), tokens)[..., :61], forward(model, tokens)[..., :61]
        )


def test_which_checkpoint(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config()
    for step in (5, 6):
        write_checkpoint(tmp_path, config, random_gpt(config, seed=step), step=step)

    def bias(model):
        return dict(model.canonical_parameters())["layers.0.mlp.up.bias"]

    for expected, step in ((None, 6), ("5", 5), ("global_step5", 5)):
        assert torch.equal(bias(loaded(tmp_path, expected)), bias(random_gpt(config, seed=step)))
    with pytest.raises(CheckpointError, match="absent: no such folder"):
        open_checkpoint(tmp_path / "absent")


def test_dtype(tmp_path, gpt_config, random_gpt, write_checkpoint):
    config = gpt_config()
    write_checkpoint(tmp_path, config, random_gpt(config))
    model = loaded(tmp_path, dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
