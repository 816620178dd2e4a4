"""nanotron as a program of its own: a small Llama on two tensor ranks, its save, and its logits.

    python nanotron_program.py FOLDER    config.yaml, model/, checkpoint_metadata.json, logits.pt

It runs with the package in PYTHONPATH. nanotron 0.4 runs on GPUs alone; what is replaced here takes
no part in saving: three kernels of flash_attn, by their formulas, its choice of a device, and the
order of imports, in which its modules of logging and configuration need each other.
"""

import os
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml

LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip


def attention(q, k, v, cu_seqlens_q, causal, **_):
    q, k, v = (each.unflatten(0, (len(cu_seqlens_q) - 1, -1)).transpose(1, 2) for each in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


class Rotary(torch.nn.Module):
    """Channels 2i and 2i + 1 of a head, as complex numbers."""

    def __init__(self, dim, interleaved, base=10000.0):
        super().__init__()
        assert interleaved
        self.rates = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)

    def rotated(self, x):
        angles = torch.outer(torch.arange(x.shape[1]).float(), self.rates)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    def forward(self, q, kv):
        return self.rotated(q), torch.stack([self.rotated(kv[:, :, 0]), kv[:, :, 1]], 2)


def norm(x, weight, bias, eps, is_rms_norm, **_):
    assert is_rms_norm and bias is None
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def module(name, **content):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)


def prepare():
    for name in ("flash_attn", "flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"):
        module(name, bert_padding=None)
    module(
        "flash_attn.flash_attn_interface", flash_attn_varlen_func=attention,
        flash_attn_with_kvcache=None,
    )  # fmt: skip
    module("flash_attn.layers.rotary", RotaryEmbedding=Rotary)
    module("flash_attn.ops.triton.layer_norm", layer_norm_fn=norm)
    module("functorch.dim", tree_map=None)
    for name in ("nanotron.config", "nanotron.config.config"):
        module(name, LoggingArgs=object)
    import nanotron.logging  # noqa: F401

    for name in ("nanotron.config", "nanotron.config.config"):
        del sys.modules[name]


def save(rank, folder):
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    prepare()
    from dataclasses import asdict

    from nanotron.config.models_config import LlamaConfig
    from nanotron.models import llama
    from nanotron.models.base import build_model
    from nanotron.parallel import ParallelContext
    from nanotron.parallel.parameters import NanotronParameter
    from nanotron.parallel.tied_parameters import tie_parameters
    from nanotron.serialize.metadata import save_meta
    from nanotron.serialize.weights import save_weights

    ParallelContext.set_device = lambda self: None
    llama.P2P = lambda group, device, there=llama.P2P: there(group, torch.device("cpu"))
    context = ParallelContext(2, 1, 1)
    config = LlamaConfig(**LLAMA)
    model = build_model(
        lambda: llama.LlamaForTraining(config, context, None), context, torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    whole = [name for name, each in model.named_parameters() if "norm" in name]
    for name in whole:  # as its trainer does
        tie_parameters(model, [(name, (0, 1))], context, torch.distributed.ReduceOp.SUM)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            assert isinstance(parameter, NanotronParameter)
            torch.manual_seed(number if name in whole else 100 * rank + number)
            parameter.normal_(std=0.3)
        save_weights(model, context, folder)
        tokens = torch.arange(24).view(2, 12) % 64
        shares = model.model(tokens, torch.ones(2, 12, dtype=torch.bool))
        shares = shares.transpose(0, 1).contiguous()
        both = [torch.empty_like(shares) for _ in range(2)]
        torch.distributed.all_gather(both, shares)
    if rank == 0:
        torch.save(torch.cat(both, -1), folder / "logits.pt")
        content = {"model": {"model_config": asdict(config), "dtype": "float32"}}
        (folder / "config.yaml").write_text(yaml.safe_dump(content))
    save_meta(context, folder, {"consumed_train_samples": 0, "last_train_step": 0})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(save, (Path(sys.argv[1]),), nprocs=2)
