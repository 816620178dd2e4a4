"""Enumerate all layouts for a number of GPUs, estimate their costs, and rank them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import chain
from operator import or_
from typing import Any

from megatron.apps.parity.layouts import flags_for
from megatron.apps.planning.activations import WHOLE
from megatron.apps.planning.memory import Memory, rank_memory
from megatron.apps.planning.parameters import RankShare, rank_shares
from megatron.apps.planning.step_time import (
    Communication,
    Hardware,
    StepTime,
    exposed_on_host,
    step_time,
)
from megatron.config import ModelConfig
from megatron.config.engine import FastPathsConfig
from megatron.config.flags import flag_names
from megatron.config.layouts import Layout, StateDtypes, refusal
from megatron.families import BlockLengths, family_of
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.context.costs import LONG, counts_half, heads_of
from megatron.features.context.flags import LongContextConfig
from megatron.features.experts.costs import with_experts
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.float8.flags import Float8Flags
from megatron.features.float8.linear import Float8
from megatron.features.global_heads.costs import block_kinds, with_global_heads
from megatron.features.latent.costs import with_latents
from megatron.features.recurrent.costs import with_states
from megatron.model.flops import TransformerShape

RECOMPUTED = (
    (None, False), (None, True), ("selective", False), ("selective", True), ("uniform", False)
)  # fmt: skip
"""Types of recomputation to try, each with whether MLP activations are recomputed too."""

PART = 8192  # minimum tokens per rank when context parallelism splits sequences


@dataclass(frozen=True)
class Workload:
    """Training to plan for. The model is complete except for its vocabulary, whose unpadded size is
    ``vocab_size``. Without ``micro_batch_size``, powers of two are tried. With ``adapters`` only
    these are trained. Memory estimates include that, but times are for the whole model."""

    model: ModelConfig
    vocab_size: int
    global_batch_size: int
    micro_batch_size: int | None = None
    precision: str = "bf16"
    grads_in_fp32: bool = False
    states: StateDtypes | None = None
    fast_paths: FastPathsConfig = FastPathsConfig()
    adapters: AdapterConfig | None = None
    teacher: ModelConfig | None = None  # teacher of a run with --kd
    saving: LongContextConfig | None = None  # options for long sequences; None: the search chooses
    optimizer_states: float = 2.0  # optimizer states per weight

    @property
    def float8(self) -> range:
        """Range of the blocks whose linear layers compute in FP8."""
        return Float8Flags.of(self.fast_paths).float8_blocks(len(self.lengths))

    def padded(self, tensor: int) -> ModelConfig:
        """Return the model with its vocabulary padded for ``tensor`` ranks, as in training."""
        return self.model.with_vocabulary(self.vocab_size, tensor)

    @property
    def shape(self) -> TransformerShape:
        """Sizes from which the model's FLOPs are computed."""
        return _shape(self.padded(1))

    @property
    def lengths(self) -> tuple[BlockLengths, ...]:
        """Sequence lengths of each block."""
        return family_of(self.model.family).block_lengths(self.model)

    def flops(self) -> float:
        """Return the model FLOPs of a step, without recomputation. Attention counts all pairs of
        tokens or, for long sequences with causal attention, half of them."""
        causal = counts_half(self.model)
        return self.shape.flops_per_step(self.global_batch_size, causal=causal)

    def hardware_flops(self, recompute: str | None) -> float:
        """Return the FLOPs of a step including the given type of recomputation."""
        shape = self.shape
        again = shape.recomputed_flops_per_token(recompute, causal=counts_half(self.model))
        return self.flops() + self.global_batch_size * shape.seq_length * again


@dataclass(frozen=True)
class Plan:
    """A layout with its estimated costs: memory of the rank that needs the most, bytes that a rank
    sends in a step, and step time. ``saving`` has the options for long sequences."""

    layout: Layout
    micro_batch: int
    memory: Memory
    sent: Communication
    time: StepTime
    saving: LongContextConfig = WHOLE

    @property
    def flags(self) -> list[str]:
        """Training flags for this plan, except the model's."""
        samples = self.micro_batch * self.layout.data * self.layout.micro_batches[0]
        sizes = ["--micro-batch-size", str(self.micro_batch), "--global-batch-size", str(samples)]
        if self.layout.offload_optimizer is not None:
            sizes += ["--deepspeed_config", "OFFLOAD.json"]
        return [*flags_for(self.layout), *sizes, *changed_flags(self.saving)]

    @property
    def rank(self) -> tuple[float, float, tuple[int, ...]]:
        """Sort key, lower is better: time, then memory, then the sizes of the parallel groups."""
        layout = self.layout
        cuts = (
            layout.tensor, layout.pipeline, layout.context, layout.expert, layout.zero,
            layout.sequence,
        )  # fmt: skip
        return self.time.total, self.memory.total, cuts


