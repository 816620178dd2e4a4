"""From logits to the next token. Shapes: B rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: logits are divided by ``temperature``; the draw is among the
    ``top_k`` most probable tokens (0 for all), and the fewest whose probabilities sum to ``top_p``.
    ``greedy`` overrides them. ``seed`` and the index of a prompt determine its draws."""

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"--temperature {self.temperature} must be positive; --greedy is the limit at 0"
            )
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} must not be negative; 0 draws among all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} must be in (0, 1]; 1 draws among all tokens")

    def filtered(self, logits_BV: Tensor) -> Tensor:
        """Logits after temperature, top-k and top-p; -inf for excluded tokens."""
        logits_BV = keep_top_k(logits_BV.float() / self.temperature, self.top_k)
        return keep_top_p(logits_BV, self.top_p)

    def choose(self, logits_BV: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        """The next token of each row, with a CPU generator for each, so that draws depend neither
        on other rows nor on the device."""
        if self.greedy:
            return logits_BV.argmax(-1).tolist()
        probabilities_BV = self.filtered(logits_BV).softmax(-1).cpu()
        return [
            int(torch.multinomial(row, 1, generator=generator))
            for row, generator in zip(probabilities_BV, generators, strict=True)
        ]


def keep_top_k(logits_BV: Tensor, count: int) -> Tensor:
    """-inf for all logits below the ``count``-th largest of their row; 0 keeps all."""
    if count == 0 or count >= logits_BV.shape[-1]:
        return logits_BV
    smallest_B1 = logits_BV.topk(count).values[..., -1:]
    return logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)


def keep_top_p(logits_BV: Tensor, share: float) -> Tensor:
    """-inf for all but the fewest tokens whose probabilities sum to at least ``share`` (nucleus
    sampling, Holtzman et al. 2020, arXiv:1904.09751); the most probable one always stays."""
    if share == 1.0:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
    probabilities_BV = sorted_BV.softmax(-1)
    before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    dropped_BV = before_BV >= share
    dropped_BV[..., 0] = False
    return logits_BV.masked_fill(dropped_BV.scatter(-1, order_BV, dropped_BV), -torch.inf)
