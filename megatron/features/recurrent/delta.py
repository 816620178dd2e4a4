"""Gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), in chunks.

Each head has a state S [D, V]. At each token it decays by a scalar, erases the value stored under
the token's key, and stores a new value there (equation 10): S_t = exp(g_t) S_{t-1} + b_t k_t (v_t -
exp(g_t) S_{t-1}^T k_t)^T, and y_t = S_t^T q_t, where queries and keys are divided by their L2 norms
and queries by the square root of D, as in Qwen3-Next. Within a chunk the updates form a triangular
system (the WY form, section 3.3). Between chunks only states are passed. Everything is computed in
float32, or in float64 for float64 inputs.

Shapes: P pieces of sequences, T tokens of a piece, C chunks, L tokens of a chunk, K query and key
heads, R value heads for each, N = K x R value heads, D key width, V value width, X = P x N.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.features.recurrent.flags import CHUNK
from megatron.features.recurrent.passing import Pieces

_EPSILON = 1e-6
"""Constant added to the squared norms of queries and keys, as in flash-linear-attention."""


def gated_delta_rule(
    q_PTKD: Tensor,
    k_PTKD: Tensor,
    v_PTNV: Tensor,
    logs_PTN: Tensor,
    beta_PTN: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [P, T, N, V] in the dtype of ``v_PTNV``, and the states after the last
    token [P, N, D, V], at least in float32.

    Args:
        logs_PTN: logarithm g of the decay at each token, not positive.
        beta_PTN: fraction b of a value that is stored, between 0 and 1.
        starts: bool [P, T], tokens before which the state is reset to zero; None for no resets.
        state: state before the first token, [P, N, D, V]; None for zeros.
    """
    pieces, length, heads, width = v_PTNV.shape
    chunk = min(chunk, length)
    chunks = _chunks(q_PTKD, k_PTKD, v_PTNV, logs_PTN, beta_PTN, starts, chunk)
    x = [each.flatten(1, 3) for each in chunks]
    w_CXLD, u_CXLV, k_CXLD, q_CXLD, scores_CXLL, through_CX = x
    if state is None:
        state = w_CXLD.new_zeros(pieces, heads, q_PTKD.shape[-1], width)
    state_XDV = state.to(w_CXLD.dtype).flatten(0, 1)
    taken_CXLV, states_CXDV, last_XDV = _Scan.apply(w_CXLD, u_CXLV, k_CXLD, through_CX, state_XDV)
    flat = [each.flatten(0, 1) for each in (q_CXLD, states_CXDV, scores_CXLL, taken_CXLV)]
    y_CXLV = torch.baddbmm(torch.bmm(flat[0], flat[1]), flat[2], flat[3])
    y_CPNLV = y_CXLV.unflatten(0, (-1, pieces, heads))
    y_PTNV = y_CPNLV.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return y_PTNV.to(v_PTNV.dtype), last_XDV.unflatten(0, (pieces, heads))


def passed_delta_rule(
    q_PTKD: Tensor,
    k_PTKD: Tensor,
    v_PTNV: Tensor,
    logs_PTN: Tensor,
    beta_PTN: Tensor,
    pieces: Pieces,
) -> Tensor:
    """Return the outputs [P, T, N, V] of :func:`gated_delta_rule` for pieces of sequences.
    ``pieces`` (:mod:`~megatron.features.recurrent.passing`) has their document boundaries, and
    passes the states from piece to piece.

    The final state and the outputs of a piece are affine in its initial state: a matrix times the
    state, plus the result for a zero state. Matrix and result are computed together, with D
    additional columns of values, which are zeros and whose initial state is the identity matrix."""
    inputs = logs_PTN, beta_PTN, pieces.starts
    if pieces.context.size == 1:
        return gated_delta_rule(q_PTKD, k_PTKD, v_PTNV, *inputs)[0]
    width, value_width = q_PTKD.shape[-1], v_PTNV.shape[-1]
    kind = torch.promote_types(v_PTNV.dtype, torch.float32)
    unit_DD = torch.eye(width, dtype=kind, device=v_PTNV.device)
    first = F.pad(unit_DD, (0, value_width)).expand(len(v_PTNV), v_PTNV.shape[2], -1, -1)
    more = F.pad(v_PTNV.to(kind), (width, 0))
    y, last = gated_delta_rule(q_PTKD, k_PTKD, more, *inputs, first)
    reads_PTND, y_PTNV = y.split([width, value_width], -1)
    factors, addends = last.split([width, value_width], -1)
    state_PNDV = pieces.states_before(factors, addends, torch.matmul)
    y_PNTV = reads_PTND.transpose(1, 2) @ state_PNDV
    return (y_PTNV + y_PNTV.transpose(1, 2)).to(v_PTNV.dtype)