def changed_flags(config: Any) -> list[str]:
    """Return the flags for those fields of a config dataclass that differ from their defaults."""
    values = [(field, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return list(
        chain.from_iterable(flag_words(f, value) for f, value in values if value != f.default)
    )


def flag_words(field: dataclasses.Field, value: Any) -> list[str]:
    """Return the command-line arguments that set a config field to a value."""
    on, off = flag_names(field)
    if isinstance(value, bool):
        return [on[0] if value and on else str(off)]
    return [on[0], *map(str, value if isinstance(value, tuple) else (value,))]


def estimate(
    work: Workload,
    layout: Layout,
    micro_batch: int,
    hardware: Hardware,
    saving: LongContextConfig | None = None,
) -> Plan:
    """Return the costs of a layout. It must be supported for the workload and contain its number of
    micro batches. ``saving`` has the options for long sequences, by default the workload's."""
    saving = saving or work.saving or WHOLE
    model, (count,) = work.padded(layout.tensor), layout.micro_batches
    # Shares depend on these fields only, so that layouts with equal ones can use a cache.
    cuts = dataclasses.replace(
        Layout(data=layout.expert_axis, expert=layout.expert, expert_tensor=layout.expert_tensor),
        tensor=layout.tensor, pipeline=layout.pipeline, schedule=layout.schedule,
        chunks=layout.chunks, context=layout.context,
    )  # fmt: skip
    shares = _heaviest(model, cuts, work.float8)
    memory = max(
        (
            rank_memory(
                model,
                layout,
                micro_batch,
                count,
                share,
                work.adapters,
                saving,
                work.optimizer_states,
            )  # fmt: skip
            for share in shares
        ),
        key=lambda memory: memory.total,
    )
    time, sent = step_time(model, layout, micro_batch, count, shares, hardware)
    if work.teacher is not None:
        memory, time = _with_teacher(work, work.teacher, layout, memory, time)
    moved = 2 * count * memory.host
    if layout.offload_optimizer is not None:
        # Gradients move to host memory in float32, and weights back in 16 bits.
        moved += memory.optimizer / 2
        memory = memory.with_optimizer_elsewhere(layout)
    time = dataclasses.replace(time, host=exposed_on_host(moved, time, hardware))
    return Plan(layout, micro_batch, memory, sent, time, saving)


def _with_teacher(
    work: Workload, teacher: ModelConfig, layout: Layout, memory: Memory, time: StepTime
) -> tuple[Memory, StepTime]:
    """Add a teacher's forward pass, and its weights on the rank with most of them, which ZeRO 3
    partitions over data-parallel ranks. Memory is infinite if a stage would have no blocks."""
    if teacher.blocks < layout.pipeline * layout.chunks:
        return dataclasses.replace(memory, weights=math.inf), time
    model = teacher.with_vocabulary(teacher.vocabulary.size or work.vocab_size, layout.tensor)
    whole = dataclasses.replace(layout, recompute=None)
    parameters = max(share.parameters for share in rank_shares(model, whole, float8=range(0)))
    element = 4 if layout.precision == "fp32" else 2
    weights = parameters * element / (layout.data if layout.zero == 3 else 1)
    shape = _shape(model)
    shape = dataclasses.replace(shape, seq_length=work.shape.seq_length)
    causal = counts_half(work.model)
    forward = shape.flops_per_step(work.global_batch_size, causal=causal) / 3
    more = forward / work.hardware_flops(layout.recompute)
    return (
        dataclasses.replace(memory, weights=memory.weights + weights),
        dataclasses.replace(time, compute=time.compute * (1 + more)),
    )


def _shape(model: ModelConfig) -> TransformerShape:
    """Return the sizes from which a complete model's FLOPs are computed."""
    shape = with_experts(family_of(model.family).shape(model), model)
    return with_states(with_global_heads(with_latents(shape, model), model), model)


@lru_cache(maxsize=4096)
def _heaviest(model: ModelConfig, layout: Layout, float8: range) -> list[RankShare]:
    return heaviest(rank_shares(model, layout, float8=float8))


def heaviest(shares: Sequence[RankShare]) -> list[RankShare]:
    """Return the pipeline ranks that may need the most of some resource. A rank is dropped if an
    earlier one, which has more micro batches in flight, needs at least as much of everything."""
    kept: list[RankShare] = []
    for share in shares:
        if not any(_covers(other, share) for other in kept):
            kept.append(share)
    return kept


def _covers(a: RankShare, b: RankShare) -> bool:
    return (
        a.parameters >= b.parameters
        and a.experts >= b.experts
        and max(a.routed, default=0) >= max(b.routed, default=0)
        and sum(a.routed) >= sum(b.routed)
        and a.first >= b.first
        and a.last >= b.last
        and _largest_stage(a) >= _largest_stage(b)
        and Counter(chain(*a.stages)) >= Counter(chain(*b.stages))
        # FP8 needs more memory for weights, and mostly less for activations.
        and a.float8 == b.float8
    )


def _largest_stage(share: RankShare) -> Counter[BlockLengths]:
    """Return the maximum number of blocks in one stage, by their sequence lengths."""
    return reduce(or_, map(Counter, share.stages))


def layouts(work: Workload, hardware: Hardware) -> Iterator[tuple[Layout, int]]:
    """Yield every possible layout for the workload, with its micro batch size. Tensor parallelism
    stays within a node, because every layer has exposed collectives (Narayanan et al. 2021, section
    3.2)."""
    assert hardware.gpus
    for tensor in divisors(hardware.gpus):
        if tensor > hardware.gpus_per_node:
            continue
        if not (divides_model(work.model, tensor) and has_float8_widths(work, tensor)):
            continue
        for pipeline in divisors(hardware.gpus // tensor):
            for context, comm in contexts(work, hardware.gpus // tensor // pipeline, tensor):
                data = hardware.gpus // tensor // pipeline // context
                base = Layout(
                    tensor=tensor, pipeline=pipeline, data=data, precision=work.precision,
                    grads_in_fp32=work.grads_in_fp32, states=work.states,
                    float8=bool(work.float8), context=context, comm=comm,
                )  # fmt: skip
                yield from _with_micro_batches(work, base)


def _with_micro_batches(work: Workload, base: Layout) -> Iterator[tuple[Layout, int]]:
    for micro_batch in micro_batch_sizes(work, base.data):
        count = work.global_batch_size // (micro_batch * base.data)
        eager = work.fast_paths.torch_compile == "off"
        for schedule, chunks in schedules(len(work.lengths), base.pipeline, eager):
            each = dataclasses.replace(
                base, schedule=schedule, chunks=chunks, micro_batches=(count,)
            )
            for divided in with_expert_ranks(work.model, each):
                yield from ((layout, micro_batch) for layout in variants(work, divided))


def contexts(work: Workload, ranks: int, tensor: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each context-parallel size at which a rank has at least :data:`PART` tokens, with its
    communication patterns: rings, and all-to-all over heads if there are enough heads."""
    yield 1, ()
    heads = work.model.attention.num_attention_heads // tensor
    length = min(n for block in work.lengths for n in (block.own, block.other or block.own))
    for context in divisors(ranks):
        if context == 1 or length % (2 * context * tensor) or length // context < PART:
            continue
        if work.model.family == "retro":
            continue
        yield context, ()
        if heads % context == 0:
            yield context, ("a2a",)


def savings(work: Workload) -> tuple[LongContextConfig, ...]:
    """Return the options for long sequences to try: the workload's own if given. Otherwise, for
    long sequences, try none, tiled MLPs, then also activations in host memory, then also chunked
    attention with host memory."""
    if work.saving is not None:
        return (work.saving,)
    if work.model.seq_length < LONG or work.model.family != "gpt":
        return (WHOLE,)
    tiled = LongContextConfig(mlp_chunks_for_training=0)
    on_host = dataclasses.replace(tiled, checkpoint_in_cpu=True)
    return WHOLE, tiled, on_host, dataclasses.replace(
        on_host, ds_sequence_parallel_fpdt=True, ds_sequence_parallel_fpdt_offloading=True
    )  # fmt: skip


def with_expert_ranks(model: ModelConfig, base: Layout) -> Iterator[Layout]:
    """Yield the layout with each expert-parallel size that divides the experts of every layer, with
    experts sharded over tensor-parallel ranks like other layers, and with whole experts."""
    part = model.part(ExpertsConfig)
    if part.idle:
        yield base
        return
    for ranks in divisors(math.gcd(*part.layer_experts)):
        for together in (None, 1) if base.tensor > 1 else (None,):
            layout = dataclasses.replace(base, expert=ranks, expert_tensor=together)
            inner, shared = part.moe_ffn_hidden_size, part.moe_shared_expert_intermediate_size
            cut = [(inner or 0) if together is None else 0, shared or 0]
            fits = together is None or ranks == 1 or ranks % base.tensor == 0
            divided = not any(width % base.tensor for width in cut)
            if fits and divided and base.data % layout.expert_axis == 0:
                yield layout


def variants(work: Workload, base: Layout) -> Iterator[Layout]:
    """Yield the layout with every ZeRO stage and type of recomputation, each with and without
    sequence parallelism."""
    stages = (0, 1, 2, 3) if base.replicas > 1 else (0, 1)
    if work.model.seq_length >= LONG:
        stages = (0, 1, 2, 3)  # stage 2 is possible on one rank too, for offloading the optimizer
    for zero in stages:
        for sequence in (False, True):
            lengths = {n for block in work.lengths for n in (block.own, block.other)}
            parts = base.tensor * (2 * base.context if base.context > 1 else 1)
            if sequence and any(n % parts for n in lengths):
                continue
            for recompute, mlp_act in RECOMPUTED:
                layout = dataclasses.replace(
                    base, zero=zero, sequence=sequence, recompute=recompute, mlp_act=mlp_act
                )
                if refusal(layout) is None:
                    yield layout


def divides_model(model: ModelConfig, tensor: int) -> bool:
    """Return whether each of ``tensor`` ranks gets whole heads and an equal slice of the MLP."""
    groups = [kind.model.attention.num_query_groups for kind in block_kinds(model)]
    return (
        model.attention.num_attention_heads % tensor == 0
        and model.mlp.ffn_hidden_size % tensor == 0
        and all(count % tensor == 0 or tensor % count == 0 for count in groups)
    )


def has_float8_widths(work: Workload, tensor: int) -> bool:
    """Return whether FP8 GEMMs support the layers' widths on each of ``tensor`` ranks."""
    if not work.float8:
        return True
    multiple = Float8(recipe=Float8Flags.of(work.fast_paths).fp8_recipe).multiple
    widths = [work.model.mlp.ffn_hidden_size // tensor]
    for kind in block_kinds(work.model):
        heads = heads_of(kind.model, tensor)
        query, keys = heads.queries * heads.width, heads.keys * heads.width
        # With more ranks than query groups, keys and values have a separate matrix.
        fused = kind.model.attention.num_query_groups >= tensor
        widths += [query, 2 * keys + query * fused]
        if kind.keys_are_values:
            widths[-1] = keys
    return not any(width % multiple for width in widths)


def micro_batch_sizes(work: Workload, data: int) -> list[int]:
    """Return the possible micro batch sizes: the requested size or powers of two, if they divide
    the samples of a data-parallel rank."""
    samples, rest = divmod(work.global_batch_size, data)
    if rest or not samples:
        return []
    tried = [work.micro_batch_size] if work.micro_batch_size else [2**n for n in range(8)]
    return [size for size in tried if samples % size == 0]


def schedules(layers: int, pipeline: int, eager: bool = False) -> list[tuple[str, int]]:
    """Return the possible schedules for a model with ``layers`` blocks, each with its number of
    stages per rank. Every stage needs a block. Schedules that delay weight gradients require
    ``eager`` blocks, which are not compiled."""
    if pipeline == 1:
        return [("1f1b", 1)]
    if pipeline > layers:
        return []
    interleaved = [v for v in range(2, layers // pipeline + 1) if layers % (pipeline * v) == 0]
    both_ways = [("dualpipev", 2)] if 2 * pipeline <= layers else []
    later = [("zbh1", 1), *(("dualpipev_zb", 2) for _ in both_ways)] if eager else []
    return [("1f1b", 1), *(("interleaved", v) for v in interleaved), *both_ways, *later]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def search(work: Workload, hardware: Hardware) -> list[Plan]:
    """Return a plan for every possible layout of the workload, best first, including those that do
    not fit into memory. For long sequences, also try memory savings and an offloaded optimizer."""
    plans = []
    for layout, micro_batch in layouts(work, hardware):
        for saving in savings(work):
            if saving.checkpoint_in_cpu and layout.recompute != "uniform":
                continue
            plans.append(estimate(work, layout, micro_batch, hardware, saving))
            for device in ("cpu", "nvme"):
                offloaded = dataclasses.replace(layout, offload_optimizer=device)
                if saving.checkpoint_in_cpu and layout.zero >= 2 and refusal(offloaded) is None:
                    plans.append(estimate(work, offloaded, micro_batch, hardware, saving))
                    if plans[-1].memory.host <= hardware.usable_host_memory:
                        break  # files are only tried if host memory is too small
    return sorted(plans, key=lambda plan: plan.rank)


def fitting(plans: list[Plan], hardware: Hardware) -> list[Plan]:
    """Return the plans that fit into GPU memory and host memory, in their order."""
    return [
        plan
        for plan in plans
        if plan.memory.total <= hardware.usable_memory
        and plan.memory.host <= hardware.usable_host_memory
    ]


def fewest_gpus(work: Workload, hardware: Hardware, limit: int = 64) -> int | None:
    """Return the smallest number of GPUs on which a layout fits, out of 2, 4, ... ``limit`` times
    the given number. Return None if no layout fits."""
    assert hardware.gpus
    for power in range(1, limit.bit_length()):
        more = dataclasses.replace(hardware, gpus=hardware.gpus << power)
        for layout, micro_batch in layouts(work, more):
            plan = estimate(work, layout, micro_batch, more)
            if plan.memory.total <= more.usable_memory:
                return more.gpus
    return None
