"""Base of the contestants with a model of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from contestants import drawn
from contestants.inputs import weights
from contestants.setting import WEIGHT_DECAY, Setting

AUTO = {
    "gpt": "AutoModelForCausalLM",
    "bert": "AutoModelForPreTraining",
    "t5": "AutoModelForSeq2SeqLM",
}
ARGUMENTS = {
    "gpt": ("input_ids", "labels"),
    "bert": ("input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label"),
    "t5": ("input_ids", "attention_mask", "decoder_input_ids", "labels"),
}
"""Names in the order of :func:`inputs.parts`."""
TIED = {
    "lm_head.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
}
"""Second names of tied parameters."""
NO_LABEL = -100


def load_model(
    setting: Setting, dtype: torch.dtype, device: torch.device, experts: str = ""
) -> Any:
    """The model with the weights that all start from, torch's attention, no dropout, no cache;
    ``experts``: how it computes them, if it has any."""
    import transformers

    auto = getattr(transformers, AUTO[setting.family])
    if setting.folder:
        config = transformers.AutoConfig.from_pretrained(setting.weights, trust_remote_code=False)
    else:
        content = drawn.huggingface_config(setting)
        config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    config.use_cache = False
    if setting.architecture == "gpt2":
        config.activation_function = setting.hf_activation
    how: dict[str, Any] = {"attn_implementation": "sdpa", "trust_remote_code": False}
    if experts:
        how["experts_implementation"] = experts
    model: Any
    if setting.shared_weights and setting.folder:
        model = auto.from_pretrained(setting.weights, config=config, dtype=dtype, **how)
    else:
        with torch.device(device):
            model = auto.from_config(config, dtype=dtype, **how)
        if setting.shared_weights:
            # A tied head is in the model twice, and in the weights once.
            found = model.load_state_dict(weights(setting, device), strict=False)
            assert not found.unexpected_keys, found
            assert set(found.missing_keys) <= TIED, found
    if setting.task == "lora":
        model = with_lora(model, setting.lora_rank)
    return model.to(device).train()


def with_lora(model: nn.Module, rank: int) -> Any:
    """peft's low-rank additions to all linear layers of the blocks, and the rest frozen."""
    import peft

    scale = 2.0 * rank
    config = peft.LoraConfig(r=rank, lora_alpha=scale, target_modules="all-linear")
    return peft.get_peft_model(model, config)  # type: ignore[arg-type]


def inputs(family: str, *batch: Tensor) -> dict[str, Tensor]:
    """Arguments of the model. Of a GPT, `shift_labels` has its own loss count all S labels, as the
    others do; with `labels` alone it would shift them itself and have S - 1."""
    names = ARGUMENTS[family]
    found = dict(zip(names, batch, strict=True))
    if family == "gpt":
        return found | {"shift_labels": found["labels"]}
    return found | {"labels": found["labels"].masked_fill(found["labels"] < 0, NO_LABEL)}


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors, which do not."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
