"""Memory of one rank, in bytes: weights, gradients, optimizer state, buffers and activations, and
the state that is offloaded to host memory or files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megatron.apps.planning.activations import WHOLE, Activations, activation_bytes, expert_bytes
from megatron.apps.planning.parameters import (
    RankShare,
    adapter_parameters,
    linear_parameters,
    rank_shares,
)
from megatron.config import ModelConfig
from megatron.config.engine import bucket_size
from megatron.config.layouts import BOTH_WAYS, WEIGHTS_LATER, Layout
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.adapters.nf4 import bytes_of
from megatron.features.context.costs import GROUPS_ON_DEVICE, offloads
from megatron.features.context.flags import LongContextConfig
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.low_bit_states.stored_states import state_formats
from megatron.features.tiers.rules import ADAM, moved_bytes

REDUCE_BUCKET = 500_000_000  # elements, for DeepSpeed's engine without ZeRO

LIVE_PARAMETERS = 1_000_000_000  # elements: DeepSpeed's stage3_max_live_parameters


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter in a rank's share of the model, at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state_bytes(layout: Layout, replicas: int | None = None, states: float = 2.0) -> StateBytes:
    """Return the bytes per parameter at the optimizer step of DeepSpeed 0.19's engine. ``states``
    is the number of optimizer states of 4 bytes (2 for Adam). ``replicas`` is the number of ranks
    with the same parameters (default: all data-parallel ranks).

    ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5) partitions optimizer state at stage
    1, gradients at 2 and parameters at 3. DeepSpeed also copies the gradients that a rank updates
    to float32: all of them at stage 3, one bucket at a time in fp16 (:func:`bucket_bytes`). It
    keeps separate master weights even for float32. At stage 0, bf16 runs as autocast over float32
    weights, and fp16 replaces gradients one by one by their float32 copies.
    """
    data, zero = replicas or layout.replicas, layout.running_zero
    if zero == 0:
        half = layout.precision == "fp16"
        more = 4 * states
        return StateBytes(2.0, 4.0, 4.0 + more) if half else StateBytes(4.0, 4.0, more)
    size = 4 if layout.precision == "fp32" else 2
    accumulated = 4 if layout.grads_in_fp32 else size
    if layout.states is not None:
        gradients = accumulated / (data if zero == 2 else 1)
        return StateBytes(2.0, gradients, state_formats(layout.states).bytes / data)
    copied = 4 if zero == 3 else 0
    # At stage 1 gradients are unpartitioned until they are reduced.
    gradients = (accumulated + copied) / (1 if zero == 1 else data)
    return StateBytes(size / (data if zero == 3 else 1), gradients, (4 + 4 * states) / data)


def bucket_bytes(layout: Layout) -> int:
    """Return the total bytes per element of all gradient buckets of a rank.

    At stage 0 the bucket is a copy of the accumulated gradients. At stage 1 the gradients
    themselves are in buckets, and one more bucket receives data. Stage 2 fills one bucket while two
    are being reduced. In fp16 one bucket is copied to float32 for its update, after the others are
    freed.
    """
    zero = layout.running_zero
    if layout.replicas == 1 and zero < 3:
        # A single replica does not reduce gradients, so they need no bucket. In fp16 DeepSpeed
        # flattens copies.
        copied = zero and layout.precision == "fp16" and not layout.grads_in_fp32
        return 6 if copied and layout.offload_optimizer is None else 0
    size = 4 if layout.precision == "fp32" or layout.autocast else 2
    if layout.grads_in_fp32 and zero != 2:
        size = 4
    return size * (3 if zero == 2 else 1)


def buffer_bytes(layout: Layout, parameters: float, trained: float | None = None) -> float:
    """Return the bytes of temporary buffers in a step, with DeepSpeed's default sizes: gradient
    buckets for ``trained`` parameters (default: all), the gathered parameters of stage 3, and
    autocast's 16-bit weights at stage 0, which are freed before the buckets are allocated."""
    reduced = parameters if trained is None else trained
    most = bucket_size(int(reduced)) if layout.zero else REDUCE_BUCKET
    buckets = float(min(most, reduced) * bucket_bytes(layout))
    if layout.zero == 0:
        if layout.precision == "fp16" and not layout.grads_in_fp32:
            return 0.0  # smaller than the later float32 copies of the gradients
        return max(buckets, 2.0 * parameters if layout.autocast else 0.0)
    if layout.zero == 3 and layout.replicas > 1:
        return buckets + min(LIVE_PARAMETERS, parameters) * (4 if layout.precision == "fp32" else 2)
    return buckets


