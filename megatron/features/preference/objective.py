"""Training objective of preferences: the tokens that count in a micro batch of answers, their
log-probabilities under the model and its reference, and the loss (losses.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.config import ConfigError, RunConfig
from megatron.engine.train_engine import TrainEngine
from megatron.families import family_of
from megatron.features.evaluation.scoring import TEXT_SCORES
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.preference.log_probs import linear_log_probs
from megatron.features.preference.losses import LOSSES, Answers, loss_weights
from megatron.features.preference.samples import PreferenceBatch
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.loss_head import HeadInput


def with_preference(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return a model that is trained with the loss of ``--preference`` on :class:`PreferenceBatch`.
    Raises ConfigError if its family cannot predict an answer from a prompt."""
    options = config.section(PreferenceConfig)
    if options.preference == "reward":
        return with_pairs_of_texts(spec, config)
    family = family_of(config.model.family)
    if family.context_reader is None:
        raise ConfigError(
            f"--preference {options.preference}: a model of the family {family.name} predicts no "
            "answer from a prompt; train a GPT or a T5"
        )
    weights = loss_weights(options)
    return dataclasses.replace(
        spec,
        begin=partial(_begin, spec, PreferenceObjective(options, weights)),
        losses=weights,
        no_perplexity=frozenset(weights) - {LM_LOSS},
    )


@dataclass(frozen=True)
class PreferenceObjective:
    """Loss of ``batch``, a micro batch of answers. ``answered_RS`` marks the targets that are
    tokens of answers, if the cross entropy also includes prompts.

    Attributes:
        losses: see :class:`Objective`.
    """

    options: PreferenceConfig
    losses: Mapping[str, float]
    batch: PreferenceBatch | None = None
    answered_RS: Tensor | None = None

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        name = self.options.preference
        assert name is not None
        assert self.batch is not None
        together = name == "kto" and self.batch.others_N is None
        scores_RP = _judged_scores(inputs) if together else _scores(inputs)
        scores_RP = inputs.targets.gathered(scores_RP, inputs.head.tp.context)
        targets = inputs.targets.whole or inputs.targets
        # float64, because the log-probabilities of long answers are large, and differ by little.
        answers = self._answers(scores_RP.double(), targets.mask_BS > 0)
        losses = LOSSES[name](self.options, answers)
        return {name: losses[name].to(scores_RP.dtype) for name in self.losses}

    def _answers(self, scores_RP: Tensor, counted_RP: Tensor) -> Answers:
        assert self.batch is not None
        reference_R = self.batch.reference_R
        answered_RP = counted_RP if self.answered_RS is None else self.answered_RS
        text_R, text_tokens_R = scores_RP.sum(1), counted_RP.sum(1)
        if self.batch.others_N is not None:
            text_R = torch.stack((text_R, self.batch.others_N), dim=1).flatten()
            text_tokens_R = text_tokens_R.repeat_interleave(2)
        own_R, tokens_R = text_R, text_tokens_R
        if self.answered_RS is not None:
            own_R, tokens_R = (scores_RP * answered_RP).sum(1), answered_RP.sum(1)
        return Answers(
            own_R,
            tokens_R.clamp(min=1),
            None if reference_R is None else reference_R.double(),
            text_R,
            text_tokens_R,
            self.batch.desirable_R,
        )


def _begin(spec: ModelSpec, objective: PreferenceObjective, batch: PreferenceBatch) -> LayerState:
    """Return the state before the first layer, for a micro batch of answers."""
    answers, answered_RS = batch.answers, None
    with_prompts = objective.options.preference == "orpo"
    if with_prompts and getattr(answers, "positions_BP", None) is not None:
        answers = answers._replace(positions_BP=None)
    state = spec.begin(answers)
    targets = state.targets
    assert targets is not None
    if with_prompts:
        # As in trl, orpo's cross entropy covers prompt and answer, up to the answer's last token.
        answered_RS = targets.mask_BS > 0
        text_RS = targets.mask_BS.flip(1).cummax(1).values.flip(1)
        targets = targets._replace(mask_BS=text_RS)
    bound = dataclasses.replace(objective, batch=batch, answered_RS=answered_RS)
    return state.changed(targets=targets, objective=bound)


def _scores(inputs: HeadInput) -> Tensor:
    return linear_log_probs(
        inputs.x_BPH, inputs.weight_VH, inputs.targets, inputs.head, inputs.bias_V
    )


def _judged_scores(inputs: HeadInput) -> Tensor:
    """Return the log-probabilities of all rows. Every second row only serves kto's reference point.
    It gets no gradient, which saves two of the head's three GEMMs."""
    rows = (_rows(inputs, slice(first, None, 2)) for first in (0, 1))
    judged_NP = _scores(next(rows))
    with torch.no_grad():
        other_NP = _scores(next(rows))
    return torch.stack((judged_NP, other_NP), dim=1).flatten(0, 1)


def _rows(inputs: HeadInput, rows: slice) -> HeadInput:
    targets = inputs.targets
    labels_NP, mask_NP = targets.labels_BS[rows], targets.mask_BS[rows]
    return inputs._replace(
        x_BPH=inputs.x_BPH[rows],
        targets=targets._replace(labels_BS=labels_NP, mask_BS=mask_NP),
    )


def with_pairs_of_texts(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return a reward model that is trained on :class:`PreferenceBatch`. Raises ConfigError if the
    model has no reward head."""
    family = family_of(config.model.family)
    if config.model.head != "reward":
        raise ConfigError(
            f"--preference reward: models of the family {family.name} have no head for rewards; "
            "train a GPT"
        )
    return dataclasses.replace(spec, begin=partial(_begin_pairs, spec))


def _begin_pairs(spec: ModelSpec, batch: PreferenceBatch) -> LayerState:
    return spec.begin(batch.answers).changed(batch=batch)


def compare_ahead(engine: TrainEngine) -> None:
    """Begin every step with a forward pass, without gradients, over the rows of kto's reference
    point, and train only on the other rows. The cost of those rows is then only a third."""
    engine.look_ahead = partial(_compared, engine)


def _compared(
    engine: TrainEngine, batches: Iterator[PreferenceBatch], count: int
) -> Iterator[PreferenceBatch]:
    """Return the next ``count`` micro batches: one step, in which no weights change."""
    step = [next(batches) for _ in range(count)]
    others = (batch._replace(answers=_every_second(batch.answers, 1)) for batch in step)
    with torch.no_grad():
        engine.prepare_evaluation()
        # Pipeline stages without the output head have no result, and do not need one.
        answered: list[Any] = engine.backend.evaluate(others, count, TEXT_SCORES) or [None] * count
    return (
        batch._replace(
            answers=_every_second(batch.answers, 0),
            others_N=None if scores is None else scores[:, 0],
        )
        for batch, scores in zip(step, answered, strict=True)
    )


def _every_second(answers: Any, first: int) -> Any:
    """Return every second row, from ``first`` on, of a batch of the model's family."""
    return answers._make(None if part is None else part[first::2] for part in answers)
