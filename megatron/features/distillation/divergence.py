"""Distillation loss of a linear output head: cross entropy, plus the divergence of its softmax over
the vocabulary from a teacher's.

As in Hinton et al. 2015, a temperature softens both distributions. Their divergence is multiplied
by its square, so that the size of gradients hardly depends on it. As in cross_entropy.py, only one
chunk of each model's logits is in memory, and the forward pass computes the gradients.

Shapes: as in cross_entropy.py; V columns of a rank that are tokens, N of them that the teacher also
has, K most probable tokens of a teacher, R rows that are processed at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.kernels.sums import rows_of_work
from megatron.parallel.collectives import start_gather_sequence
from megatron.parallel.cross_entropy import ChunkedCrossEntropy, LogitChunks
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.softmax_loss import capped, of_ranks, slices

DEVICE_WORK_BYTES = 64 * 2**20
"""Size in bytes of a float32 tensor of rows that are processed at a time on GPUs."""


class TeacherHead(NamedTuple):
    """Teacher's output head with its input.

    Attributes:
        x_BPH: the teacher's hidden states at the student's targets, sliced as the student's are.
        weight_VH: this rank's rows of the teacher's output weight. They begin at the same token as
            the student's.
        bias_V: bias of the logits, or None.
    """

    x_BPH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    head: LossHead


class TopTokens(NamedTuple):
    """Most probable tokens of a teacher, with their probabilities at its temperature.

    Attributes:
        tokens_BPK: token ids, int32.
        probs_BPK: their probabilities, float32.
        rest_BP: total probability of all other tokens, float32.
    """

    tokens_BPK: Tensor
    probs_BPK: Tensor
    rest_BP: Tensor


@dataclass(frozen=True)
class Distilling:
    """Weights of the minimised loss: alpha x cross entropy + beta x temperature^2 x divergence."""

    alpha: float = 1.0
    beta: float = 1.0
    temperature: float = 1.0


class DistilledLosses(NamedTuple):
    """Mean losses over the tokens whose mask is 1, as scalars, float32 or float64. ``divergence``
    includes the factor temperature^2. Only ``total`` has a gradient."""

    total: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def linear_distillation(
    x_BSH: Tensor,
    weight: Tensor,
    targets: Targets,
    head: LossHead,
    teacher: TeacherHead | TopTokens,
    terms: Distilling,
    bias: Tensor | None = None,
) -> DistilledLosses:
    """Return the mean cross entropy of the targets, the mean Kullback-Leibler divergence KL(teacher
    || student) at the targets, and their weighted sum. The other arguments are those of
    :func:`linear_cross_entropy`. The result is the same on every rank.

    If the teacher has more tokens than the student, only shared tokens count, with renormalised
    probabilities. All tokens that :class:`TopTokens` omits count as a single token."""
    make = partial(_Distilled, targets=targets, head=head, teacher=teacher, terms=terms)
    losses = ChunkedCrossEntropy.apply(x_BSH, weight, bias, head, make, torch.is_grad_enabled())
    return DistilledLosses(*map(head.tp.context.sum, losses))


@torch.no_grad()
def linear_top_tokens(teacher: TeacherHead, count: int, temperature: float) -> TopTokens:
    """Return the ``count`` most probable tokens of a teacher at each position of the whole
    sequence. The result is the same on every rank."""
    run, whole = teacher_chunks(teacher), teacher.head.tp.context.whole
    parts = [_top_of_chunk(run, chunk, count, temperature) for chunk in run.chunks]
    shape = (teacher.x_BPH.shape[0], -1)
    wholes = (torch.cat(part).unflatten(0, shape) for part in zip(*parts, strict=True))
    return TopTokens(*(whole(each, 1) for each in wholes))


def _top_of_chunk(run: LogitChunks, chunk: slice, count: int, temperature: float) -> TopTokens:
    logits_CN = run.logits(chunk)[:, : run.columns.used]
    soft_CN = capped(logits_CN.to(run.work), run.columns.softcap) / temperature
    rows, used = soft_CN.shape
    values_CK = soft_CN.new_full((rows, count), -torch.inf)
    tokens_CK = torch.zeros_like(values_CK, dtype=torch.int64)
    top = soft_CN.topk(min(count, used), dim=-1)
    values_CK[:, : top.values.shape[1]] = top.values
    tokens_CK[:, : top.values.shape[1]] = top.indices + run.first
    group = run.group
    if group.size > 1:
        # Exchange the values as integers (their bits), so that one collective suffices. float64
        # represents every float32 exactly.
        bits = values_CK.double().view(torch.int64)
        both = of_ranks(group, bits.flatten(), tokens_CK.flatten())
        bits, tokens_CK = (x.unflatten(1, (rows, count)).transpose(0, 1).flatten(1) for x in both)
        values_CK = bits.view(torch.float64).to(values_CK.dtype)
        values_CK, places_CK = values_CK.topk(count, dim=-1)
        tokens_CK = tokens_CK.gather(1, places_CK)
    weights_CN = soft_CN.sub_(values_CK[:, :1]).exp_()
    here_CK = (tokens_CK >= run.first) & (tokens_CK < run.first + used) & values_CK.isfinite()
    taken_CN = torch.zeros_like(weights_CN)
    columns_CK = (tokens_CK - run.first).masked_fill(~here_CK, 0)
    if used:
        taken_CN.scatter_add_(1, columns_CK, here_CK.to(taken_CN.dtype))
    rest_C = weights_CN.masked_fill_(taken_CN > 0, 0.0).sum(-1)
    if group.size > 1:
        dist.all_reduce(rest_C, group=group.handle)
    top_CK = (values_CK - values_CK[:, :1]).exp()
    total_C = top_CK.sum(-1) + rest_C
    probs_CK = top_CK / total_C[:, None]
    return TopTokens(tokens_CK.int(), probs_CK.float(), (rest_C / total_C).float())


class _Distilled(LogitChunks):
    """Computation of a micro batch's losses and their gradients, chunk by chunk."""

    def __init__(
        self,
        x_TH: Tensor,
        weight_PH: Tensor,
        bias_P: Tensor | None,
        targets: Targets,
        head: LossHead,
        needs: Sequence[bool],
        teacher: TeacherHead | TopTokens,
        terms: Distilling,
    ) -> None:
        super().__init__(x_TH, weight_PH, bias_P, targets, head, needs, compiled=False)
        self.terms, self.teacher = terms, teacher
        self._teaching: LogitChunks | None = None
        if isinstance(teacher, TeacherHead):
            self._teaching = teacher_chunks(teacher, self.chunks)

    def losses(self) -> DistilledLosses:
        """Return the mean losses over the tokens that count, and accumulate the gradients."""
        zero = torch.zeros((), dtype=self.work, device=self.x_TH.device)
        cross_entropy, divergence = zero, zero.clone()
        gradients = self.x_needs or self.weight_needs or self.bias_needs
        used, terms = self.columns.used, self.terms
        for chunk in self.chunks:
            mask_C, labels_C = self.mask_T[chunk], self.labels_T[chunk]
            logits_CP = self.logits(chunk)
            logits_CP[:, used:] = 0.0
            student = _Student(logits_CP[:, :used], labels_C, self.columns.softcap, terms)
            taught = self._taught(chunk)
            for at in student.rows():
                taught.read(at, student.read(at))
            self._join(student, taught)
            cross_entropy = cross_entropy + student.cross_entropy() @ mask_C
            divergence = divergence + taught.divergence(student) @ mask_C
            if gradients:
                for at in student.rows():
                    student.write(at, taught)
                self.multiply(chunk, logits_CP, mask_C)
        cross_entropy = cross_entropy / self.counted
        divergence = divergence * (terms.temperature**2 / self.counted)
        total = terms.alpha * cross_entropy + terms.beta * divergence
        return DistilledLosses(total, cross_entropy, divergence)

    def _join(self, student: _Student, taught: _Taught) -> None:
        """Combine a chunk's statistics of all vocabulary shards, in one collective."""
        student.sums_3C[2].masked_fill_(student.absent_C, 0.0)
        if self.group.size == 1:
            return
        rows = student.largest_C, *student.sums_3C
        parts = of_ranks(self.group, *rows, *taught.known())
        student.join(parts[: len(rows)])
        taught.join(parts[len(rows) :], student, parts[0])

    def _taught(self, chunk: slice) -> _Taught:
        if self._teaching is not None:
            run = self._teaching
            common = min(run.columns.used, self.columns.used)
            logits_CN = run.logits(chunk)[:, :common]
            return _WholeTeacher(logits_CN, run.columns.softcap, self.terms, self.work)
        assert isinstance(self.teacher, TopTokens)
        tokens_CK, probs_CK, rest_C = (each.flatten(0, 1)[chunk] for each in self.teacher)
        columns_CK = tokens_CK.long() - self.first
        return _TopTeacher(columns_CK, probs_CK.to(self.work), rest_C.to(self.work), self)