def float8_bytes(model: ModelConfig, layout: Layout, blocks: int) -> float:
    """Return the bytes of the FP8 weights of ``blocks`` blocks. At stage 3 they are 0, because
    weights are cast when used."""
    kept = layout.running_zero < 3
    return float(blocks * linear_parameters(model, layout.tensor)) if kept else 0.0


def stages_in_flight(layout: Layout, rank: int, micro_batches: int) -> int:
    """Return the maximum number of stage inputs that a pipeline rank stores at once.

    With p ranks, rank r and v stages per rank, 1F1B stores p - r, and the interleaved schedule 2 (p
    - r - 1) + (v - 1) p + 1, or all with a single group of micro batches (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2). This project's DualPipeV stores 2 p + 1 on every rank. ZB-H1
    stores p, including those that are kept for weight gradients."""
    p, v, m = layout.pipeline, layout.chunks, micro_batches
    if p == 1:
        return 1
    if layout.schedule in ("1f1b", "zbh1"):
        return min(m, p - rank if layout.schedule == "1f1b" else p)
    if layout.schedule in BOTH_WAYS:
        return min(2 * m, 2 * p + 1)
    return m * v if m == p else min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step. ``host`` is for activations and optimizer state in
    host memory, and ``disk`` for optimizer state in files. The other fields are device memory."""

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    host: float = 0.0
    disk: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the device."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.buffers + self.activations

    def with_optimizer_elsewhere(self, layout: Layout) -> Memory:
        """Return the memory after offloading the optimizer state and the gradients of its partition
        to host memory or files. From stage 2, the device has gradients one bucket at a time."""
        moved = moved_bytes(layout, self.optimizer / ADAM)
        gradients, buffers = self.gradients, self.buffers
        if layout.zero > 1:
            size = 4 if layout.precision == "fp32" else 2
            elements = gradients / state_bytes(layout).gradients
            bucket = min(bucket_size(int(elements)), elements)
            gradients, buffers = 0.0, max(buffers, 2.0 * size * bucket)
        elsewhere = replace(self, optimizer=0.0, gradients=gradients, buffers=buffers)
        if layout.offload_optimizer == "nvme":
            return replace(elsewhere, disk=moved)
        return replace(elsewhere, host=self.host + moved)


def rank_memory(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    micro_batches: int,
    share: RankShare,
    adapters: AdapterConfig | None = None,
    saving: LongContextConfig = WHOLE,
    states: float = 2.0,
) -> Memory:
    """Return the memory of a rank with this share of a complete model, whose vocabulary is padded
    for the layout. ``saving`` has the options for long sequences. With ``adapters``, only adapters
    have gradients and optimizer state (``states`` numbers per parameter), and with ``--qlora`` the
    blocks' linear layers are in 4 bits. The adapters' small activations are not counted."""
    kept = {
        lengths: activation_bytes(model, layout, micro_batch, lengths, saving)
        for lengths in dict.fromkeys(chain(*share.stages))
    }
    flying = stages_in_flight(layout, share.rank, micro_batches)
    more, full = 0.0, layout.recompute in ("uniform", "block")
    if any(share.routed) and not model.part(ExpertsConfig).idle:
        more = expert_bytes(model, layout, micro_batch)
    stage, host = max(
        _stage_bytes(
            layout, [kept[lengths] for lengths in blocks], float8, flying,
            0.0 if full else more * routed, saving,
        )
        for blocks, float8, routed in zip(
            share.stages, share.float8, share.routed or (0,) * len(share.stages), strict=True
        )
    )  # fmt: skip
    if full and layout.schedule in WEIGHTS_LATER:
        # Recomputed inputs of linear layers are kept, with their output gradients, until the weight
        # gradients are computed.
        waiting = min(share.rank + 1, micro_batches) * (share.rank > 0 or layout.chunks > 1)
        whole = replace(layout, recompute=None)
        stage += waiting * max(
            sum(activation_bytes(model, whole, micro_batch, n, saving).block for n in lengths)
            for lengths in share.stages
        )
    first = 0.0
    if share.first:
        first = -(-flying // layout.chunks) * kept[share.stages[0][0]].embedding
    # Loss and logits are freed before the first block is recomputed.
    top = max(each.recomputed + each.working for each in kept.values()) + max(0.0, more) * full
    if share.last:
        head = kept[share.stages[-1][-1]]
        top = max(top, head.head + head.loss)
    state, added = state_bytes(layout, None, states), 0.0
    of_experts = state_bytes(layout, layout.replicas // layout.expert_axis, states)
    if adapters is not None:
        added = sum(share.blocks) * adapter_parameters(model, adapters, layout.tensor)
    parameters, trained = share.parameters + added, added or share.parameters
    weights = state.weights * parameters + float8_bytes(model, layout, sum(share.float8))
    weights += (of_experts.weights - state.weights) * share.experts
    trained_experts = 0 if added else share.experts
    if adapters is not None and adapters.qlora:
        # 4-bit weights are never partitioned: every data-parallel rank stores all of them.
        linear = sum(share.blocks) * linear_parameters(model, layout.tensor)
        weights += bytes_of(linear, adapters.qlora_double_quant) - state.weights * linear
    return Memory(
        weights,
        state.gradients * trained + (of_experts.gradients - state.gradients) * trained_experts,
        state.optimizer * trained + (of_experts.optimizer - state.optimizer) * trained_experts,
        buffer_bytes(layout, parameters, trained),
        stage + first + top,
        host,
    )


def _stage_bytes(
    layout: Layout,
    blocks: Sequence[Activations],
    float8: int,
    flying: int,
    more: float,
    saving: LongContextConfig,
) -> tuple[float, float]:
    """Return the bytes of a stage's micro batches in flight, in device and in host memory.
    ``float8`` is the number of its blocks that compute in FP8, and ``more`` the extra bytes for
    experts."""
    shared = {(kept.masks, kept.hidden) for kept in blocks}
    total = sum(kept.block for kept in blocks) + more
    total -= sum(kept.float8 for kept in blocks) * (len(blocks) - float8) / len(blocks)
    count = offloads(saving, layout, len(blocks))
    host = flying * total * count / len(blocks)
    on_device = flying * total - host + total * min(count, GROUPS_ON_DEVICE) / len(blocks)
    on_device += flying * sum(masks for masks, _ in shared)
    full = layout.recompute in ("uniform", "block")
    host += max(x.chunks for x in blocks) if full else flying * sum(x.chunks for x in blocks)
    # An output that was sent is kept until its gradient arrives.
    return on_device + flying * blocks[-1].hidden * (layout.pipeline > 1), host


def peak_memory(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    micro_batches: int,
    float8: range | None = None,
    adapters: AdapterConfig | None = None,
    saving: LongContextConfig = WHOLE,
) -> Memory:
    """Return the memory of the rank that needs the most. ``float8`` is an argument of
    :func:`rank_shares`."""
    memories = [
        rank_memory(model, layout, micro_batch, micro_batches, share, adapters, saving)
        for share in rank_shares(model, layout, float8=float8)
    ]
    return max(memories, key=lambda memory: memory.total)
