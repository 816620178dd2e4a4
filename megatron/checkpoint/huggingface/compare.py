"""Holds an exported model against the one that it was made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig

RTOL, ATOL = 1.3e-6, 1e-5
"""Relative and absolute difference that logits may always have, those of torch.testing for
float32."""

ROUNDING = 2.0
"""Beyond that they may be so many times as far from float64 logits as our own float32 logits are:
in a deep model, or one with large weights, two right ways of computing differ by more."""


@dataclass(frozen=True)
class Comparison:
    """Logits of two models on the same tokens.

    Attributes:
        largest: largest absolute difference.
        magnitude: largest absolute logit.
        tokens: number of tokens that were compared.
        rounding: what float32 arithmetic does to our own logits, the largest absolute error; None
            when the logits agree within :data:`RTOL` and :data:`ATOL` and it was not needed.
        agree: whether the difference is rounding.
    """

    largest: float
    magnitude: float
    tokens: int
    rounding: float | None
    agree: bool


@torch.no_grad()
def compare_logits(
    ours: nn.Module, folder: Path, model: ModelConfig, seed: int = 1234
) -> Comparison:
    """Compares logits on random tokens at the first and at the last positions of the model.

    Args:
        ours: maps token ids and positions, both int64 [B, S], to logits [B, S, V and maybe
            padding]; float32, on the CPU, where `transformers` computes as well.
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

    def our_logits() -> Tensor:
        return ours(tokens_BS, positions_BS)[..., : model.unpadded_vocab_size]

    ours_BSV = our_logits()
    theirs_BSV = theirs.eval()(input_ids=tokens_BS, position_ids=positions_BS).logits
    rounding = None
    agree = bool(torch.isclose(theirs_BSV, ours_BSV, rtol=RTOL, atol=ATOL).all())
    if not agree:
        ours.double()
        exact_BSV = our_logits()
        ours.float()
        rounding = _largest(ours_BSV - exact_BSV)
        agree = _largest(theirs_BSV - exact_BSV) <= ROUNDING * rounding
    return Comparison(
        largest=_largest(ours_BSV - theirs_BSV),
        magnitude=_largest(ours_BSV),
        tokens=tokens_BS.numel(),
        rounding=rounding,
        agree=agree,
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max())
