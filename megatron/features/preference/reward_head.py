"""Head and loss of a reward model.

Shapes: B micro batch, S sequence (a rank's slice in sequence parallelism), H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from megatron.config import ModelConfig
from megatron.model.embedding import precise
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.layers import WholeLinear
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel

REWARD_HEAD = "score"
"""Canonical name of the reward layer."""


class RewardHead(WholeLinear):
    """Linear layer that maps the hidden state of a text's last token to its reward."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        init = initial(model)
        super().__init__(model.hidden_size, 1, bias=False, init=init, tp=tp)

    def forward(self, state: LayerState) -> LayerState:  # type: ignore[override]
        """Map hidden states [B, S, H] to a value for every token, [B, S, 1]. If there are targets,
        which are at the last tokens, compute the losses of pairs of texts instead."""
        if state.targets is None:
            return state.with_hidden(self.tp.whole_sequence(super().forward(state.hidden)))
        last_B1 = state.targets.positions_BP
        assert last_B1 is not None and last_B1.shape[1] == 1, "a reward is that of a last token"
        x_BPH, targets = state.targets.taken(state.hidden, self.tp)
        reward_BP = self.tp.whole_part(super().forward(x_BPH))[..., 0]
        # Only one context-parallel rank has the last token.
        reward_BP = reward_BP.masked_fill(targets.mask_BS == 0, 0.0)
        reward_B = targets.gathered(reward_BP, self.tp.context)[:, 0]
        margin_B = getattr(state.batch, "margin_R", None)
        for name, loss in reward_losses(reward_B, margin_B).items():
            state = state.with_loss(name, loss)
        return state


REWARD_LOSS = "reward loss"
REWARD_LOSSES = {
    REWARD_LOSS: 1.0, "rewards/chosen": 0.0, "rewards/rejected": 0.0, "rewards/margins": 0.0,
    "rewards/accuracies": 0.0,
}  # fmt: skip
"""Loss of a reward model, and its metrics, as means over pairs."""


def reward_losses(reward_B: Tensor, margin_B: Tensor | None = None) -> dict[str, Tensor]:
    """Return the values of :data:`REWARD_LOSSES`, float32 or float64, for pairs of texts, of which
    the first is the better one. The loss is -log sigmoid of the difference of rewards (Ouyang et
    al. 2022, equation 1). A margin, if given, is subtracted from the difference (Touvron et al.
    2023, equation 2); ``margin_B`` has it at both texts of a pair."""
    better, worse = precise(reward_B).view(-1, 2).unbind(1)
    difference = better - worse
    wanted = difference if margin_B is None else difference - margin_B[0::2]
    right = (difference > 0).to(difference.dtype)
    seen = [each.detach() for each in (better, worse, difference, right)]
    numbers = (-F.logsigmoid(wanted), *seen)
    return {name: each.mean() for name, each in zip(REWARD_LOSSES, numbers, strict=True)}


def with_rewards(spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """Return the model with a reward layer added at its end."""
    return replace(
        spec,
        layers=partial(_rated_layers, spec, model),
        losses=REWARD_LOSSES,
        no_perplexity=frozenset(REWARD_LOSSES),
        head_parts=("output_layer.", f"{REWARD_HEAD}."),
    )


def _rated_layers(spec: ModelSpec, model: ModelConfig, tp: TensorParallel) -> list[LayerSpec]:
    return [*spec.layers(tp), LayerSpec(REWARD_HEAD, partial(RewardHead, model, tp))]
