"""Triton kernel of rotary position embedding: it writes the packed output of the projection to
queries, keys and values, or its gradient.

A row is one head of one token, and its D channels are contiguous. So a number of heads that is no
power of two costs nothing, and a thread reads eight channels at once. Both channels of a pair are
in one thread. Tokens are addressed by 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.magnitude_triton import magnitude_bits, raise_largest

PAIRS, WARPS = 1024, 4
"""Pairs of channels and warps of a program: eight pairs a thread."""


@triton.jit
def _copied(source, target, first, valid, COUNT: tl.constexpr, LARGEST: tl.constexpr):
    """Copies COUNT channels of rows, from a channel on; returns the largest magnitude's bits."""
    WIDTH: tl.constexpr = triton.next_power_of_2(COUNT)
    channel = tl.arange(0, WIDTH)[None, :]
    inside = valid & (channel < COUNT)
    x = tl.load(source + first + channel, inside, 0.0)
    tl.store(target + first + channel, x, inside)
    return tl.max(magnitude_bits(x), 1) if LARGEST else tl.zeros([x.shape[0]], tl.int32)


@triton.jit
def _apart(words, KIND: tl.constexpr):
    """The two numbers of KIND in words of twice their size, the first in the low bits."""
    bits: tl.constexpr = KIND.primitive_bitwidth
    half = tl.core.get_int_dtype(bits, False)
    return (
        words.to(half).to(KIND, bitcast=True),
        (words >> bits).to(half).to(KIND, bitcast=True),
    )


@triton.jit
def _together(first, second):
    """Words of two numbers; the inverse of :func:`_apart`."""
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
    """Rotates the first 2 * HALF channels of rows, by the opposite angles to go back; returns the
    largest magnitude's bits of each row. A table has the angle of both channels of a pair."""
    WIDTH: tl.constexpr = triton.next_power_of_2(HALF)
    kind: tl.constexpr = target.dtype.element_ty
    pair = tl.arange(0, WIDTH)[None, :]
    inside = valid & (pair < HALF)
    if INTERLEAVED:
        # A pair is one word, so that no channel moves to another thread.
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
    # Rounded as queries and keys are.
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
    """Rotates a block of rows of a sample's HEADS heads, or copies them where HALF is 0; channels
    after those that are rotated are copied if COPIED."""
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
    """Writes heads of queries, keys, values and gates into rows of ``target``: each query's head
    with its gate, then all of keys, then all of values. Programs of one head's kind follow those of
    another. In a forward pass heads are in ``target``, and only rotated channels are written."""
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
    """Rotates queries and keys that are in ``target`` where they are; with values back, from
    anywhere to there. See ``rope.py``."""
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
