"""Log-probabilities for training, computed by the same function as those of sampled tokens.

Shapes: B texts, P predicted tokens of a text, T tokens of the row, C tokens of a chunk, H hidden, V
vocabulary. After a dimension of logits, P is one rank's vocabulary shard.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.apps.generation.decoding.sampling import softened
from megatron.apps.generation.execution.stages import whole_logits
from megatron.apps.reinforcement.head import TokenNumbers, token_numbers
from megatron.parallel.cross_entropy import LogitChunks
from megatron.parallel.loss_head import HeadInput, Targets
from megatron.parallel.softmax_loss import capped
from megatron.parallel.tensor_parallel import TensorParallel

FEWEST_ROWS = 32
"""Minimum number of rows of the output head's GEMM. Smaller chunks are padded to it, so that row
rules with fewer rows give the same bits."""


class DrawnTargets(Targets):
    """Targets [B, P] of texts that are laid out in a single row of hidden states. ``positions_BP``
    contains positions in the texts, ``places_BP`` the indices in the row of the tokens that predict
    the targets."""

    @classmethod
    def of(cls, targets: Targets, rows_BP: Tensor) -> DrawnTargets:
        """Return the targets, predicted by the tokens of the row with the indices ``rows_BP``."""
        return cls(*targets.changed(places_BP=rows_BP))

    def taken(self, x_BSH: Tensor, tp: TensorParallel) -> tuple[Tensor, Targets]:
        """See :meth:`Targets.taken`."""
        assert not tp.split, "a split sequence is no row of generation"
        assert self.places_BP is not None
        x_1TH = tp.take(x_BSH, self.places_BP.view(1, -1))
        return x_1TH.view(*self.places_BP.shape, -1), self


def drawn_numbers(inputs: HeadInput, temperature: float) -> TokenNumbers:
    """Return log-probabilities and entropies of the targets. :class:`DrawnTargets` are scored by
    :func:`softened`, as they were in generation, and other targets by :func:`token_numbers`."""
    score = None
    if isinstance(inputs.targets, DrawnTargets):
        score = partial(_scores, inputs.head.vocab_size, temperature)
    return token_numbers(inputs, temperature, score)


def _scores(
    vocab_size: int, temperature: float, run: LogitChunks, chunk: slice, logits_CP: Tensor
) -> Tensor:
    """Return the log-probabilities of a chunk's labels, [C], and 0 where the mask is 0."""
    count = len(logits_CP)
    if count < FEWEST_ROWS:
        x_CH = F.pad(run.x_TH[chunk], (0, 0, 0, FEWEST_ROWS - count))
        logits_CP = F.linear(x_CH, run.weight_PH, run.bias_P)
    whole_CV = whole_logits(capped(logits_CP, run.columns.softcap), vocab_size, run.group)
    whole_CV = whole_CV[:count].cpu()
    labels_C, counted = run.targets.labels_BS.flatten()[chunk], run.mask_T[chunk] > 0
    scored_C = torch.zeros(count, dtype=torch.float64)
    soft = softened(whole_CV[counted.cpu()].numpy(), temperature)
    scores = [
        row.log_prob(label) for row, label in zip(soft, labels_C[counted].tolist(), strict=True)
    ]
    scored_C[counted.cpu()] = torch.tensor(scores, dtype=torch.float64)
    # Round to float32, the dtype in which generation stores log-probabilities.
    return scored_C.float().to(run.mask_T)
