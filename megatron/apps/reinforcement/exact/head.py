"""Training log-probabilities, computed by the function that computes them for sampled tokens.

Shapes: B texts, P predicted tokens of a text, T tokens of the row, C tokens of a chunk, H hidden, V
vocabulary, P after a dimension of logits: one rank's share.
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
"""Rows of a product of the head; row rules with fewer give the same bits."""


class DrawnTargets(Targets):
    """Targets [B, P] with positions within texts (``positions_BP``), for hidden states of a single
    row: ``places_BP`` are the tokens of the row that predict them."""

    @classmethod
    def of(cls, targets: Targets, rows_BP: Tensor) -> DrawnTargets:
        """Targets at these tokens of the row."""
        return cls(*targets.changed(places_BP=rows_BP))

    def taken(self, x_BSH: Tensor, tp: TensorParallel) -> tuple[Tensor, Targets]:
        """See :meth:`Targets.taken`."""
        assert not tp.split, "a split sequence is no row of generation"
        assert self.places_BP is not None
        x_1TH = tp.take(x_BSH, self.places_BP.view(1, -1))
        return x_1TH.view(*self.places_BP.shape, -1), self


def drawn_numbers(inputs: HeadInput, temperature: float) -> TokenNumbers:
    """The numbers of targets. :class:`DrawnTargets` are scored by :func:`softened`, as when their
    tokens were drawn; others by :func:`token_numbers`."""
    score = None
    if isinstance(inputs.targets, DrawnTargets):
        score = partial(_scores, inputs.head.vocab_size, temperature)
    return token_numbers(inputs, temperature, score)


def _scores(
    vocab_size: int, temperature: float, run: LogitChunks, chunk: slice, logits_CP: Tensor
) -> Tensor:
    """[C], 0 where no target counts."""
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
    # Those of drawn tokens are kept in float32.
    return scored_C.float().to(run.mask_T)
