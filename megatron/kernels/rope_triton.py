"""Triton kernel for rotary position embedding. It writes the packed output of the projection
(queries, keys and values), or its gradient.

A kernel row is one head of one token, whose D channels are contiguous. Therefore, head counts that
are not powers of two cost nothing, and a thread reads eight channels at once. The two channels of a
pair are in one thread. Tokens are addressed with 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.magnitude_triton import magnitude_bits, raise_largest

PAIRS, WARPS = 1024, 4
"""Number of channel pairs and of warps per program: eight pairs per thread."""


@triton.jit
def _copied(source, target, first, valid, COUNT: tl.constexpr, LARGEST: tl.constexpr):
    """Copy COUNT channels of each row, starting at ``first``. Return each row's amax as bits."""
    WIDTH: tl.constexpr = triton.next_power_of_2(COUNT)
    channel = tl.arange(0, WIDTH)[None, :]
    inside = valid & (channel < COUNT)
    x = tl.load(source + first + channel, inside, 0.0)
    tl.store(target + first + channel, x, inside)
    return tl.max(magnitude_bits(x), 1) if LARGEST else tl.zeros([x.shape[0]], tl.int32)


@triton.jit
def _apart(words, KIND: tl.constexpr):
    """Split each word into two numbers of type KIND. The first is in the low bits."""
    bits: tl.constexpr = KIND.primitive_bitwidth
    half = tl.core.get_int_dtype(bits, False)
    return (
        words.to(half).to(KIND, bitcast=True),
        (words >> bits).to(half).to(KIND, bitcast=True),
    )


@triton.jit
def _together(first, second):
    """Join pairs of numbers into words. This is the inverse of :func:`_apart`."""
    bits: tl.constexpr = first.dtype.primitive_bitwidth
    half = tl.core.get_int_dtype(bits, False)
    whole = tl.core.get_int_dtype(2 * bits, False)
    low = first.to(half, bitcast=True).to(whole)
    return low | (second.to(half, bitcast=True).to(whole) << bits)


