"""On-policy distillation: a student generates completions, and learns the teacher's distribution at
each of their tokens (Agarwal et al. 2024, arXiv:2306.13649, algorithm 1 with lambda = 1).

Shapes: as in head.py; N vocabulary columns of this rank that student and teacher share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.apps.reinforcement.episodes import EpisodeBatch
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.held_out import answered
from megatron.apps.reinforcement.loop import ReinforcementLoop
from megatron.config import RunConfig
from megatron.features.distillation.divergence import TeacherHead, TopTokens, teacher_chunks
from megatron.features.distillation.objective import TaughtBatch
from megatron.features.distillation.teacher import FoundTeacher, find_teacher
from megatron.features.evaluation.evaluator import Evaluator
from megatron.kernels.sums import rows_of_work
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.cross_entropy import ChunkedCrossEntropy, LogitChunks
from megatron.parallel.loss_head import HeadInput, LossHead, Targets
from megatron.parallel.mesh import Group, Mesh
from megatron.parallel.softmax_loss import capped, of_ranks, slices
from megatron.training.context import RunContext

DISTILLATION_LOSS = "distillation loss"


def with_texts_taught(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return the model specification with a loss that measures how far completions diverge from the
    teacher."""
    options = config.section(ReinforcementConfig)
    others = {name: weight for name, weight in spec.losses.items() if name != LM_LOSS}

    def begin(batch: Any) -> LayerState:
        if not isinstance(batch, TaughtBatch):
            return spec.begin(getattr(batch, "answers", batch))
        assert not isinstance(batch.teacher, TopTokens)
        texts, answers = batch.batch, batch.batch.answers
        if texts.kept_B is not None:
            answers = answers._replace(loss_mask_BS=answers.loss_mask_BS * texts.kept_B[:, None])
        objective = OnPolicyDistillation(options, texts, batch.teacher)
        return spec.begin(answers).changed(objective=objective, batch=texts)

    losses = {DISTILLATION_LOSS: 1.0, **others}
    numbers = spec.no_perplexity | {DISTILLATION_LOSS}
    return replace(spec, begin=begin, losses=losses, no_perplexity=numbers)


def start_teacher(context: RunContext, loop: ReinforcementLoop) -> None:
    """Add the teacher to the training steps and evaluations of a run."""
    source = find_teacher(context.config, context.run.tokenizer.vocab_size)
    teacher = TextTeacher(source, context.mesh, context.device)
    teacher.answer = partial(answered, loop)
    context.engine.teach = teacher.teach


class TextTeacher:
    """Teacher of a run. It computes hidden states for the student's completions. Raises
    CheckpointError if its weights are damaged.

    Attributes:
        answer: function that generates completions for micro batches of prompts, for
            evaluations.
    """

    answer: Callable[[Sequence[Any]], list[EpisodeBatch]] | None = None

    def __init__(self, found: FoundTeacher, mesh: Mesh, device: torch.device) -> None:
        self._teacher = found.start(mesh, device)

    @property
    def engine(self) -> Evaluator:
        """Evaluation engine that runs the teacher."""
        return self._teacher.engine

    def teach(self, batches: Iterator[Any], count: int) -> Iterator[TaughtBatch]:
        """Yield ``count`` micro batches with the teacher's hidden states. If the batches are
        prompts, as in an evaluation, ``answer`` generates completions first."""
        own = list(islice(batches, count))
        if self.answer is not None and not isinstance(own[0], EpisodeBatch):
            own = self.answer(own)
        return self._taught([each.to(self.engine.device, non_blocking=True) for each in own])

    def _taught(self, batches: Sequence[EpisodeBatch]) -> Iterator[TaughtBatch]:
        taught = self._teacher.teach((each.answers for each in batches), len(batches))
        for batch, of_answers in zip(batches, taught, strict=True):
            yield of_answers._replace(batch=batch)


