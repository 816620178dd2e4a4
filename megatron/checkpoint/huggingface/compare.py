"""Holds an exported model against the one that it was made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig

RTOL, ATOL = 1.3e-6, 1e-5
"""Largest relative and absolute difference of logits, those of torch.testing for float32."""


@dataclass(frozen=True)
class Comparison:
    """Logits of two models on the same tokens.

    Attributes:
        largest: largest absolute difference.
        magnitude: largest absolute logit.
        tokens: number of tokens that were compared.
        dtype: number format of the computation.
        agree: whether all logits agree within :data:`RTOL` and :data:`ATOL`.
    """

    largest: float
    magnitude: float
    tokens: int
    dtype: torch.dtype
    agree: bool


@torch.no_grad()
def compare_logits(
    ours: nn.Module, folder: Path, model: ModelConfig, seed: int = 1234
) -> Comparison:
    """Compares logits on random tokens at the first and at the last positions of the model.

    In a deep model, or one with large weights, two right ways of computing may differ by more than
    is allowed when both round to float32. What does not agree there is decided in float64.

    Args:
        ours: maps token ids and positions, both int64 [B, S], to logits [B, S, V and maybe
            padding]; float32, on the CPU, and so again afterwards.
        folder: the exported model.
        model: shape of the network.
        seed: seed of the tokens.

    Raises:
        CheckpointError: `transformers` finds weights missing or superfluous in the folder.
    """
    from transformers import AutoModelForCausalLM

    assert model.unpadded_vocab_size and model.max_position_embeddings
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    theirs, report = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(map(str, sorted(report[problem])[:5]))
            raise CheckpointError(f"transformers reports {problem} in {folder}: {names}")
    length = min(128, model.max_position_embeddings)
    random = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(model.unpadded_vocab_size, (2, length), generator=random)
    starts_B1 = torch.tensor([[0], [model.max_position_embeddings - length]])
    positions_BS = starts_B1 + torch.arange(length)

    def compared(dtype: torch.dtype) -> Comparison:
        ours_BSV = ours.to(dtype)(tokens_BS, positions_BS)[..., : model.unpadded_vocab_size]
        theirs_BSV = theirs.to(dtype)(input_ids=tokens_BS, position_ids=positions_BS).logits
        return Comparison(
            largest=float((ours_BSV - theirs_BSV).abs().max()),
            magnitude=float(ours_BSV.abs().max()),
            tokens=tokens_BS.numel(),
            dtype=dtype,
            agree=bool(torch.isclose(theirs_BSV, ours_BSV, rtol=RTOL, atol=ATOL).all()),
        )

    theirs.eval()
    result = compared(torch.float32)
    if not result.agree:
        result = compared(torch.float64)
        ours.float()
    return result
