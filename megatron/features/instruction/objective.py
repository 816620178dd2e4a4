"""Training on instructions and answers: the weighting of a step's loss, the number of predicted
tokens, and noise on the embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron.config import ConfigError, RunConfig
from megatron.features.instruction.batches import example_lengths
from megatron.features.instruction.flags import InstructionConfig
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import EmbeddingNoise, LayerState
from megatron.model.spec import Measure, ModelSpec
from megatron.parallel.cross_entropy import (
    BestTokens,
    LogitChunks,
    chunked_losses,
    linear_cross_entropy,
)
from megatron.parallel.loss_head import HeadInput

ACCURACY = "token accuracy"
"""Share of the tokens in the loss that the model finds most probable."""


def with_instruction(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """A language model trained as the flags of instruction data say, and evaluated with its token
    accuracy. Raises ConfigError if that is to be logged next to the losses of a teacher."""
    flags = config.section(InstructionConfig)
    replaced = next(filter(None, (section.replaces_losses for section in config.sections)), None)
    if replaced is not None and flags.log_token_accuracy:
        raise ConfigError(
            f"{replaced} computes losses of its own, without --log-token-accuracy: leave it out"
        )
    if replaced is None or flags.sft_loss_weights != "micro-batches":
        spec = replace(spec, evaluated=EVALUATION, no_perplexity=frozenset({ACCURACY}))
    if flags.sft_loss_weights != "micro-batches" or flags.log_token_accuracy:
        objective = ResponseLoss(flags.log_token_accuracy)
        begin = _with_objective(spec.begin, objective)
        spec = replace(spec, begin=begin, losses=objective.losses)
    if flags.neftune_noise_alpha is not None:
        noise = _with_noise(spec.begin, flags.neftune_noise_alpha, config.model.seq_length)
        spec = replace(spec, begin=noise, draws=spec.draws or bool(flags.neftune_noise_alpha))
    return spec


class CountingChunks(LogitChunks):
    """Chunks whose second number is how many of the tokens whose mask is not 0 are the most
    probable ones; the logits are computed once."""

    def losses(self) -> tuple[Tensor, ...]:
        self._best = BestTokens(self.labels_T, self.work)
        (loss,) = super().losses()
        best_T = self._best.over_ranks(self.first, self.group)
        right_T = best_T == self.targets.labels_BS.flatten()
        return loss, (right_T & (self.mask_T > 0)).sum()

    def logits(self, chunk: slice) -> Tensor:
        logits_CP = super().logits(chunk)
        self._best.add(chunk, logits_CP[:, : self.columns.used])  # before gradients replace them
        return logits_CP


@dataclass(frozen=True)
class ResponseLoss:
    """The cross entropy of the tokens that count, times the weight of a micro batch in its step."""

    accuracy: bool

    @property
    def losses(self) -> Mapping[str, float]:
        return {LM_LOSS: 1.0} | ({ACCURACY: 0.0} if self.accuracy else {})

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        x_BPH, weight_VH, bias_V, targets, head = inputs
        weights_2 = batch.weights_2
        if not self.accuracy:
            loss = linear_cross_entropy(x_BPH, weight_VH, targets, head, bias_V)
            return {LM_LOSS: loss * weights_2[0].to(loss.dtype)}
        loss, correct = chunked_losses(CountingChunks, x_BPH, weight_VH, targets, head, bias_V)
        counted = ((targets.whole or targets).mask_BS > 0).sum().clamp(min=1)
        return {
            LM_LOSS: loss * weights_2[0].to(loss.dtype),
            ACCURACY: (correct / counted * weights_2[1]).to(loss.dtype),
        }


def _evaluated(state: LayerState, batch: Any) -> dict[str, Tensor]:
    assert state.scores is not None and state.targets is not None
    log_probs_BP, correct_BP = state.scores
    targets = state.targets.whole or state.targets
    # What ranks can divide may be more than there are.
    targets = targets.padded(log_probs_BP.shape[1] - targets.mask_BS.shape[1])
    mask_BP = targets.mask_BS.to(log_probs_BP.dtype)
    weight, counted = batch.weights_2
    loss = -(log_probs_BP * mask_BP).sum() / mask_BP.sum().clamp(min=1.0)
    return {
        "loss": loss.double() * weight,
        "weight": weight,
        "correct": correct_BP.sum(),
        "counted": counted,
    }


def _shares(means: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of an evaluation from the means over its micro batches. They do not depend
    on how samples are split into micro batches."""
    return {
        LM_LOSS: means["loss"] / max(means["weight"], 1e-300),
        ACCURACY: means["correct"] / max(means["counted"], 1e-300),
    }


EVALUATION = Measure(
    ("loss", "weight", "correct", "counted"), _evaluated, ends="scores", report=_shares
)


def _with_objective(
    begin: Callable[[Any], LayerState], objective: ResponseLoss
) -> Callable[[Any], LayerState]:
    def started(batch: Any) -> LayerState:
        return begin(batch).changed(objective=objective, batch=batch)

    return started


def _with_noise(
    begin: Callable[[Any], LayerState], alpha: float, longest: int
) -> Callable[[Any], LayerState]:
    def started(batch: Any) -> LayerState:
        state = begin(batch)
        return state.changed(noise=EmbeddingNoise(alpha, longest, example_lengths(batch)))

    return started