def one_step(
    q_BKD: Tensor, k_BKD: Tensor, v_BNV: Tensor, logs_BN: Tensor, beta_BN: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, N, V] for one token per sample, and the states [B, N, D, V] after
    it."""
    kind = state.dtype
    q_BND, k_BND = (
        _unit(x.to(kind)).repeat_interleave(v_BNV.shape[1] // x.shape[1], 1) for x in (q_BKD, k_BKD)
    )
    state = state * logs_BN.to(kind).exp()[..., None, None]
    remembered_BNV = (state * k_BND[..., None]).sum(-2)
    taken_BNV = (v_BNV.to(kind) - remembered_BNV) * beta_BN.to(kind)[..., None]
    state = state + k_BND[..., None] * taken_BNV[..., None, :]
    y_BNV = (state * (q_BND * q_BND.shape[-1] ** -0.5)[..., None]).sum(-2)
    return y_BNV.to(v_BNV.dtype), state


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


class _Chunks(NamedTuple):
    """Linear maps of the chunks of all pieces, [C, P, K, R, ...]. A chunk changes a state S to
    ``through_C`` S + k^T (u - w S), and its outputs are q S + scores (u - w S)."""

    w_CLD: Tensor
    u_CLV: Tensor
    k_CLD: Tensor
    q_CLD: Tensor
    scores_CLL: Tensor
    through_C: Tensor


def _cut(x: Tensor, chunk: int, kind: torch.dtype) -> Tensor:
    """Reshape [P, T, heads, ...] to [C, P, heads, L, ...], with zeros as padding at the end."""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    cut = x.unflatten(1, (-1, chunk)).transpose(0, 1).transpose(2, 3)
    return cut.to(kind, memory_format=torch.contiguous_format)


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logs: Tensor,
    beta: Tensor,
    starts: Tensor | None,
    chunk: int,
) -> _Chunks:
    kind = torch.promote_types(v.dtype, torch.float32)
    groups = k.shape[2]
    q_CPKLD, k_CPKLD = (_unit(_cut(x, chunk, kind)) for x in (q, k))
    q_CPKLD = q_CPKLD * q_CPKLD.shape[-1] ** -0.5
    v_CPKRLV, logs_CPKRL, beta_CPKRL = (
        _cut(x, chunk, kind).unflatten(2, (groups, -1)) for x in (v, logs, beta)
    )
    sums = logs_CPKRL.cumsum(-1)
    hidden_LL = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    since, until = sums.exp(), (sums[..., -1:] - sums).exp()
    through = since[..., -1]
    if starts is not None:
        hidden, first, last = _borders(starts, chunk)
        hidden_LL = hidden | hidden_LL
        since, until = since * first, until * last
        through = through * first[..., -1]
    decay_LL = (sums[..., :, None] - sums[..., None, :]).masked_fill(hidden_LL, -torch.inf).exp()
    keys = k_CPKLD.transpose(-1, -2)
    keys_q, keys_k = ((x @ keys)[:, :, :, None] for x in (q_CPKLD, k_CPKLD))
    q_CPK1LD, k_CPK1LD = q_CPKLD[:, :, :, None], k_CPKLD[:, :, :, None]
    system = keys_k * (decay_LL * beta_CPKRL[..., None])
    right = torch.cat(
        [k_CPK1LD * (beta_CPKRL * since)[..., None], v_CPKRLV * beta_CPKRL[..., None]], -1
    )
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], -1)
    return _Chunks(
        w, u, k_CPK1LD * until[..., None], q_CPK1LD * since[..., None], keys_q * decay_LL, through
    )


def _borders(starts_PT: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks for the tokens of each chunk, [C, P, 1, 1, ...]: pairs [L, L] in different
    documents, tokens [L] that continue the document before the chunk, and tokens [L] in the same
    document as the chunk's last token."""
    runs_CPL = _cut(starts_PT[:, :, None], chunk, torch.int64)[:, :, 0].cumsum(-1)
    pairs = runs_CPL[..., :, None] != runs_CPL[..., None, :]
    first, last = runs_CPL == 0, runs_CPL == runs_CPL[..., -1:]
    pairs, first, last = (x[:, :, None, None] for x in (pairs, first, last))
    return pairs, first, last


