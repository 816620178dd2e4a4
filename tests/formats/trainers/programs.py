"""litgpt and OLMo-core as programs of their own: each makes a small model, saves it, and computes
its logits. They run with the package in PYTHONPATH.

    python programs.py litgpt FOLDER NAME            lit_model.pth, model_config.yaml, logits.pt
    python programs.py olmo-core FOLDER KIND         model_and_optim/, config.json, logits.pt
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
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    config = TransformerConfig.llama_like(
        d_model=32, vocab_size=64, n_layers=2, n_heads=4, n_kv_heads=2, rope_theta=10000,
        qk_norm=name == "reordered_norm", block_name=TransformerBlockType(name),
    )  # fmt: skip
    model = config.build(init_device="cpu").eval()
    tokens = torch.arange(24).view(2, 12) % 64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        torch.save(model(tokens), folder / "logits.pt")
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder / "model_and_optim", no_dist=True)
    content = {"model": config.as_config_dict(), "dataset": {"sequence_length": 16}}
    (folder / "config.json").write_text(json.dumps(content))


if __name__ == "__main__":
    torch.manual_seed(1)
    torch.set_num_threads(1)
    {"litgpt": litgpt, "olmo-core": olmo_core}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
