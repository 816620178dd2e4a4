"""Compares a model of `transformers` with one of ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig
from megatron.model.layer_list import LayerStack, LayerState

RTOL, ATOL = 1.3e-6, 1e-5
"""Largest relative and absolute difference of logits, those of torch.testing for float32."""
_LONGEST_WINDOW = 1024
"""Sequences are longer than sliding windows of up to this many tokens."""


@dataclass(frozen=True)
class Comparison:
    """Logits of two models on the same tokens: largest absolute difference, largest absolute logit,
    and whether all agree within :data:`RTOL` and :data:`ATOL`."""

    largest: float
    magnitude: float
    tokens: int
    dtype: torch.dtype
    agree: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"logits of {self.tokens} tokens agree, largest difference {self.largest:.2g} of "
            f"logits up to {self.magnitude:.3g} (computed in {dtype})"
        )


@torch.no_grad()
def compare_logits(
    ours: LayerStack, folder: Path, model: ModelConfig, strict: bool = True, seed: int = 1234
) -> Comparison:
    """Compares logits of ``ours`` (float32, on the CPU) and ``folder`` on random tokens at the
    first and at the last positions of the model, in float64 where rounding to float32 exceeds what
    is allowed. With ``strict`` `transformers` must find all weights and no other in the folder.
    Raises CheckpointError if `transformers` finds weights missing or superfluous in the folder."""
    theirs = _load(folder, model, strict)
    # Without absolute positions their code accepts none.
    relative = model.positions.position_embedding_type in ("alibi", "none")
    tokens_BS, positions_BS = _inputs(model, relative, seed)

    def compared(dtype: torch.dtype) -> Comparison:
        begin = LayerState(tokens_BS, position_ids=positions_BS)
        ours_BSV = ours.to(dtype)(begin).hidden[..., : model.vocabulary.size]
        further = {} if relative else {"position_ids": positions_BS}
        theirs_BSV = theirs.to(dtype)(input_ids=tokens_BS, **further).logits
        return Comparison(
            largest=float((ours_BSV - theirs_BSV).abs().max()),
            magnitude=float(ours_BSV.abs().max()),
            tokens=tokens_BS.numel(),
            dtype=dtype,
            agree=bool(torch.isclose(theirs_BSV, ours_BSV, rtol=RTOL, atol=ATOL).all()),
        )

    result = compared(torch.float32)
    if not result.agree:
        result = compared(torch.float64)
        ours.float()
    return result


def _load(folder: Path, model: ModelConfig, strict: bool) -> Any:
    from transformers import AutoModelForCausalLM

    # torch's fused kernel has no softcap.
    softcap = model.attention.attn_logit_softcapping is not None
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        **({"attn_implementation": "eager"} if softcap else {}),
    )
    theirs, report = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if strict and report[problem]:
            names = ", ".join(map(str, sorted(report[problem])[:5]))
            raise CheckpointError(f"transformers reports {problem} in {folder}: {names}")
    return theirs.eval()


def _inputs(model: ModelConfig, relative: bool, seed: int) -> tuple[Tensor, Tensor]:
    length, last = 128, model.positions.max_position_embeddings
    window = model.attention.sliding_window
    if window is not None and window <= _LONGEST_WINDOW:
        length = max(length, window + 64)
    length = min(length, last)
    # Longrope's angles depend on the length of the sequence in our code, and on the last position
    # in theirs.
    longrope = model.positions.rope_scaling.rope_type == "longrope"
    random = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(model.vocabulary.size, (2, length), generator=random)
    second = 0 if longrope or relative else last - length
    return tokens_BS, torch.tensor([[0], [second]]) + torch.arange(length)