class _Scan(torch.autograd.Function):
    """Scan over chunks. Returns the values u - w S that each chunk stores, the states before each
    chunk, and the state after the last chunk."""

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, u: Tensor, k: Tensor, through: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        taken, states, last = torch.ops.megatron.delta_scan(w, u, k, through, state)
        ctx.save_for_backward(w, k, through, taken, states)
        return taken, states, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.megatron.delta_scan_backward(*ctx.saved_tensors, *grads)


def _scan(
    w_CXLD: Tensor, u_CXLV: Tensor, k_CXLD: Tensor, through_CX: Tensor, state_XDV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    taken_CXLV = torch.empty_like(u_CXLV, memory_format=torch.contiguous_format)
    states_CXDV = state_XDV.new_empty(len(w_CXLD), *state_XDV.shape)
    state = state_XDV
    for c, through_X in enumerate(through_CX):
        states_CXDV[c] = state
        torch.baddbmm(u_CXLV[c], w_CXLD[c], state, alpha=-1, out=taken_CXLV[c])
        state = torch.baddbmm(
            state * through_X[:, None, None], k_CXLD[c].transpose(1, 2), taken_CXLV[c]
        )
    return taken_CXLV, states_CXDV, state


def _scan_backward(
    w: Tensor,
    k: Tensor,
    through: Tensor,
    taken: Tensor,
    states: Tensor,
    taken_grad: Tensor,
    states_grad: Tensor,
    last_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    u_grad = torch.empty_like(taken)
    after = torch.empty_like(states)
    grad = last_grad
    for c in reversed(range(len(w))):
        after[c] = grad
        torch.baddbmm(taken_grad[c], k[c], grad, out=u_grad[c])
        grad = torch.baddbmm(
            torch.addcmul(states_grad[c], grad, through[c][:, None, None]),
            w[c].transpose(1, 2),
            u_grad[c],
            alpha=-1,
        )
    through_grad = (after * states).sum((-1, -2))
    k_grad = taken @ after.transpose(-1, -2)
    w_grad = (u_grad @ states.transpose(-1, -2)).neg_()
    return w_grad, u_grad, k_grad, through_grad, grad


def _shapes(
    w: Tensor, u: Tensor, k: Tensor, through: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return u.new_empty(u.shape), state.new_empty(len(w), *state.shape), torch.empty_like(state)


def _shapes_backward(
    w: Tensor, k: Tensor, through: Tensor, taken: Tensor, states: Tensor, *grads: Tensor
) -> tuple[Tensor, ...]:
    results = w, taken, k, through, states[0]
    return tuple(x.new_empty(x.shape) for x in results)


# Compilers treat these operators as opaque, so that the graph of a block does not grow with the
# number of chunks. torch.library.custom_op would import sympy when a run starts.
_LIBRARY = torch.library.Library("megatron", "FRAGMENT")
_LIBRARY.define(
    "delta_scan(Tensor w, Tensor u, Tensor k, Tensor through, Tensor state) -> "
    "(Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "delta_scan_backward(Tensor w, Tensor k, Tensor through, Tensor taken, Tensor states, "
    "Tensor taken_grad, Tensor states_grad, Tensor last_grad) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("delta_scan", _scan, _device)
    _LIBRARY.impl("delta_scan_backward", _scan_backward, _device)
_LIBRARY.impl("delta_scan", _shapes, "Meta")
_LIBRARY.impl("delta_scan_backward", _shapes_backward, "Meta")
