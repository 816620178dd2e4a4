"""Episodes of a policy, and micro batches of episodes.

An episode is a prompt with its completion: the policy's tokens and, with an environment, the tokens
of the environment's responses. Consecutive episodes of one prompt form a group.

Shapes: L tokens after a prompt, B episodes of a micro batch, S positions of the model's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.loss_head import Targets

Message = Mapping[str, Any]
"""Turn of a conversation with its ``role`` and ``content``, as chat templates read it."""


@dataclass(frozen=True)
class Prompt:
    """Prompt from a record of the data.

    Attributes:
        number: record number, counted across all files of the run in command-line order.
        tokens: token ids that the model reads, int64.
        text: the prompt as stored in the data: a string, or the messages of a conversation.
        columns: the record's other columns for reward functions, such as a reference answer.
    """

    number: int
    tokens: npt.NDArray[np.int64]
    text: str | tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """Completion of a prompt.

    Attributes:
        tokens_L: token ids after the prompt, int64, including the end-of-text token.
        own_L: True for tokens of the policy, False for tokens of an environment; bool.
        log_probs_L: log-probabilities of the policy's tokens when they were sampled, at the run's
            temperature, float32; 0 elsewhere.
        text: the policy's text without the tokens that end it, or all turns with an environment.
        ended: True if the completion ended by itself, False if it was truncated.
        turns: with an environment, the messages after the prompt; otherwise empty.
        reward: reward from the environment; None without one.
    """

    prompt: Prompt
    tokens_L: npt.NDArray[np.int64]
    own_L: npt.NDArray[np.bool_]
    log_probs_L: npt.NDArray[np.float32]
    text: str
    ended: bool
    turns: tuple[Message, ...] = ()
    reward: float | None = None


class EpisodeBatch(NamedTuple):
    """Micro batch of episodes, padded on the right.

    Attributes:
        answers: prompts and completions as a batch of the model's family, whose loss mask selects
            the policy's tokens.
        advantages_BS: advantage of each predicted token, float32.
        sampled_BS: log-probability of each predicted token when it was sampled, float32; 0 at
            positions without a target.
        old_BS: log-probabilities under the weights before the first step on these episodes,
            float32. None if they equal the current log-probabilities or the sampling ones.
        reference_BS: log-probabilities under the reference model, float32; None without one.
        values_BS: returns, the value head's targets, float32; None without a value head.
        old_values_BS: value head's predictions before the first step on these episodes; None
            without a value head.
        kept_B: False for episodes that are excluded from the loss; bool.
        weights_2: see :class:`~megatron.features.preference.samples.PreferenceBatch`; the second
            weight counts only the tokens that are in the loss.
    """

    answers: Any
    advantages_BS: Tensor
    sampled_BS: Tensor
    old_BS: Tensor | None = None
    reference_BS: Tensor | None = None
    values_BS: Tensor | None = None
    old_values_BS: Tensor | None = None
    kept_B: Tensor | None = None
    weights_2: Tensor | None = None

    @property
    def tokens_BS(self) -> Tensor:
        """Token ids of the model's input."""
        return self.answers.tokens_BS

    def lengthened(self, seq_length: int) -> EpisodeBatch:
        """Return the batch with every row padded to ``seq_length`` tokens."""
        missing = seq_length - self.tokens_BS.shape[1]
        padded = {
            name: F.pad(part, (0, missing))
            for name, part in self._asdict().items()
            if name.endswith("_BS") and part is not None
        }
        return self._replace(answers=self.answers.lengthened(seq_length), **padded)

    def counted(self, targets: Targets) -> Tensor:
        """Return 1 for targets in the loss and 0 for others: [B, P], float64."""
        mask_BP = (targets.mask_BS > 0).double()
        return mask_BP if self.kept_B is None else mask_BP * self.kept_B[:, None]

    def share(self, like: Tensor) -> Tensor:
        """Return the number of tokens in the loss, divided by its mean over all micro batches of
        the step on all ranks, as a scalar in the dtype of ``like``."""
        return like.new_ones(()) if self.weights_2 is None else self.weights_2[1].to(like.dtype)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> EpisodeBatch:
        """Return the batch on a device."""
        return EpisodeBatch._make(
            None if part is None else part.to(device, non_blocking=non_blocking) for part in self
        )


def at_targets(values_BS: Tensor, targets: Targets) -> Tensor:
    """Return the values at the positions of targets, [B, P], and 0 for padding."""
    if targets.positions_BP is not None:
        values_BS = values_BS.gather(1, targets.positions_BP)
    return F.pad(values_BS, (0, targets.labels_BS.shape[1] - values_BS.shape[1]))


def at_places(values_BP: Tensor, targets: Targets, length: int) -> Tensor:
    """Scatter the values of targets to the positions that predict them, [B, ``length``]. Positions
    without a counted target are 0."""
    values_BP = values_BP * (targets.mask_BS > 0)
    if targets.positions_BP is None:
        return values_BP
    zeros_BS = values_BP.new_zeros((len(values_BP), length))
    count = targets.positions_BP.shape[1]
    return zeros_BS.scatter_add(1, targets.positions_BP, values_BP[:, :count])
