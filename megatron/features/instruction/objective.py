"""Loss of instruction tuning: weights of micro batches, token accuracy, and embedding noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config import ConfigError, RunConfig
from megatron.features.evaluation.scoring import SCORES, BestTokens, token_scores
from megatron.features.instruction.batches import example_lengths
from megatron.features.instruction.flags import InstructionConfig
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure, ModelSpec
from megatron.parallel.cross_entropy import LogitChunks, chunked_losses, linear_cross_entropy
from megatron.parallel.loss_head import HeadInput
from megatron.parallel.tensor_parallel import TensorParallel

ACCURACY = "token accuracy"
"""Fraction of the tokens in the loss that are the model's most probable prediction."""


def with_instruction(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return the spec with the training loss set by the instruction flags, and with token accuracy
    in evaluations. Raises ConfigError if another feature replaces the losses, and token accuracy
    should be logged."""
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
    """Loss chunks that also count how many of the tokens in the loss are the most probable
    prediction. The logits are computed only once."""

    def losses(self) -> tuple[Tensor, ...]:
        self._best = BestTokens(self.labels_T, self.work)
        (loss,) = super().losses()
        best_T = self._best.over_ranks(self.first, self.group)
        right_T = best_T == self.targets.labels_BS.flatten()
        return loss, (right_T & (self.mask_T > 0)).sum()

    def logits(self, chunk: slice) -> Tensor:
        logits_CP = super().logits(chunk)
        # Must precede the backward pass, whose gradients overwrite the logits.
        self._best.add(chunk, logits_CP[:, : self.columns.used])
        return logits_CP


@dataclass(frozen=True)
class ResponseLoss:
    """Cross entropy of the tokens in the loss, times the weight of the micro batch in its step."""

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
    assert state.targets is not None
    log_probs_BP, correct_BP = token_scores(state)
    targets = state.targets.whole or state.targets
    # Scores may be padded to a number of positions that divides evenly among ranks.
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
    """Convert the means over an evaluation's micro batches to its results, which do not depend on
    how samples are split into micro batches."""
    return {
        LM_LOSS: means["loss"] / max(means["weight"], 1e-300),
        ACCURACY: means["correct"] / max(means["counted"], 1e-300),
    }


EVALUATION = Measure(
    ("loss", "weight", "correct", "counted"), _evaluated, objective=SCORES, report=_shares
)


def _with_objective(
    begin: Callable[[Any], LayerState], objective: ResponseLoss
) -> Callable[[Any], LayerState]:
    def started(batch: Any) -> LayerState:
        return begin(batch).changed(objective=objective, batch=batch)

    return started


class EmbeddingNoise(NamedTuple):
    """Noise on token embeddings in training: uniform between -w and w, where w is ``alpha`` /
    sqrt(tokens x hidden size) (NEFTune, Jain et al. 2023, arXiv:2310.05914, algorithm 1).

    Attributes:
        longest: maximum number of tokens of a sample. Noise is always drawn for this number, so
            that it does not depend on the padding.
        tokens_BS: number of tokens of each token's example, without padding, float32.
    """

    alpha: float
    longest: int
    tokens_BS: Tensor

    def drawn(self, x_BSH: Tensor, seed: int, tp: TensorParallel) -> Tensor:
        """Draw the noise of the embeddings ``x_BSH``, which are this rank's slice in a
        sequence-parallel region. The values do not depend on the parallel layout."""
        random = torch.Generator(x_BSH.device).manual_seed(seed)
        samples, length = self.tokens_BS.shape
        shape = (samples, self.longest, x_BSH.shape[-1])
        draws_BSH = torch.rand(shape, generator=random, device=x_BSH.device)[:, :length]
        width_BS = self.alpha * (self.tokens_BS * shape[-1]).rsqrt()
        draws_BSH, width_BS = (
            tp.own(tp.context.take(each, 1), 1) for each in (draws_BSH, width_BS)
        )
        noise_BSH = (2 * draws_BSH - 1) * width_BS[..., None]
        return noise_BSH.to(x_BSH.dtype)


def _with_noise(
    begin: Callable[[Any], LayerState], alpha: float, longest: int
) -> Callable[[Any], LayerState]:
    def started(batch: Any) -> LayerState:
        state = begin(batch)
        return state.changed(noise=EmbeddingNoise(alpha, longest, example_lengths(batch)))

    return started