def teacher_chunks(teacher: TeacherHead, chunks: list[slice] | None = None) -> LogitChunks:
    """Return the computation of a teacher's logits in the given chunks."""
    x_BPH, weight_VH, bias_V, head = teacher
    if head.tp.split:
        x_BPH = start_gather_sequence(x_BPH, head.tp.group)()
    shape = x_BPH.shape[:2]
    unused = x_BPH.new_zeros(shape, dtype=torch.int64)
    targets, dtype = Targets(unused, unused), weight_VH.dtype
    x_TH = x_BPH.flatten(0, 1).to(dtype)
    if chunks is not None:
        # Set the memory limit so that this head is computed in chunks of the student's size.
        size = chunks[0].stop * len(weight_VH) * weight_VH.element_size()
        head = LossHead(head.vocab_size, head.softcap, size, head.tp)
    run = LogitChunks(x_TH, weight_VH, bias_V, targets, head, compiled=False)
    if chunks is not None:
        run.chunks = chunks
    return run


class _Student:
    """Chunk of the student's logits on this rank, with statistics of each token's softmax:
    ``largest_C``, the largest logit; ``sums_3C``, the sum of exp(logit - largest), the same sum
    with the temperature, and the label's logit."""

    def __init__(
        self, logits_CV: Tensor, labels_C: Tensor, softcap: float | None, terms: Distilling
    ) -> None:
        self.logits_CV, self.softcap, self.terms = logits_CV, softcap, terms
        self.work = torch.promote_types(logits_CV.dtype, torch.float32)
        self.absent_C = (labels_C < 0) | (labels_C >= logits_CV.shape[1])
        self.columns_C = labels_C.masked_fill(self.absent_C, 0)
        count = len(labels_C)
        self.largest_C = logits_CV.new_full((count,), torch.finfo(self.work).min, dtype=self.work)
        self.sums_3C = logits_CV.new_zeros((3, count), dtype=self.work)

    def rows(self) -> Iterator[slice]:
        """Yield slices of rows to process at a time. A rank without vocabulary columns yields
        nothing."""
        count, columns = self.logits_CV.shape
        if not columns:
            return iter(())
        rows = rows_of_work(columns)
        if self.logits_CV.device.type != "cpu":
            rows = max(1, DEVICE_WORK_BYTES // (4 * columns))
        return slices(count, rows)

    def read(self, at: slice) -> Tensor:
        """Compute the statistics of these rows, and return their logits [R, V]."""
        logits_RV = capped(self.logits_CV[at].to(self.work), self.softcap)
        largest_R = self.largest_C[at] = logits_RV.amax(-1)
        shifted_RV = logits_RV - largest_R[:, None]
        total, softened, target = self.sums_3C[:, at]
        softened.copy_((shifted_RV / self.terms.temperature).exp_().sum(-1))
        one = self.terms.temperature == 1.0
        total.copy_(softened if one else shifted_RV.exp_().sum(-1))
        target.copy_(logits_RV.gather(1, self.columns_C[at, None]).squeeze(1))
        return logits_RV

    def join(self, parts: Sequence[Tensor]) -> None:
        """Combine the statistics of all vocabulary shards. ``parts`` are ``largest_C`` and the rows
        of ``sums_3C`` of every rank, [ranks, C] each."""
        largest_TC, total_TC, softened_TC, target_TC = parts
        self.largest_C = largest_TC.amax(0)
        lower_TC = largest_TC - self.largest_C
        self.sums_3C[0] = (total_TC * lower_TC.exp()).sum(0)
        self.sums_3C[1] = (softened_TC * (lower_TC / self.terms.temperature).exp()).sum(0)
        self.sums_3C[2] = target_TC.sum(0)

    def cross_entropy(self) -> Tensor:
        """Return the cross entropy of each token, [C]."""
        return self.largest_C - self.sums_3C[2] + self.sums_3C[0].log()

    def log_total(self) -> Tensor:
        """Return the logarithm of the sum of exp(logit / temperature), [C]."""
        return self.largest_C / self.terms.temperature + self.sums_3C[1].log()

    def write(self, at: slice, taught: _Taught) -> None:
        """Overwrite the logits of these rows with the gradients of their losses."""
        alpha, beta, temperature = self.terms.alpha, self.terms.beta, self.terms.temperature
        logits_RV = capped(self.logits_CV[at].to(self.work), self.softcap)
        total_R1, softened_R1, _ = (sums[at, None] for sums in self.sums_3C)
        shifted_RV = logits_RV - self.largest_C[at, None]
        soft_RV = (shifted_RV / temperature).exp_()
        scale = beta * temperature
        taught.gradient(at, soft_RV, softened_R1, scale)
        if alpha:
            soft_RV += shifted_RV.exp_().mul_(alpha / total_R1)
        at_label_R = (self.absent_C[at].to(self.work) - 1.0) * alpha
        soft_RV.scatter_add_(1, self.columns_C[at, None], at_label_R[:, None])
        if self.softcap is not None:
            soft_RV *= 1.0 - (logits_RV / self.softcap).square_()
        self.logits_CV[at] = soft_RV


class _Taught(Protocol):
    """Teacher's distributions over the vocabulary for the tokens of a chunk."""

    def read(self, at: slice, logits_RV: Tensor) -> None:
        """Compute the statistics of these rows, given the student's logits."""
        ...

    def known(self) -> tuple[Tensor, ...]:
        """Return the statistics of this rank's shard, [C] each, in the working dtype."""
        ...

    def join(self, parts: Sequence[Tensor], student: _Student, largest_TC: Tensor) -> None:
        """Combine the statistics of all vocabulary shards. ``parts`` are each rank's :meth:`known`,
        [ranks, C], and ``largest_TC`` the student's largest logits on each rank."""
        ...

    def divergence(self, student: _Student) -> Tensor:
        """Return KL(teacher || student) of each token, [C]."""
        ...

    def gradient(self, at: slice, soft_RV: Tensor, total_R1: Tensor, scale: float) -> None:
        """Replace the student's exponentials ``soft_RV``, whose sum is ``total_R1``, by ``scale`` x
        (student's probability - teacher's)."""
        ...


class _WholeTeacher:
    """Teacher given by all its logits."""

    def __init__(
        self, logits_CN: Tensor, softcap: float | None, terms: Distilling, work: torch.dtype
    ) -> None:
        self.logits_CN, self.softcap, self.work = logits_CN, softcap, work
        self.temperature = terms.temperature
        count = len(logits_CN)
        self.largest_C = logits_CN.new_full((count,), torch.finfo(work).min, dtype=work)
        # Sums of exp(logit - largest), and of the same times the difference to the student's logit.
        self.sums_2C = logits_CN.new_zeros((2, count), dtype=work)

    def _softened(self, at: slice) -> Tensor:
        # Not in place: ``to`` returns the tensor itself if it already has the working dtype.
        return capped(self.logits_CN[at].to(self.work), self.softcap) / self.temperature

    def read(self, at: slice, logits_RV: Tensor) -> None:
        common = self.logits_CN.shape[1]
        if not common:
            return
        soft_RN = self._softened(at)
        difference_RN = soft_RN - logits_RV[:, :common] / self.temperature
        largest_R = self.largest_C[at] = soft_RN.amax(-1)
        weights_RN = soft_RN.sub_(largest_R[:, None]).exp_()
        self.sums_2C[0, at] = weights_RN.sum(-1)
        self.sums_2C[1, at] = difference_RN.mul_(weights_RN).sum(-1)

    def known(self) -> tuple[Tensor, ...]:
        return self.largest_C, *self.sums_2C

    def join(self, parts: Sequence[Tensor], student: _Student, largest_TC: Tensor) -> None:
        own_TC, *sums_TC = parts
        self.largest_C = own_TC.amax(0)
        factor_TC = (own_TC - self.largest_C).exp()
        for total_C, sum_TC in zip(self.sums_2C, sums_TC, strict=True):
            total_C.copy_((sum_TC * factor_TC).sum(0))

    def divergence(self, student: _Student) -> Tensor:
        total_C, difference_C = self.sums_2C
        return difference_C / total_C - (self.largest_C + total_C.log()) + student.log_total()

    def gradient(self, at: slice, soft_RV: Tensor, total_R1: Tensor, scale: float) -> None:
        soft_RV *= scale / total_R1
        common = self.logits_CN.shape[1]
        weights_RN = self._softened(at).sub_(self.largest_C[at, None]).exp_()
        soft_RV[:, :common] -= weights_RN.mul_(scale / self.sums_2C[0, at, None])


class _TopTeacher:
    """Teacher given by its most probable tokens and the total probability of all others, which
    count as a single token. The result is at most the divergence over all tokens."""

    def __init__(
        self, columns_CK: Tensor, probs_CK: Tensor, rest_C: Tensor, run: _Distilled
    ) -> None:
        self.terms, self.probs_CK, self.rest_C = run.terms, probs_CK, rest_C
        self.here_CK = (columns_CK >= 0) & (columns_CK < run.columns.used)
        self.columns_CK = columns_CK.masked_fill(~self.here_CK, 0)
        # Sums of p x logit / temperature, and of the student's exponentials at other tokens.
        self.sums_2C = probs_CK.new_zeros((2, len(rest_C)))

    def read(self, at: slice, logits_RV: Tensor) -> None:
        here_RK, columns_RK = self.here_CK[at], self.columns_CK[at]
        soft_RV = logits_RV / self.terms.temperature
        product_RK = self.probs_CK[at] * soft_RV.gather(1, columns_RK)
        self.sums_2C[0, at] = product_RK.masked_fill_(~here_RK, 0.0).sum(-1)
        exponentials_RV = soft_RV.sub_(soft_RV.amax(-1, keepdim=True)).exp_()
        self.sums_2C[1, at] = self._others(at, exponentials_RV).sum(-1)

    def _others(self, at: slice, values_RV: Tensor) -> Tensor:
        """Set the values of the teacher's most probable tokens to zero, in place."""
        # Zeros cannot be scattered: tokens of other ranks have column 0, which this rank may need.
        taken_RV = torch.zeros_like(values_RV)
        taken_RV.scatter_add_(1, self.columns_CK[at], self.here_CK[at].to(values_RV.dtype))
        return values_RV.masked_fill_(taken_RV > 0, 0.0)

    def known(self) -> tuple[Tensor, ...]:
        return tuple(self.sums_2C)

    def join(self, parts: Sequence[Tensor], student: _Student, largest_TC: Tensor) -> None:
        product_TC, others_TC = parts
        lower_TC = (largest_TC - student.largest_C) / self.terms.temperature
        self.sums_2C[0] = product_TC.sum(0)
        self.sums_2C[1] = (others_TC * lower_TC.exp()).sum(0)

    def divergence(self, student: _Student) -> Tensor:
        product_C, others_C = self.sums_2C
        log_total_C = student.log_total()
        others_C = others_C.clamp(min=torch.finfo(others_C.dtype).tiny)
        log_others_C = student.largest_C / self.terms.temperature + others_C.log()
        own_C = torch.special.xlogy(self.probs_CK, self.probs_CK).sum(-1)
        own_C = own_C + torch.special.xlogy(self.rest_C, self.rest_C)
        mass_C = self.probs_CK.sum(-1) + self.rest_C
        return own_C - product_C - self.rest_C * log_others_C + mass_C * log_total_C

    def gradient(self, at: slice, soft_RV: Tensor, total_R1: Tensor, scale: float) -> None:
        mass_R1 = (self.probs_CK[at].sum(-1) + self.rest_C[at])[:, None]
        tiny = torch.finfo(soft_RV.dtype).tiny
        rest_R1 = (self.rest_C[at] / self.sums_2C[1, at].clamp(min=tiny))[:, None]
        others_RV = self._others(at, soft_RV.clone())
        soft_RV *= scale * mass_R1 / total_R1
        soft_RV -= others_RV.mul_(scale * rest_R1)
        taken_RK = self.probs_CK[at].masked_fill(~self.here_CK[at], 0.0)
        soft_RV.scatter_add_(1, self.columns_CK[at], taken_RK.mul_(-scale))
