"""litgpt, OLMo-core and torchtitan as programs of their own: each makes a small model, saves it and
computes its logits. They run with the package in PYTHONPATH.

    python programs.py litgpt FOLDER NAME            lit_model.pth, model_config.yaml, logits.pt
    python programs.py olmo-core FOLDER KIND         model_and_optim/, train/, and as below
    python programs.py torchtitan FOLDER KIND        step-3/, config.json, logits.pt; gradients/ and
                                                     after/ of the next step
"""

import json
import sys
import types
import unittest.mock
from pathlib import Path

import torch

LLAMA = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "intermediate_size": 48, "block_size": 16,
    "vocab_size": 64, "padded_vocab_size": 64, "norm_eps": 1e-5,
}  # fmt: skip
LITGPT = {
    "llama": {"name": "tiny-llama-1.1b", "n_query_groups": 2},
    "llama31": {
        "name": "Llama-3.1-8B", "n_query_groups": 2,
        "rope_adjustments": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_seq_len": 8,
        },
    },
    "qwen2": {"name": "Qwen2.5-0.5B", "n_query_groups": 2},
    "mistral": {"name": "Mistral-7B-v0.1", "n_query_groups": 2, "sliding_window_size": 4},
    "pythia": {"name": "pythia-14m", "n_query_groups": 4},
}  # fmt: skip


def litgpt(folder, name):
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config

    settings = {**LLAMA, "head_size": 8, **LITGPT[name]}
    config = Config.from_name(settings.pop("name"), **settings)
    model = GPT(config).eval()
    torch.nn.init.normal_(model.lm_head.weight)
    torch.save(model.state_dict(), folder / "lit_model.pth")
    save_config(config, folder)
    tokens = torch.arange(24).view(2, 12) % 64
    with torch.no_grad():
        torch.save(model(tokens), folder / "logits.pt")


def olmo_core(folder, name):
    # Its client for addresses needs those of clouds, and nothing is downloaded.
    sys.modules["cached_path"] = types.ModuleType("cached_path")
    sys.modules["cached_path"].cached_path = None
    sys.modules["cached_path.schemes"] = unittest.mock.MagicMock()
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.state_dict as dist_cp_sd
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
    from olmo_core.optim import AdamWConfig

    config = TransformerConfig.llama_like(
        d_model=32, vocab_size=64, n_layers=2, n_heads=4, n_kv_heads=2, rope_theta=10000,
        qk_norm=name == "reordered_norm", block_name=TransformerBlockType(name),
    )  # fmt: skip
    model = config.build(init_device="cpu").eval()
    tokens = torch.arange(24).view(2, 12) % 64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    optimizer = AdamWConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1).build(model)
    for step in range(4):
        if step == 3:  # as its train module and its trainer save
            options = dist_cp_sd.StateDictOptions(flatten_optimizer_state_dict=True)
            state = {
                "model": dist_cp_sd.get_model_state_dict(model, options=options),
                "optim": dist_cp_sd.get_optimizer_state_dict(model, optimizer, options=options),
            }
            with torch.no_grad():
                torch.save(model(tokens), folder / "logits.pt")
            dcp.save(state, checkpoint_id=folder / "model_and_optim", no_dist=True)
            (folder / "train").mkdir()
            torch.save({"global_step": 3, "epoch": 1}, folder / "train" / "rank0.pt")
        optimizer.zero_grad()
        model(tokens.roll(step, 1)).log_softmax(-1)[..., 1].mean().neg().backward()
        if step == 3:
            state = {n: p.grad for n, p in model.named_parameters()}
            dcp.save(
                {"model": state}, checkpoint_id=folder / "gradients/model_and_optim", no_dist=True
            )
        optimizer.step()
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder / "after/model_and_optim", no_dist=True)
    content = {"model": config.as_config_dict(), "dataset": {"sequence_length": 16}}
    for place in (folder, folder / "gradients", folder / "after"):
        (place / "config.json").write_text(json.dumps(content))


def torchtitan(folder, name):
    """Three steps of its optimizer, its checkpoint manager's save, and one step more. Attention is
    by its ScaledDotProductAttention: torch has no backward of FlexAttention on CPUs."""
    import importlib
    from copy import deepcopy

    import torch.distributed.checkpoint as dcp
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    module = importlib.import_module(f"torchtitan.models.{name}")
    rope = (ComplexRoPE if name == "llama3" else CosSinRoPE).Config(
        dim=8, max_seq_len=16, theta=10000
    )
    shape = {"n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}
    shape |= {"head_dim": 8} if name == "qwen3" else {}
    layers = getattr(module, f"_build_{name}_layers")(rope=rope, attn_backend="flex", **shape)
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    norm = (
        module._qwen3_norm(32)
        if name == "qwen3"
        else RMSNorm.Config(normalized_shape=32, param_init=module._NORM_INIT)
    )
    model = getattr(module, f"{name.capitalize()}Model").Config(
        dim=32, vocab_size=64, layers=layers, norm=norm,
        tok_embeddings=Embedding.Config(
            num_embeddings=64, embedding_dim=32, param_init=module._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=32, out_features=64, param_init=module._LINEAR_INIT),
    ).build()  # fmt: skip
    model.init_states()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    optimizers = default_adamw(1e-2)
    optimizers.implementation = "for-loop"
    optimizers = optimizers.build(model_parts=[model])
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1.0)

    class Run:
        step = 3

        def state_dict(self):
            return {"step": self.step, "ntokens_seen": self.step * 24}

        def load_state_dict(self, state):
            raise NotImplementedError

    manager = CheckpointManager.Config(enable=True, folder=".", interval=3).build(
        dataloader=None, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": Run()}, sd_adapter=None, base_folder=str(folder),
    )  # fmt: skip
    tokens, positions = torch.arange(24).view(2, 12) % 64, torch.arange(12).repeat(2, 1)
    for step in range(4):
        if step == 3:
            manager.save(3)
            with torch.no_grad():
                torch.save(model(tokens, positions), folder / "logits.pt")
        optimizers.zero_grad()
        model(tokens.roll(step, 1), positions).log_softmax(-1)[..., 1].mean().neg().backward()
        if step == 3:
            copy = deepcopy(model)
            with torch.no_grad():
                for parameter, trained in zip(copy.parameters(), model.parameters(), strict=True):
                    parameter.copy_(trained.grad)
            dcp.save(copy.state_dict(), checkpoint_id=folder / "gradients", no_dist=True)
        optimizers.step()
        schedulers.step()
    dcp.save(model.state_dict(), checkpoint_id=folder / "after", no_dist=True)
    config = {
        "model_type": "llama" if name == "llama3" else name, "hidden_size": 32,
        "num_hidden_layers": 2, "hidden_act": "silu", "rope_theta": 10000.0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8,
        "vocab_size": 64, "max_position_embeddings": 16,
        "rms_norm_eps": norm.eps, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    torch.manual_seed(1)
    torch.set_num_threads(1)
    {"litgpt": litgpt, "olmo-core": olmo_core, "torchtitan": torchtitan}[sys.argv[1]](
        Path(sys.argv[2]), sys.argv[3]
    )
