"""The matrix products of a step alone (:mod:`products`), as a contestant."""

from __future__ import annotations

import torch
from products import StepShape

from contestants.registry import AfterStep, Contestant
from contestants.setting import Setting


def shape_of(setting: Setting) -> StepShape:
    """Sizes of the products of a setting's micro batch."""
    return StepShape(
        samples=setting.rows,
        length=setting.seq_length,
        layers=setting.layers,
        hidden=setting.hidden_size,
        heads=setting.heads,
        kv_heads=setting.kv_heads,
        head_width=setting.kv_channels,
        inner=setting.ffn_hidden_size,
        gated=setting.gated,
        vocabulary=setting.vocab_size,
        causal=setting.family == "gpt",
        predictions=setting.predictions,
        decoder_length=setting.decoder_length,
        lora_rank=setting.lora_rank if setting.task == "lora" else None,
        answer=setting.answer_length or None,
        experts=setting.experts,
        choices=setting.choices,
    )


@torch.no_grad()
def run(contestant: Contestant, setting: Setting, after_step: AfterStep) -> None:
    """Multiplies."""
    dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = shape_of(setting).products(dtype, device)
    while True:
        for _ in range(setting.micro_batches):
            for product in work:
                product()
        after_step(None)
