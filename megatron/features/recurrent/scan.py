"""State space model of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), in chunks.

Each head has a state h [D, P] that decays by a scalar at each token, and to which an outer product
is added: h_t = exp(A dt_t) h_{t-1} + dt_t b_t x_t^T, and y_t = c_t^T h_t + skip x_t (equation 11,
listing 1 for the chunks). The heads of a group share the vectors b and c. Within a chunk the
products are those of attention without a softmax. Between chunks only states are passed. Everything
is computed in float32, or in float64 for float64 inputs. The backward pass recomputes the chunks,
so that only the inputs are saved.

Shapes: B samples, S tokens, C chunks, L and M tokens of a chunk, N heads, G groups, R heads of a
group (N = G x R), P head width, D size of the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64
"""Number of tokens in a chunk. Larger chunks cost less between chunks, and more within them."""


def scan(
    x_BSNP: Tensor,
    dt_BSN: Tensor,
    decay_N: Tensor,
    b_BSGD: Tensor,
    c_BSGD: Tensor,
    skip_N: Tensor,
    documents_BS: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, S, N, P] in the dtype of ``x_BSNP``, and the states after the last
    token [B, G, D, R, P].

    Args:
        dt_BSN: steps, positive, float32 or wider.
        decay_N: A of each head, negative.
        documents_BS: document number of each token, which never decreases. States do not pass from
            one document to the next. None for a single document.
        state: state before the first token, [B, G, D, R, P], which the first document continues;
            None for zeros.
    """
    chunk = min(chunk, x_BSNP.shape[1])
    return _Scan.apply(x_BSNP, dt_BSN, decay_N, b_BSGD, c_BSGD, skip_N, documents_BS, state, chunk)


