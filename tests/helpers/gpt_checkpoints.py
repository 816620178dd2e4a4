"""Small models and checkpoints for the tests of several packages."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from configs import model_config, run_config
from torch import Tensor

from megatron.checkpoint.folder import incomplete_folder
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.writer import SliceWriter, finish_checkpoint
from megatron.config import RunConfig
from megatron.families import build_model
from megatron.model.layer_list import LayerStack
from megatron.parallel.shard import shard_of

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 8,
    "seq_length": 24,
    "max_position_embeddings": 24,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}


@pytest.fixture(scope="session")
def gpt_config() -> Callable[..., RunConfig]:
    """Makes the configuration of a small GPT-2; ``llama=True`` of a small Llama."""

    def make(vocab_size: int = 61, llama: bool = False, **changes) -> RunConfig:
        model = model_config(**(SHAPE | (LLAMA if llama else {}) | changes))
        return run_config(model=model).with_vocabulary(vocab_size)

    return make


@pytest.fixture(scope="session")
def random_gpt() -> Callable[..., LayerStack]:
    """Makes a model whose weights are all random, biases and norms included, so that a parameter
    in the wrong place shows."""

    def make(config: RunConfig, seed: int = 5) -> LayerStack:
        generator = torch.Generator().manual_seed(seed)
        model = build_model(config.model)
        with torch.no_grad():
            for name, param in model.canonical_parameters():
                shard = shard_of(param)
                values = torch.randn(shard.canonical_shape, generator=generator) * 0.15
                if "norm.weight" in name:
                    values += 1.0
                param.copy_(shard.cut(values))
            for _, buffer in model.canonical_buffers():
                buffer.values = torch.randn(buffer.shard.full_shape, generator=generator)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def canonical() -> Callable[[LayerStack], dict[str, Tensor]]:
    """Whole parameters without padding, by canonical name."""

    def read(model: LayerStack) -> dict[str, Tensor]:
        return {
            name: shard_of(param).join([param.detach()])
            for name, param in model.canonical_parameters()
        }

    return read


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Path]:
    """Writes a model as a checkpoint of one process."""

    def write(save: Path, config: RunConfig, model: LayerStack, tokenizer=None, step=10) -> Path:
        folder = incomplete_folder(save, step)
        folder.mkdir(parents=True)
        writer = SliceWriter(folder)
        for name, param in model.canonical_parameters():
            held = Slice.of(shard_of(param), {}, 0, param.numel())
            flat = param.detach().reshape(-1)
            writer.add(name, held, [("weight", flat[: held.numel])])
        for name, buffer in model.canonical_buffers():
            writer.add(name, Slice.whole(buffer.shard.full_shape), [("weight", buffer.values)])
        writer.finish()
        contents = {"config.json": config.to_dict(), "state.json": {"iteration": step}}
        save_tokenizer = (lambda folder: None) if tokenizer is None else tokenizer.save_pretrained
        finish_checkpoint(save, step, 1, contents, save_tokenizer)
        return save / f"global_step{step}"

    return write