@dataclass(frozen=True)
class OnPolicyDistillation:
    """Loss of a micro batch of completions: their divergence from the teacher.

    Attributes:
        losses: see :class:`~megatron.parallel.loss_head.Objective`.
    """

    options: ReinforcementConfig
    batch: EpisodeBatch
    teacher: TeacherHead | None

    @property
    def losses(self) -> Mapping[str, float]:
        return {DISTILLATION_LOSS: 1.0}

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        assert self.teacher is not None
        x_BPH, weight_VH, bias_V, targets, head = inputs
        terms = Divergence(self.options.jsd_beta, self.options.temperature)
        loss = linear_divergence(x_BPH, weight_VH, targets, head, self.teacher, terms, bias_V)
        return {DISTILLATION_LOSS: loss * self.batch.share(loss)}


class Divergence(NamedTuple):
    """Parameters of the generalized Jensen-Shannon divergence of a student p from a teacher q,
    whose logits are divided by a temperature.

    With the mixture m = (1 - beta) p + beta q, the divergence is beta KL(q || m) + (1 - beta) KL(p
    || m). At beta = 0 it is KL(q || p), and at beta = 1 KL(p || q)."""

    beta: float
    temperature: float


def linear_divergence(
    x_BPH: Tensor,
    weight_VH: Tensor,
    targets: Targets,
    head: LossHead,
    teacher: TeacherHead,
    terms: Divergence,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Return the mean divergence over the tokens whose mask is 1, or zero without any. The
    result is a scalar, float32 or float64, equal on every rank. Vocabulary entries that only the
    student or only the teacher has are ignored."""
    make = partial(_Divergences, targets=targets, head=head, teacher=teacher, terms=terms)
    (loss,) = ChunkedCrossEntropy.apply(
        x_BPH, weight_VH, bias_V, head, make, torch.is_grad_enabled()
    )
    return loss if targets.whole is None else head.tp.context.sum(loss)


class _Divergences(LogitChunks):
    """Divergence of a micro batch and its gradients, computed in chunks."""

    def __init__(
        self,
        x_TH: Tensor,
        weight_PH: Tensor,
        bias_P: Tensor | None,
        targets: Targets,
        head: LossHead,
        needs: Any,
        teacher: TeacherHead,
        terms: Divergence,
    ) -> None:
        super().__init__(x_TH, weight_PH, bias_P, targets, head, needs, compiled=False)
        self._terms, self._teaching = terms, teacher_chunks(teacher, self.chunks)

    def losses(self) -> tuple[Tensor]:
        """Return the mean over the tokens in the loss, and accumulate the gradients."""
        total = torch.zeros((), dtype=self.work, device=self.x_TH.device)
        gradients = self.x_needs or self.weight_needs or self.bias_needs
        for chunk in self.chunks:
            mask_C = self.mask_T[chunk]
            logits_CP, taught_CP = self.logits(chunk), self._teaching.logits(chunk)
            pair = _Pair(self, logits_CP, taught_CP)
            total += pair.divergence_C @ mask_C
            if gradients:
                pair.write_gradient(logits_CP)
                self.multiply(chunk, logits_CP, mask_C)
        return (total / self.counted,)

    def pair_of(
        self, at: slice, logits_CP: Tensor, taught_CP: Tensor, common: int
    ) -> tuple[Tensor, Tensor]:
        """Return the student's and the teacher's softcapped logits divided by the temperature, for
        the rows ``at`` and the first ``common`` columns, [R, N] each."""
        caps = self.columns.softcap, self._teaching.columns.softcap
        student_RN, teacher_RN = (
            capped(each[at, :common].to(self.work), cap) / self._terms.temperature
            for each, cap in zip((logits_CP, taught_CP), caps, strict=True)
        )
        return student_RN, teacher_RN

    @property
    def common(self) -> int:
        """Number of vocabulary columns of this rank that student and teacher share."""
        return min(self.columns.used, self._teaching.columns.used)


class _Pair:
    """Divergence of each token in one chunk of the student's and the teacher's logits."""

    def __init__(self, run: _Divergences, logits_CP: Tensor, taught_CP: Tensor) -> None:
        self._run, self._beta, self._common = run, run._terms.beta, run.common
        self._logits, count = (logits_CP, taught_CP), len(logits_CP)
        # Student's largest logit and sum of exp(logit - largest), then the same for the teacher.
        known_4C = logits_CP.new_zeros((4, count), dtype=run.work)
        known_4C[::2] = torch.finfo(run.work).min
        for at in self._rows():
            for place, soft_RN in enumerate(run.pair_of(at, *self._logits, self._common)):
                known_4C[2 * place, at] = largest_R = soft_RN.amax(-1)
                known_4C[2 * place + 1, at] = (soft_RN - largest_R[:, None]).exp().sum(-1)
        self._norms_2C = _log_sums(run.group, known_4C)
        # KL(p || m) and KL(q || m) of each token.
        self._parts_2C = known_4C.new_zeros((2, count))
        for at in self._rows():
            p_RN, q_RN, m_RN = self._log_probs(at)
            for place, log_RN in enumerate((p_RN, q_RN)):
                self._parts_2C[place, at] = (log_RN.exp() * (log_RN - m_RN)).sum(-1)
        if run.group.size > 1:
            parts = of_ranks(run.group, *self._parts_2C)
            self._parts_2C = torch.stack([part_NC.sum(0) for part_NC in parts])
        of_student, of_teacher = self._parts_2C
        beta = self._beta
        if beta in (0.0, 1.0):
            self.divergence_C = of_teacher if beta == 0.0 else of_student
        else:
            self.divergence_C = beta * of_teacher + (1 - beta) * of_student

    def _rows(self) -> Iterator[slice]:
        if not self._common:
            return iter(())
        return slices(len(self._logits[0]), rows_of_work(self._common))

    def _log_probs(self, at: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of the student, the teacher and their mixture m, [R, N] each."""
        pair = self._run.pair_of(at, *self._logits, self._common)
        p_RN, q_RN = (
            soft_RN - norm_C[at, None] for soft_RN, norm_C in zip(pair, self._norms_2C, strict=True)
        )
        if self._beta == 1.0:
            return p_RN, q_RN, q_RN
        if self._beta == 0.0:
            return p_RN, q_RN, p_RN
        shares = torch.tensor([1 - self._beta, self._beta], dtype=p_RN.dtype).log().tolist()
        return p_RN, q_RN, torch.logaddexp(p_RN + shares[0], q_RN + shares[1])

    def write_gradient(self, logits_CP: Tensor) -> None:
        """Overwrite the student's logits in place with the gradient of each token's divergence."""
        for at in self._rows():
            p_RN, q_RN, m_RN = self._log_probs(at)
            if self._beta == 0.0:
                grad_RN = p_RN.exp() - q_RN.exp()
            else:
                # Gradient of sum p log(p / m) with respect to a logit. The terms from m, which also
                # depends on p, cancel.
                grad_RN = p_RN.exp() * (p_RN - m_RN - self._parts_2C[0, at, None])
                grad_RN *= 1.0 if self._beta == 1.0 else 1 - self._beta
            grad_RN /= self._run._terms.temperature
            softcap = self._run.columns.softcap
            if softcap is not None:
                wide_RN = capped(logits_CP[at, : self._common].to(grad_RN.dtype), softcap)
                grad_RN *= 1.0 - (wide_RN / softcap).square_()
            logits_CP[at, : self._common] = grad_RN
        logits_CP[:, self._common :] = 0.0


def _log_sums(group: Group, known_4C: Tensor) -> Tensor:
    """Return the log-sum-exp over the vocabulary of all ranks, [2, C], for student and teacher.
    ``known_4C`` contains, for each model, the largest logit and the sum of exponentials on this
    rank."""
    if group.size > 1:
        parts = of_ranks(group, *known_4C)
    else:
        parts = tuple(row_C[None] for row_C in known_4C)
    sums = []
    for largest_NC, total_NC in (parts[:2], parts[2:]):
        largest_C = largest_NC.amax(0)
        total_C = (total_NC * (largest_NC - largest_C).exp()).sum(0)
        sums.append(largest_C + total_C.log())
    return torch.stack(sums)