def step(
    x_BNP: Tensor,
    dt_BN: Tensor,
    decay_N: Tensor,
    b_BGD: Tensor,
    c_BGD: Tensor,
    skip_N: Tensor,
    state_BGDRP: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, N, P] for one token per sample, and the states after it."""
    kind, groups = dt_BN.dtype, b_BGD.shape[1]
    x_BGRP = x_BNP.unflatten(1, (groups, -1)).to(kind)
    dt_BGR = dt_BN.unflatten(1, (groups, -1))
    kept_BGR = torch.exp(dt_BGR * decay_N.to(kind).view(groups, -1))
    taken_BGRP = x_BGRP * dt_BGR[..., None]
    state_BGDRP = state_BGDRP * kept_BGR[:, :, None, :, None]
    state_BGDRP = state_BGDRP + b_BGD.to(kind)[..., None, None] * taken_BGRP[:, :, None]
    y_BGRP = (c_BGD.to(kind)[..., None, None] * state_BGDRP).sum(2)
    y_BGRP = y_BGRP + skip_N.to(kind).view(groups, -1, 1) * x_BGRP
    return y_BGRP.flatten(1, 2).to(x_BNP.dtype), state_BGDRP


def reached(
    dt_BSN: Tensor,
    decay_N: Tensor,
    c_BSGD: Tensor,
    state_BGDRP: Tensor,
    continued_BS: Tensor | None,
) -> Tensor:
    """Return the contribution [B, S, N, P] of the states before the first token to the outputs, to
    be added to those of a scan from zeros. ``continued_BS`` is True for tokens in the document to
    which the states belong."""
    kind, (groups, heads) = dt_BSN.dtype, state_BGDRP.shape[1::2]
    kept_BSN = torch.exp(torch.cumsum(dt_BSN * decay_N.to(kind), 1))
    if continued_BS is not None:
        kept_BSN = kept_BSN * continued_BS[..., None]
    from_state = c_BSGD.to(kind).transpose(1, 2) @ state_BGDRP.flatten(3)
    y_BSNP = from_state.transpose(1, 2).unflatten(3, (heads, -1)).flatten(2, 3)
    assert y_BSNP.shape[2] == groups * heads
    return y_BSNP * kept_BSN[..., None]


@dataclass
class _Chunks:
    """Sequence in chunks, with intermediate results of the forward and backward pass.

    Attributes:
        taken_BCGLRP: dt x, the vectors that are added to the states.
        decay_BCGRLM: decay of the contribution of token M until token L of the same chunk.
        to_end_BCGLR, from_start_BCGLR: decay from a token to the end of its chunk, and from the
            start of its chunk to the token.
        through_BCGR: decay over a whole chunk.
    """

    x_BCGLRP: Tensor
    dt_BCGLR: Tensor
    b_BCGLD: Tensor
    c_BCGLD: Tensor
    taken_BCGLRP: Tensor
    decay_BCGRLM: Tensor
    to_end_BCGLR: Tensor
    from_start_BCGLR: Tensor
    through_BCGR: Tensor

    @classmethod
    def of(
        cls, x: Tensor, dt: Tensor, decay_N: Tensor, b: Tensor, c: Tensor,
        documents: Tensor | None, chunk: int,
    ) -> _Chunks:  # fmt: skip
        kind, groups = dt.dtype, b.shape[2]
        x_BCGLRP, b_BCGLD, c_BCGLD = (_cut(each.to(kind), chunk, groups) for each in (x, b, c))
        dt_BCGLR = _cut(dt, chunk, groups)
        b_BCGLD, c_BCGLD = b_BCGLD.squeeze(4), c_BCGLD.squeeze(4)
        rates_GR = decay_N.to(kind).view(groups, -1)
        sums_BCGLR = torch.cumsum(dt_BCGLR * rates_GR[:, None], 3)
        sums_BCGRL = sums_BCGLR.transpose(3, 4)
        later_LM = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
        last_BCG1R = sums_BCGLR[..., -1:, :]
        to_end, from_start = torch.exp(last_BCG1R - sums_BCGLR), torch.exp(sums_BCGLR)
        through = torch.exp(last_BCG1R.squeeze(3))
        hidden = later_LM
        if documents is not None:
            ids_BCL = _padded(documents, chunk, replicate=True).unflatten(1, (-1, chunk))
            hidden = later_LM | (ids_BCL[..., :, None] != ids_BCL[..., None, :])[:, :, None, None]
            last_BC = ids_BCL[..., -1]
            before_BC = torch.cat([ids_BCL[:, :1, 0], last_BC[:, :-1]], 1)
            at = (slice(None), slice(None), None, slice(None), None)
            to_end = to_end * (ids_BCL == last_BC[..., None])[at]
            from_start = from_start * (ids_BCL == before_BC[..., None])[at]
            through = through * (before_BC == last_BC)[..., None, None]
        logs = sums_BCGRL[..., :, None] - sums_BCGRL[..., None, :]
        decay = logs.masked_fill_(hidden, float("-inf")).exp_()
        taken = x_BCGLRP * dt_BCGLR[..., None]
        return cls(x_BCGLRP, dt_BCGLR, b_BCGLD, c_BCGLD, taken, decay, to_end, from_start, through)

    def states(self, start_BGDRP: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the contributions of tokens to the state at the end of their chunk [B, C, G, L, R,
        P], the states before each chunk, [B, C, G, D, X] with X = R x P, and the state after the
        last chunk."""
        ending_BCGLRP = self.taken_BCGLRP * self.to_end_BCGLR[..., None]
        added_BCGDX = self.b_BCGLD.mT @ ending_BCGLRP.flatten(4)
        state = torch.zeros_like(added_BCGDX[:, 0])
        if start_BGDRP is not None:
            state = start_BGDRP.to(state.dtype).flatten(3)
        before = []
        for kept_BGX, added_BGDX in zip(self.kept, added_BCGDX.unbind(1), strict=True):
            before.append(state)
            state = torch.addcmul(added_BGDX, state, kept_BGX)
        return ending_BCGLRP, torch.stack(before, 1), state

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Decay over each chunk, expanded to the elements of the states, [B, G, 1, X]."""
        width = self.x_BCGLRP.shape[-1]
        return self.through_BCGR.repeat_interleave(width, -1)[..., None, :].unbind(1)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor,
        documents: Tensor | None, start: Tensor | None, chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(x, dt, decay, b, c, skip, documents, start)
        ctx.chunk = chunk
        parts = _Chunks.of(x, dt, decay, b, c, documents, chunk)
        _, before_BCGDX, final_BGDX = parts.states(start)
        scores_BCG1LM = (parts.c_BCGLD @ parts.b_BCGLD.mT).unsqueeze(3)
        mixed = parts.decay_BCGRLM.mul_(scores_BCG1LM)
        y_BCGLRP = (mixed @ parts.taken_BCGLRP.transpose(3, 4)).transpose(3, 4)
        passed = (parts.c_BCGLD @ before_BCGDX).view_as(parts.x_BCGLRP)
        y_BCGLRP = torch.addcmul(y_BCGLRP, passed, parts.from_start_BCGLR[..., None])
        rates = skip.to(dt.dtype).view(b.shape[2], 1, -1, 1)
        y_BCGLRP = torch.addcmul(y_BCGLRP, parts.x_BCGLRP, rates)
        final_BGDRP = final_BGDX.unflatten(-1, parts.x_BCGLRP.shape[-2:])
        return _joined(y_BCGLRP, x), final_BGDRP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, decay, b, c, skip, documents, start = ctx.saved_tensors
        grad_y, grad_final = grads
        groups, rates = b.shape[2], decay.to(dt.dtype).view(b.shape[2], 1, -1)
        parts = _Chunks.of(x, dt, decay, b, c, documents, ctx.chunk)
        ending, before_BCGDX, _ = parts.states(start)
        g_BCGLRP = _cut(grad_y.to(dt.dtype), ctx.chunk, groups)
        of_taken, of_sums, of_b, of_c = _gradients_within(parts, g_BCGLRP)
        # Gradients through the outputs that depend on the states before each chunk.
        leaving = (g_BCGLRP * parts.from_start_BCGLR[..., None]).flatten(4)
        of_c += leaving @ before_BCGDX.mT
        of_before = parts.c_BCGLD.mT @ leaving
        of_sums += (leaving * (parts.c_BCGLD @ before_BCGDX)).view_as(g_BCGLRP).sum(-1)
        # Gradients of the states, from the last chunk to the first.
        of_state, of_added, of_through = grad_final.to(dt.dtype).flatten(3), [], []
        for kept, reading, state in zip(
            reversed(parts.kept), reversed(of_before.unbind(1)), reversed(before_BCGDX.unbind(1)),
            strict=True,
        ):  # fmt: skip
            of_added.append(of_state)
            of_through.append((of_state * state).sum(2))
            of_state = torch.addcmul(reading, of_state, kept)
        of_added_BCGDX = torch.stack(of_added[::-1], 1)
        of_through_BCGX = torch.stack(of_through[::-1], 1)
        of_last = of_through_BCGX.unflatten(-1, g_BCGLRP.shape[-2:]).sum(-1) * parts.through_BCGR
        # Gradients through the contributions of tokens to the state at the end of their chunk.
        of_ending = (parts.b_BCGLD @ of_added_BCGDX).view_as(g_BCGLRP)
        of_b += ending.flatten(4) @ of_added_BCGDX.mT
        of_taken = torch.addcmul(of_taken, of_ending, parts.to_end_BCGLR[..., None])
        of_to_end = (of_ending * ending).sum(-1)
        of_sums -= of_to_end
        of_sums[..., -1, :] += of_last + of_to_end.sum(3)
        of_logs_BCGLR = of_sums.flip(3).cumsum(3).flip(3)
        of_dt = torch.addcmul((of_taken * parts.x_BCGLRP).sum(-1), of_logs_BCGLR, rates)
        of_x = of_taken * parts.dt_BCGLR[..., None] + g_BCGLRP * skip.to(dt.dtype).view(
            groups, 1, -1, 1
        )
        of_decay = (of_logs_BCGLR * parts.dt_BCGLR).sum((0, 1, 3)).flatten()
        of_skip = (g_BCGLRP * parts.x_BCGLRP).sum((0, 1, 3, 5)).flatten()
        return (
            _joined(of_x, x),
            _joined(of_dt.unsqueeze(-1), dt).squeeze(-1),
            of_decay.to(decay.dtype),
            _joined(of_b.unsqueeze(4), b),
            _joined(of_c.unsqueeze(4), c),
            of_skip.to(skip.dtype),
            None,
            None if start is None else of_state.view_as(start).to(start.dtype),
            None,
        )


def _gradients_within(parts: _Chunks, g_BCGLRP: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``taken``, of the sums of logarithms, and of b and c, through the
    outputs that depend on earlier tokens of the same chunk."""
    g_BCGRLP, scores = g_BCGLRP.transpose(3, 4), parts.c_BCGLD @ parts.b_BCGLD.mT
    by_mixed = g_BCGRLP @ parts.taken_BCGLRP.transpose(3, 4).mT
    by_mixed *= parts.decay_BCGRLM
    of_scores_BCGLM = by_mixed.sum(3)
    mixed = parts.decay_BCGRLM.mul_(scores.unsqueeze(3))
    of_taken = (mixed.mT @ g_BCGRLP).transpose(3, 4)
    of_logs = by_mixed.mul_(scores.unsqueeze(3))
    of_sums = (of_logs.sum(-1) - of_logs.sum(-2)).transpose(3, 4).contiguous()
    of_b, of_c = of_scores_BCGLM.mT @ parts.c_BCGLD, of_scores_BCGLM @ parts.b_BCGLD
    return of_taken, of_sums, of_b, of_c


def _padded(x: Tensor, chunk: int, replicate: bool = False) -> Tensor:
    """Pad dimension 1 to a multiple of the chunk size. The added tokens have no effect."""
    short = -x.shape[1] % chunk
    if not short:
        return x
    if replicate:
        return torch.cat([x, x[:, -1:].expand(-1, short)], 1)
    return F.pad(x, (*(0, 0) * (x.dim() - 2), 0, short))


def _cut(x: Tensor, chunk: int, groups: int) -> Tensor:
    """Reshape [B, S, N, ...] to [B, C, G, L, R, ...]."""
    cut = _padded(x, chunk).unflatten(2, (groups, -1)).unflatten(1, (-1, chunk))
    return cut.transpose(2, 3).contiguous()


def _joined(x: Tensor, like: Tensor) -> Tensor:
    """Reshape [B, C, G, L, R, ...] to the shape and dtype of a tensor [B, S, N, ...]."""
    joined = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, : like.shape[1]]
    return joined.to(like.dtype)
