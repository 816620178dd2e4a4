"""Batches of answers of which some are better than others.

Shape suffixes: R rows, two for each pair, a prompt with its better answer and then with its worse
one; for judged answers (kto) one each. S sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class PreferenceBatch(NamedTuple):
    """Answers and what is known of them.

    Attributes:
        answers: the rows [R, S] as a batch of the model's family, padded on the right, in which the
            tokens of the answers are predicted.
        reference_R: log-probability of each answer under the reference model, float32; None without
            one. For a loss of means over tokens it is the sum, too.
        desirable_R: kto: whether the answer of each row is good, bool; None for pairs.
    """

    answers: Any
    reference_R: Tensor | None = None
    desirable_R: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PreferenceBatch:
        return PreferenceBatch._make(
            None if part is None else part.to(device, non_blocking=non_blocking) for part in self
        )
