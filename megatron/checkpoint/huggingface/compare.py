"""Holds an exported model against the one that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
        agree: whether all logits agree within :data:`RTOL` and :data:`ATOL`.
    """

    largest: float
    magnitude: float
    tokens: int
    agree: bool


@torch.no_grad()
def compare_logits(
    ours: Callable[[Tensor, Tensor], Tensor],
    folder: Path,
    model: ModelConfig,
    seed: int = 1234,
) -> Comparison:
    """Compares logits on random tokens at the first and at the last positions of the model.

    Args:
        ours: logits [B, S, V and maybe padding] of token ids and positions, both int64 [B, S],
            computed in float32 on the CPU.
        folder: the exported model; `transformers` computes in float32 on the CPU too.
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
    ours_BSV = ours(tokens_BS, positions_BS)[..., : model.unpadded_vocab_size]
    theirs_BSV = theirs.eval()(input_ids=tokens_BS, position_ids=positions_BS).logits
    return Comparison(
        largest=float((ours_BSV - theirs_BSV).abs().max()),
        magnitude=float(ours_BSV.abs().max()),
        tokens=tokens_BS.numel(),
        agree=bool(torch.isclose(theirs_BSV, ours_BSV, rtol=RTOL, atol=ATOL).all()),
    )
