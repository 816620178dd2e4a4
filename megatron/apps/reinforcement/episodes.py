"""Texts that a policy wrote, and micro batches of them.

An episode is a prompt and what followed: tokens of the policy and, with an environment, of its
responses. Consecutive episodes of one prompt are a group.

Shapes: L tokens after a prompt, B episodes of a micro batch, S tokens that the model reads of one.
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
"""A turn of a conversation: ``role``, ``content``, as chat templates read it."""


@dataclass(frozen=True)
class Prompt:
    """A record of the data.

    Attributes:
        number: of the record in the files of the run, in the order of its flags.
        tokens: ids that the model reads, int64.
        text: the prompt as data have it: a text, or the messages of a conversation.
        columns: the other columns of the record, such as an answer, for rewards.
    """

    number: int
    tokens: npt.NDArray[np.int64]
    text: str | tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """A text after a prompt.

    Attributes:
        tokens_L: ids after the prompt, int64, the token that ends the text included.
        own_L: True for tokens of the policy, False for tokens of an environment; bool.
        log_probs_L: of the policy's tokens when it drew them, at the temperature of the run; 0
            elsewhere; float32.
        text: the policy's text without the tokens that end it; of an environment all turns.
        ended: True for a text that ended by itself, False for one that was cut off.
        turns: of an environment, the messages after the prompt.
        reward: what an environment gave; None without one.
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
    """A micro batch of episodes, padded on the right.

    Attributes:
        answers: prompts and texts as a batch of the model's family; its targets count where a token
            of the policy is predicted.
        advantages_BS: of each predicted token, float32; of one episode mostly the same.
        sampled_BS: log-probability of each predicted token when it was drawn, float32; 0 where none
            counts.
        old_BS: under the weights before the first step on these episodes, float32; None where these
            are the weights of now, or of sampling.
        reference_BS: under the reference model, float32; None without one.
        values_BS: returns that a value head learns, float32; None without one.
        old_values_BS: values before the first step on these episodes; None without a value head.
        kept_B: False for episodes whose tokens do not count (cut off, or masked), bool.
        weights_2: see :class:`~megatron.features.preference.samples.PreferenceBatch`; the second
            is of the tokens that count and are kept.
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
        """All that the model reads."""
        return self.answers.tokens_BS

    def lengthened(self, seq_length: int) -> EpisodeBatch:
        """With padding after every row, up to ``seq_length`` tokens."""
        missing = seq_length - self.tokens_BS.shape[1]
        padded = {
            name: F.pad(part, (0, missing))
            for name, part in self._asdict().items()
            if name.endswith("_BS") and part is not None
        }
        return self._replace(answers=self.answers.lengthened(seq_length), **padded)

    def counted(self, targets: Targets) -> Tensor:
        """1 for the targets that count, else 0: [B, P], float64."""
        mask_BP = (targets.mask_BS > 0).double()
        return mask_BP if self.kept_B is None else mask_BP * self.kept_B[:, None]

    def share(self, like: Tensor) -> Tensor:
        """The number of tokens that count, divided by its mean over the micro batches of a step on
        all ranks: a scalar."""
        return like.new_ones(()) if self.weights_2 is None else self.weights_2[1].to(like.dtype)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> EpisodeBatch:
        """The batch on a device."""
        return EpisodeBatch._make(
            None if part is None else part.to(device, non_blocking=non_blocking) for part in self
        )


def at_targets(values_BS: Tensor, targets: Targets) -> Tensor:
    """Return the values at the places where targets are predicted, [B, P]; 0 for padding
    targets."""
    if targets.positions_BP is not None:
        values_BS = values_BS.gather(1, targets.positions_BP)
    return F.pad(values_BS, (0, targets.labels_BS.shape[1] - values_BS.shape[1]))


def at_places(values_BP: Tensor, targets: Targets, length: int) -> Tensor:
    """Values of targets at the places where these are predicted, [B, ``length``], and 0 where no
    target counts."""
    values_BP = values_BP * (targets.mask_BS > 0)
    if targets.positions_BP is None:
        return values_BP
    zeros_BS = values_BP.new_zeros((len(values_BP), length))
    count = targets.positions_BP.shape[1]
    return zeros_BS.scatter_add(1, targets.positions_BP, values_BP[:, :count])
