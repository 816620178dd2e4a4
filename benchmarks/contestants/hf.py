"""What the contestants with a model of `transformers` have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from contestants import drawn
from contestants.inputs import weights
from contestants.setting import WEIGHT_DECAY, Setting


def load_model(setting: Setting, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with the weights that all start from, torch's attention, no dropout, no cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if setting.folder:
        config = AutoConfig.from_pretrained(setting.weights)
    else:
        content = drawn.huggingface_config(setting)
        config = AutoConfig.for_model(content.pop("model_type"), **content)
    config.use_cache = False
    if setting.architecture == "gpt2":
        config.activation_function = setting.hf_activation
    how: dict[str, Any] = {"attn_implementation": "sdpa"}
    model: Any
    if setting.shared_weights and setting.folder:
        model = AutoModelForCausalLM.from_pretrained(
            setting.weights, config=config, dtype=dtype, **how
        )
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **how)
        if setting.shared_weights:
            # A tied head is in the model twice, and in the weights once.
            found = model.load_state_dict(weights(setting, device), strict=False)
            assert not found.unexpected_keys, found
            assert set(found.missing_keys) <= {"lm_head.weight"}, found
    return model.to(device).train()


def inputs(tokens_BS: Tensor, labels_BS: Tensor) -> dict[str, Tensor]:
    """Arguments of the model: `shift_labels` has its own loss count all S labels, as the others do;
    with `labels` alone it would shift them itself and have S - 1."""
    return {"input_ids": tokens_BS, "labels": labels_BS, "shift_labels": labels_BS}


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors, which do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