@triton.jit
def _turned(
    source,
    target,
    cos,
    sin,
    valid,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Rotate the first 2 * HALF channels of each row, by the opposite angles if BACK. Return each
    row's amax as bits. The tables contain each pair's angle twice, once per channel."""
    WIDTH: tl.constexpr = triton.next_power_of_2(HALF)
    kind: tl.constexpr = target.dtype.element_ty
    pair = tl.arange(0, WIDTH)[None, :]
    inside = valid & (pair < HALF)
    if INTERLEAVED:
        # A pair is read as one word, so that no channel moves to another thread.
        pairs = tl.pointer_type(tl.core.get_int_dtype(2 * kind.primitive_bitwidth, False))
        angles = tl.pointer_type(tl.uint64)
        source = source.to(pairs, bitcast=True)
        first, second = _apart(tl.load(source + pair, inside, 0), kind)
        c, _ = _apart(tl.load(cos.to(angles, bitcast=True) + pair, inside, 0), tl.float32)
        s, _ = _apart(tl.load(sin.to(angles, bitcast=True) + pair, inside, 0), tl.float32)
    else:
        first = tl.load(source + pair, inside, 0.0)
        second = tl.load(source + HALF + pair, inside, 0.0)
        c = tl.load(cos + pair, inside, 0.0)
        s = tl.load(sin + pair, inside, 0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    # Round cosines and sines to the dtype of queries and keys, as the formula in torch does.
    c, s = c.to(kind).to(tl.float32), s.to(kind).to(tl.float32)
    if BACK:
        s = -s
    one = (first * c - second * s).to(kind)
    two = (second * c + first * s).to(kind)
    if INTERLEAVED:
        tl.store(target.to(pairs, bitcast=True) + pair, _together(one, two), inside)
    else:
        tl.store(target + pair, one, inside)
        tl.store(target + HALF + pair, two, inside)
    bits = tl.zeros([one.shape[0]], tl.int32)
    if LARGEST:
        bits = tl.max(tl.maximum(magnitude_bits(one), magnitude_bits(two)), 1)
    return bits


@triton.jit
def _part(
    block,
    source,
    at_token,
    at_head,
    target,
    to_token,
    to_head,
    cos,
    sin,
    angle_token,
    length,
    largest,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPIED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Rotate a block of rows of a sample's HEADS heads, or copy the rows if HALF is 0. With COPIED,
    the channels after the rotated ones are copied too."""
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    valid = token < length
    source += token * at_token + head * at_head
    target += token * to_token + head * to_head
    bits = tl.zeros([ROWS], tl.int32)
    if HALF:
        angle = token * angle_token
        bits = _turned(
            source, target, cos + angle, sin + angle, valid, HALF, BACK, INTERLEAVED, LARGEST
        )
    if COPIED and 2 * HALF < DIM:
        bits = tl.maximum(bits, _copied(source, target, 2 * HALF, valid, DIM - 2 * HALF, LARGEST))
    if LARGEST:
        raise_largest(largest, bits)


@triton.jit
def _pack(
    q, q_sample, q_token, q_head,
    k, k_sample, k_token, k_head,
    v, v_sample, v_token, v_head,
    gate, gate_sample, gate_token, gate_head,
    target, to_sample, to_token, cos, sin, angle_sample, angle_token, length, largest,
    q_blocks, k_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr, INTERLEAVED: tl.constexpr,
    COPIED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Write the heads of queries, keys, values and gates into rows of ``target``: each query's head
    with its gate, then all keys, then all values. Programs are ordered by the kind of head. In a
    forward pass, the heads are already in ``target``, and only the rotated channels are written."""
    UNIT: tl.constexpr = DIM * (1 + GATED)
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    target += sample * to_sample
    cos += sample * angle_sample
    sin += sample * angle_sample
    if block < q_blocks:
        _part(
            block, q + sample * q_sample, q_token, q_head,
            target, to_token, UNIT, cos, sin, angle_token, length, largest,
            HEADS, DIM, HALF, ROWS, BACK, INTERLEAVED, COPIED, LARGEST,
        )  # fmt: skip
    elif block < q_blocks + k_blocks:
        _part(
            block - q_blocks, k + sample * k_sample, k_token, k_head,
            target + HEADS * UNIT, to_token, DIM, cos, sin, angle_token, length, largest,
            KV_HEADS, DIM, HALF, ROWS, BACK, INTERLEAVED, COPIED, LARGEST,
        )  # fmt: skip
    elif COPIED:
        if block < q_blocks + 2 * k_blocks:
            _part(
                block - q_blocks - k_blocks, v + sample * v_sample, v_token, v_head,
                target + HEADS * UNIT + KV_HEADS * DIM, to_token, DIM,
                cos, sin, angle_token, length, largest,
                KV_HEADS, DIM, 0, ROWS, BACK, INTERLEAVED, COPIED, LARGEST,
            )  # fmt: skip
        elif GATED:
            _part(
                block - q_blocks - 2 * k_blocks, gate + sample * gate_sample, gate_token, gate_head,
                target + DIM, to_token, UNIT, cos, sin, angle_token, length, largest,
                HEADS, DIM, 0, ROWS, BACK, INTERLEAVED, COPIED, LARGEST,
            )  # fmt: skip


def launch(
    q_BSND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor | None,
    gate_BSND: Tensor | None,
    target_BSW: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    largest: Tensor,
) -> None:
    """Rotate queries and keys in place in ``target``. If values are given, run the backward pass
    instead: rotate back, and write gradients with any strides to ``target``. See ``rope.py``."""
    samples, length, heads, width = q_BSND.shape
    kv_heads = k_BSKD.shape[2]
    if not samples * length:
        return
    half, back = cos.shape[-1] // 2, v_BSKD is not None
    rows = max(1, PAIRS // triton.next_power_of_2(half))
    q_blocks, k_blocks = triton.cdiv(length * heads, rows), triton.cdiv(length * kv_heads, rows)
    blocks = q_blocks + k_blocks
    if back:
        blocks += k_blocks + (q_blocks if gate_BSND is not None else 0)
    values = k_BSKD if v_BSKD is None else v_BSKD
    gates = q_BSND if gate_BSND is None else gate_BSND
    gated = target_BSW.shape[-1] > (heads + 2 * kv_heads) * width
    angle_sample = cos.stride(0) if cos.dim() == 4 and cos.shape[0] > 1 else 0
    _pack[(blocks, samples)](
        q_BSND, *q_BSND.stride()[:3], k_BSKD, *k_BSKD.stride()[:3],
        values, *values.stride()[:3], gates, *gates.stride()[:3],
        target_BSW, *target_BSW.stride()[:2], cos, sin, angle_sample, cos.stride(-3),
        length, largest, q_blocks, k_blocks,
        HEADS=heads, KV_HEADS=kv_heads, DIM=width, HALF=half, GATED=gated, ROWS=rows, BACK=back,
        INTERLEAVED=interleaved, COPIED=back, LARGEST=bool(largest.numel()), num_warps=WARPS,
    )  # fmt: skip
