"""Objective of reinforcement learning: what the output head computes for a micro batch of
completions, in training and when recording log-probabilities before it.

Shapes: B completions of a micro batch, S positions of the model's input, P positions that predict a
target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.apps.reinforcement.episodes import EpisodeBatch, at_places, at_targets
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.head import TokenNumbers, token_numbers
from megatron.apps.reinforcement.losses import (
    VALUE_LOSS,
    DrawnTokens,
    loss_weights,
    pair_losses,
    policy_losses,
    sampling_numbers,
)
from megatron.apps.reinforcement.values import with_value_head
from megatron.config import RunConfig
from megatron.engine.train_engine import ModelEngine
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure, ModelSpec
from megatron.parallel.loss_head import HeadInput, Targets

HeadNumbers = Callable[[HeadInput, float], TokenNumbers]
"""Function that computes log-probabilities and entropies of a head's targets at a temperature."""


def with_reinforcement(
    spec: ModelSpec, config: RunConfig, numbers: HeadNumbers = token_numbers
) -> ModelSpec:
    """Return the model specification with the loss of ``--rl`` for :class:`EpisodeBatch`. Batches
    of other types keep their evaluation."""
    options = config.section(ReinforcementConfig)
    if options.has_values:
        spec = with_value_head(spec, config.model, options)
    weights = loss_weights(options)
    others = {name: weight for name, weight in spec.losses.items() if name != LM_LOSS}
    objective = ReinforcementObjective(options, weights, numbers)
    return dataclasses.replace(
        spec,
        begin=partial(_begin, spec.begin, objective),
        losses={**weights, **others},
        no_perplexity=spec.no_perplexity | frozenset(weights),
    )


def of_texts(spec: ModelSpec) -> ModelSpec:
    """Return a model specification that accepts :class:`EpisodeBatch` and reads its completions,
    without a loss of its own."""
    return dataclasses.replace(spec, begin=lambda batch: spec.begin(batch.answers))


def _begin(
    begin: Callable[[Any], LayerState], objective: ReinforcementObjective, batch: Any
) -> LayerState:
    """Return the model's initial state for a micro batch."""
    if not isinstance(batch, EpisodeBatch):
        return begin(batch)
    bound = dataclasses.replace(objective, batch=batch)
    return begin(batch.answers).changed(objective=bound, batch=batch)


@dataclass(frozen=True)
class ReinforcementObjective:
    """Loss of a micro batch of completions.

    Attributes:
        losses: see :class:`~megatron.parallel.loss_head.Objective`.
        numbers: function that computes log-probabilities and entropies.
    """

    options: ReinforcementConfig
    losses: Mapping[str, float]
    numbers: HeadNumbers
    batch: EpisodeBatch | None = None

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        assert self.batch is not None
        numbers = self.numbers(inputs, self.options.temperature)
        kind = numbers.log_probs_BP.dtype
        tokens = tokens_of(numbers, inputs.targets, self.batch)
        if self.options.rl == "online-dpo":
            better_N = better_of(tokens)
            losses = pair_losses(self.options, tokens, better_N)
        else:
            losses = policy_losses(self.options, tokens)
        losses |= sampling_numbers(tokens)
        return {name: losses[name].to(kind) for name in self.losses if name != VALUE_LOSS}


def tokens_of(numbers: TokenNumbers, targets: Targets, batch: EpisodeBatch) -> DrawnTokens:
    """Return the tokens of a micro batch, in float64: log-probabilities of completions are large
    and differ by small amounts."""
    whole = targets.whole or targets
    mask_BP = batch.counted(whole)
    log_probs_BP = numbers.log_probs_BP.double()

    def at(values_BS: Tensor | None) -> Tensor | None:
        return None if values_BS is None else at_targets(values_BS, whole).double() * mask_BP

    old_BP, sampled_BP = at(batch.old_BS), at(batch.sampled_BS)
    advantages_BP = at(batch.advantages_BS)
    assert sampled_BP is not None and advantages_BP is not None
    return DrawnTokens(
        log_probs_BP,
        numbers.entropies_BP.double(),
        mask_BP,
        advantages_BP,
        log_probs_BP.detach() if old_BP is None else old_BP,
        sampled_BP,
        at(batch.reference_BS),
        batch.share(log_probs_BP),
    )


def better_of(tokens: DrawnTokens) -> Tensor:
    """Return the index (0 or 1) of the completion with the larger sum of advantages in each pair,
    [N]. Ties give 0."""
    first_N, second_N = tokens.advantages_BS.sum(1).view(-1, 2).unbind(1)
    return (second_N > first_N).long()


class TokenRecord(NamedTuple):
    """Log-probabilities and values of the tokens of a micro batch, without gradients, [B, S].
    Positions without a target are 0.

    Attributes:
        log_probs_BS: log-probabilities, float64.
        values_BS: the value head's predictions before each token, float64; None without one.
    """

    log_probs_BS: Tensor
    values_BS: Tensor | None


@torch.no_grad()
def token_records(
    engine: ModelEngine,
    batches: Sequence[EpisodeBatch],
    temperature: float,
    values: bool = False,
    numbers: HeadNumbers = token_numbers,
) -> list[TokenRecord]:
    """Compute the log-probabilities of micro batches under an engine's weights and, with
    ``values``, the predictions of its value head. Collective: every rank must call it. Pipeline
    stages without the output head return an empty list."""
    measure = _Recorder(temperature=temperature, values=values, numbers=numbers)
    engine.prepare_evaluation()
    measured: list[Any] = engine.backend.evaluate(iter(batches), len(batches), measure) or []
    return [TokenRecord(*record) for record in measured]


@dataclass(frozen=True)
class _Recorder(Measure):
    """Measure that yields the values of a :class:`TokenRecord` instead of scalars."""

    names: tuple[str, ...] = ()
    take: Any = None
    temperature: float = 1.0
    values: bool = False
    numbers: HeadNumbers = token_numbers
    kept: list[tuple[Tensor, Targets]] = dataclasses.field(default_factory=list)
    losses: dict[str, float] = dataclasses.field(default_factory=dict)

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        log_probs_BP = self.numbers(inputs, self.temperature).log_probs_BP
        self.kept[:] = [(log_probs_BP, inputs.targets.whole or inputs.targets)]
        return {}

    def start(self, begin: LayerState) -> LayerState:
        return begin.changed(objective=self)

    def of(self, state: LayerState, batch: Any) -> Any:
        log_probs_BP, targets = self.kept.pop()
        length = batch.tokens_BS.shape[1]
        values_BS = None
        if self.values:
            assert state.pooled is not None
            values_BS = at_places(state.pooled.double(), targets, length)
        return at_places(log_probs_BP.double(), targets, length), values_BS
