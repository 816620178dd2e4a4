"""Description of the hardware, and the time of an optimizer step on it: computation, communication
and pipeline bubble.

A step takes FLOPs / (utilisation x peak) + bytes / bandwidth of communication that is not
overlapped, both for the slowest rank, plus the pipeline bubble. The optimizer update, data loading,
logging and checkpoints are not counted. Ring algorithms send (n - 1) / n of a buffer for an
all-gather or a reduce-scatter over n ranks, and twice that for an all-reduce (Thakur, Rabenseifner
and Gropp 2005, section 4).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise, product

from megatron.apps.planning.parameters import (
    RankShare,
    attention_weights,
    block_lengths,
    head_shape,
    local_widths,
)
from megatron.config import ConfigError, ModelConfig
from megatron.config.flags import option
from megatron.config.layouts import Layout
from megatron.families import BlockLengths
from megatron.features.context.costs import attention_bytes, counts_half, heads_of
from megatron.features.experts.costs import layer_costs
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.global_heads.costs import block_kinds
from megatron.features.latent.flags import LatentConfig
from megatron.features.recurrent.costs import mean_block
from megatron.parallel.pipeline_schedules import PipelineSchedule

_UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}

FLOPS_OF_A_BYTE = 200
"""GEMM FLOPs that a GPU computes in the time in which it moves a byte: 650 TFLOP/s / 3.3 TB/s for
an H100."""


@dataclass(frozen=True)
class Hardware:
    """Hardware: number, size and speed of the GPUs (defaults: --gpu H100)."""

    gpus: int | None = option(None)
    """Number of GPUs. Each runs one process."""
    gpu_memory: str = option("80GiB", derived="as --gpu says")
    """Memory of one GPU, such as 80GiB."""
    memory_reserve: str = option("4GiB")
    """Amount of --gpu-memory to leave free for CUDA, NCCL, kernel workspaces and fragmentation."""
    gpus_per_node: int = option(8)
    """Number of GPUs per node, connected by fast links."""
    peak_tflops: float = option(312.0, derived="as --gpu says")
    """Dense 16-bit peak of one GPU in TFLOP/s (A100 312, H100 and H200 989, B200 2250)."""
    utilisation: float = option(0.6)
    """Fraction of the peak throughput that a GPU reaches while computing."""
    intra_node_bandwidth: float = option(300.0, derived="as --gpu says")
    """Bandwidth of a GPU within a node, in GB/s each way (NVLink: A100 300, H100 450)."""
    inter_node_bandwidth: float = option(25.0, derived="as --gpu says")
    """Bandwidth of a GPU to other nodes, in GB/s each way (200 Gbit/s: 25, 400 Gbit/s: 50)."""
    tensor_overlap: float = option(0.4)
    """Fraction of tensor-parallel communication that overlaps with computation. In the backward
    pass, collectives of column-parallel layers run concurrently with GEMMs."""
    pipeline_overlap: float = option(0.0)
    """Fraction of pipeline sends and receives that overlaps with computation."""
    gpu_watts: float = option(812.0, derived="as --gpu says")
    """Power per GPU in watts, including its share of the machine."""
    gpu_hour_price: float = option(1.8, derived="as --gpu says")
    """Price of one GPU hour in dollars."""
    expert_imbalance: float = option(1.0)
    """Number of tokens on the busiest expert-parallel rank, divided by the mean over ranks."""
    data_overlap: float = option(0.5)
    """Fraction of data-parallel communication that overlaps with computation at ZeRO 3. At lower
    stages no overlap is assumed, although gradients are reduced during the backward pass."""
    ring_overlap: float = option(0.8)
    """Fraction of attention's compute time during which keys can be transferred between
    context-parallel ranks, with --cp-comm-type p2p."""
    host_memory: str = option("2000GB")
    """Host memory of a node, shared by its GPUs."""
    host_bandwidth: float = option(50.0)
    """Bandwidth between a GPU and host memory, in GB/s each way (PCIe 4: 25, PCIe 5: 50)."""

    def check(self) -> None:
        """Check the values. Raises ConfigError if a value is out of range."""
        if self.gpus is None:
            raise ConfigError("--gpus is missing: the number of GPUs to plan for")
        for name in ("gpus", "gpus_per_node", "peak_tflops", "intra_node_bandwidth",
                     "inter_node_bandwidth", "gpu_watts", "host_bandwidth"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)} must be positive")
        if not self.gpu_hour_price >= 0:
            raise ConfigError(f"--gpu-hour-price {self.gpu_hour_price} must not be negative")
        if not self.expert_imbalance >= 1:
            raise ConfigError(f"--expert-imbalance {self.expert_imbalance} must be 1 or more")
        if not 0 < self.utilisation <= 1:
            raise ConfigError(f"--utilisation {self.utilisation} must be above 0 and at most 1")
        for name in ("tensor_overlap", "pipeline_overlap", "data_overlap", "ring_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)} must be from 0 to 1")
        parse_bytes("--host-memory", self.host_memory)
        if self.usable_memory <= 0:
            raise ConfigError(
                f"--memory-reserve {self.memory_reserve} leaves nothing of --gpu-memory "
                f"{self.gpu_memory}"
            )

    @property
    def usable_memory(self) -> int:
        """Bytes of GPU memory that a plan can use."""
        memory = parse_bytes("--gpu-memory", self.gpu_memory)
        return memory - parse_bytes("--memory-reserve", self.memory_reserve)

    @property
    def usable_host_memory(self) -> float:
        """Bytes of host memory per GPU."""
        sharing = min(self.gpus_per_node, self.gpus or self.gpus_per_node)
        return parse_bytes("--host-memory", self.host_memory) / sharing

    def ring_bandwidth(self, ranks: int, stride: int) -> float:
        """Return the bandwidth in bytes per second of a ring of ``ranks`` ranks that are ``stride``
        ranks apart. Within a node it is the GPU's own bandwidth. Between nodes, each ring uses the
        network links of all its members in a node, as in NCCL."""
        inside = self.intra_node_bandwidth
        if ranks * stride <= self.gpus_per_node:
            return 1e9 * inside
        members = max(1, self.gpus_per_node // stride)
        return 1e9 * min(inside, members * self.inter_node_bandwidth)

    def link_bandwidth(self, ranks: int, stride: int) -> float:
        """Return the bandwidth in bytes per second of a group's slowest neighbouring link."""
        inside = ranks * stride <= self.gpus_per_node
        return 1e9 * (self.intra_node_bandwidth if inside else self.inter_node_bandwidth)

    @property
    def flops(self) -> float:
        """FLOP/s that a GPU reaches while computing."""
        return self.peak_tflops * 1e12 * self.utilisation


def parse_bytes(flag: str, text: str) -> int:
    """Return the bytes in a size such as ``80GiB``. Raises ConfigError, naming ``flag``, if the
    text is not a size."""
    match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(_UNITS)})", text)
    if match is None:
        raise ConfigError(f"{flag} {text}: expected a size such as 80GiB ({', '.join(_UNITS)})")
    return int(float(match[1]) * _UNITS[match[2]])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Communication:
    """Bytes that the rank that sends the most sends in a step, by type of parallelism."""

    tensor: float
    pipeline: float
    data: float
    expert: float = 0.0
    context: float = 0.0


def ring(ranks: int) -> float:
    """Return the fraction of a buffer that a rank sends in an all-gather or reduce-scatter."""
    return (ranks - 1) / ranks


def tensor_bytes_per_block(
    model: ModelConfig, layout: Layout, micro_batch: int, lengths: BlockLengths | None = None
) -> float:
    """Return the bytes that a block, by default the model's first, sends to tensor-parallel
    ranks for one micro batch.

    The forward pass has two all-reduces of the hidden states, and so has the backward pass
    (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Sequence parallelism replaces each by an
    all-gather and a reduce-scatter, and gathers the inputs of the two column-parallel layers
    again (Korthikanti et al. 2022, section 4.2.2). Full recomputation repeats the communication
    of the forward pass, except after the input of the last layer if neither dropout nor a norm
    follows it. Cross-attention adds one all-reduce each way. For the sequence that it reads, it
    also adds an all-reduce of the gradient, or two all-gathers and a reduce-scatter with
    sequence parallelism.
    """
    lengths = lengths or block_lengths(model, layout)[0]
    again, gathers = layout.recompute in ("uniform", "block"), 0
    unneeded = (1 if layout.sequence else 2) * (again and not keeps_outputs(model))
    for each in lengths.whole:
        # Attention, cross-attention, MLP: a column- and a row-parallel layer each.
        layers = 3 if each.other else 2
        gathers += each.own * (layers * (4 + 2 * again + layout.sequence) - unneeded)
        gathers += each.other * ((3 + again) if layout.sequence else 2)
    # Autocast's GEMMs are in 16 bits too.
    size = 0.5 if layout.autocast else 1.0
    return ring(layout.tensor) * size * gathers * hidden_bytes(model, layout, micro_batch)


def keeps_outputs(model: ModelConfig) -> bool:
    """Return whether a block's backward pass needs the output of its last layer."""
    return bool(model.hidden_dropout) or model.norm.post_norm


def hidden_bytes(model: ModelConfig, layout: Layout, tokens: int) -> float:
    """Return the bytes of the hidden states of ``tokens`` tokens that are not split over ranks."""
    size = 4 if layout.precision == "fp32" or layout.autocast else 2
    return float(size * tokens * model.hidden_size)


def tensor_bytes_at_ends(model: ModelConfig, layout: Layout, tokens: int) -> float:
    """Return the bytes that the token embedding or the output head sends: one all-reduce."""
    return 2 * ring(layout.tensor) * hidden_bytes(model, layout, tokens)


def pipeline_bytes(
    model: ModelConfig, layout: Layout, micro_batch: int, micro_batches: int
) -> float:
    """Return the bytes that a pipeline rank sends to its neighbours. At every stage boundary it
    sends the hidden states, with an encoder's output that the decoder reads, or their gradients.
    With sequence parallelism each rank sends its slice of the sequence."""
    if layout.pipeline == 1:
        return 0.0
    split = layout.tensor if layout.sequence else 1
    blocks = block_lengths(model, layout)
    tokens = micro_batch * max(lengths.own + lengths.other for lengths in blocks)
    return messages(layout) * micro_batches * hidden_bytes(model, layout, tokens) / split


@lru_cache(maxsize=64)
def messages(layout: Layout) -> int:
    """Return the messages per micro batch of the pipeline rank that sends the most."""
    stages = layout.pipeline * layout.chunks
    place = PipelineSchedule(layout.schedule, layout.pipeline, layout.chunks, stages)
    ranks = [place.rank_of(stage) for stage in range(stages)]
    sent = Counter(
        sender for here, there in pairwise(ranks) if here != there for sender in (here, there)
    )
    return max(sent.values())


def gradient_size(layout: Layout) -> int:
    """Return the bytes per element of gradients as they are sent."""
    half = layout.precision != "fp32" and layout.zero > 0
    return 2 if half and not layout.grads_in_fp32 else 4


def tied_bytes(layout: Layout, share: RankShare) -> tuple[float, float]:
    """Return the bytes of a rank's gradients of layers tied to other pipeline ranks, and the bytes
    that the rank sends to sum these gradients."""
    sizes = [(copies, float(gradient_size(layout) * count)) for copies, count in share.tied]
    return sum(size for _, size in sizes), sum(2 * ring(copies) * size for copies, size in sizes)


def expert_bytes_per_block(model: ModelConfig, layout: Layout, micro_batch: int) -> float:
    """Return the bytes that a block with experts sends to expert-parallel ranks for one micro
    batch.

    Each token's row is sent to each of its experts and back, in the forward and the backward pass
    (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2), and again in full recomputation. If
    experts are sharded over tensor-parallel ranks, all of these ranks send all rows. If experts are
    whole, each rank sends the rows of its own tokens."""
    part = model.part(ExpertsConfig)
    rows = micro_batch * model.seq_length // layout.context * part.moe_router_topk
    rows //= layout.tensor if layout.expert_tensor is not None else 1
    width = (part.moe_latent_size or model.hidden_size) / model.hidden_size
    passes = 6 if layout.recompute in ("uniform", "block") else 4
    return passes * ring(layout.expert) * width * hidden_bytes(model, layout, rows)


def data_bytes(
    layout: Layout, parameters: int, micro_batches: int, replicas: int | None = None
) -> float:
    """Return the bytes of gradients and parameters that a rank sends to other data-parallel ranks,
    or to ``replicas`` ranks with the same experts.

    Rajbhandari et al. 2020 (arXiv:1910.02054, section 7): without ZeRO an all-reduce of the
    gradients; at stage 1 a reduce-scatter of gradients and an all-gather of weights; at stage 3
    weights are gathered for the forward and the backward pass, and gradients reduce-scattered.
    Stages 2 and 3 reduce gradients after every micro batch.
    """
    weight = 2 if layout.precision != "fp32" and layout.zero > 0 else 4
    gradient = gradient_size(layout)
    share = ring(replicas or layout.replicas) * parameters
    per_parameter = {
        0: 2 * gradient,
        1: gradient + weight,
        2: micro_batches * gradient + weight,
        3: micro_batches * (2 * weight + gradient),
    }
    return share * per_parameter[layout.zero]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by cause. Communication that computation hides is not included."""

    compute: float
    tensor: float
    pipeline: float
    data: float
    bubble: float
    expert: float = 0.0
    context: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        sending = self.tensor + self.pipeline + self.data + self.expert + self.context + self.host
        return self.compute + sending + self.bubble

    @property
    def bubble_share(self) -> float:
        """Fraction of the step in which a pipeline rank waits for other ranks."""
        return self.bubble / self.total


def rank_flops(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    share: RankShare,
    imbalance: float = 1.0,
) -> float:
    """Return one rank's FLOPs for one micro batch: forward, backward and recomputation.

    Only GEMMs are counted, with two operations per multiply-add. Attention counts all pairs of
    tokens, or half of them in long sequences (Narayanan et al. 2021, arXiv:2104.04473, section 5.1;
    Korthikanti et al. 2022, section 6 and appendix A). The rank's experts process ``imbalance``
    times the mean number of tokens."""
    width, hidden = local_widths(model, layout.tensor), model.hidden_size
    mlp = 2 * hidden * (3 if model.mlp.gated else 2) * width.ffn
    part, channels = model.part(LatentConfig), 2 * width.query
    if not part.idle:
        channels = width.query + width.query // model.attention.kv_channels * part.v_head_dim
    total, share_of_pairs = 0.0, 0.5 if counts_half(model) else 1.0
    mean, weights = mean_block(model, layout.tensor), attention_weights(model, layout.tensor)
    for lengths in chain.from_iterable(block.whole for block in chain(*share.stages)):
        own, other = lengths.own, lengths.other
        projections = 2.0 * own * weights
        scores = own * 2 * channels * lengths.keys * share_of_pairs
        if other:
            projections += 2 * hidden * (own * 2 * width.query + other * 2 * width.kv)
            scores += own * 4 * width.query * lengths.other_keys
        projections = mean.attention * projections + own * 2 * mean.weights
        scores = mean.attention * scores + own * mean.products
        matrices = projections + own * mean.mlp * mlp
        again = {None: 0, "selective": scores}.get(layout.recompute, matrices + scores)
        if layout.mlp_act and layout.recompute in (None, "selective"):
            # Gate and up projection are read, and their product is written, in 16 bits.
            bytes_again = own * mean.mlp * 2 * (2 + model.mlp.gated) * width.ffn
            again += FLOPS_OF_A_BYTE * bytes_again
        total += 3 * (matrices + scores) + again
    if any(share.routed):
        costs = layer_costs(model, max(model.part(ExpertsConfig).layer_experts))
        more = costs.chosen * imbalance + costs.others - mlp * layout.tensor / 2
        passes = 4 if layout.recompute in ("uniform", "block") else 3
        tokens = model.seq_length / layout.context
        total += passes * sum(share.routed) * tokens * 2 * more / layout.tensor
    if share.last:
        outputs, whole = head_shape(model)
        slices = layout.tensor if layout.sequence else 1
        outputs *= 1 + model.blocks_ahead
        total += 3 * (2 * hidden * width.vocab * outputs + whole / slices) / layout.context
    return micro_batch * total


def bubble_ratio(layout: Layout, micro_batches: int) -> float:
    """Return the idle time of a pipeline divided by its busy time.

    With p ranks, v stages per rank and m micro batches it is (p - 1) / (v m) (Narayanan et al.
    2021, section 2.2). For this project's own schedules, let F be the time of a forward pass, and B
    >= 2 F that of a backward pass. dualpipev has ((p - 1) B - F / 2) / (m (F + B)). If weight
    gradients are delayed, they take F and input gradients B - F: zbh1 has (p - 1) (B - F) / (m (F +
    B)). dualpipev_zb waits (p - 1) F / 2, or with full recomputation (3 (p - 1) F - F) / 2. These
    two were counted on simulated timelines."""
    p, m = layout.pipeline, micro_batches
    if p == 1:
        return 0.0
    full = layout.recompute in ("uniform", "block")
    backward = 3 if full else 2
    if layout.schedule == "dualpipev":
        return ((p - 1) * backward - 0.5) / (m * (1 + backward))
    if layout.schedule == "dualpipev_zb":
        return ((3 * (p - 1) - 1) if full else (p - 1)) / 2 / (m * (1 + backward))
    if layout.schedule == "zbh1":
        return (p - 1) * (backward - 1) / (m * (1 + backward))
    return (p - 1) / (layout.chunks * m)


def step_time(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    micro_batches: int,
    shares: list[RankShare],
    hardware: Hardware,
) -> tuple[StepTime, Communication]:
    """Return the step time, and the bytes sent by the rank that sends the most. The model must be
    complete, with its vocabulary padded for the layout."""
    t, d, p = layout.tensor, layout.replicas, layout.pipeline
    working, imbalance = [], hardware.expert_imbalance if layout.expert > 1 else 1.0
    links = hardware.link_bandwidth(layout.expert, t if layout.expert_tensor is None else 1)
    for share in shares:
        flops = micro_batches * rank_flops(model, layout, micro_batch, share, imbalance)
        sent = micro_batches * _tensor_bytes(model, layout, micro_batch, share)
        exposed = sent / hardware.ring_bandwidth(t, 1) * (1 - hardware.tensor_overlap)
        rows = 0.0
        if layout.expert > 1:
            each = expert_bytes_per_block(model, layout, micro_batch)
            rows = micro_batches * sum(share.routed) * imbalance * each
        keys, waited = _context_time(model, layout, micro_batch, share, hardware)
        keys, waited = micro_batches * keys, micro_batches * waited
        busy = flops / hardware.flops + exposed + rows / links + waited
        working.append((busy, exposed, sent, rows, keys, waited))
    busy, exposed, sent, rows, keys, waited = max(working)
    parameters, experts = max((share.parameters, share.experts) for share in shares)
    replicas = d // layout.expert_axis
    of_experts = data_bytes(layout, experts, micro_batches, replicas)
    stages = pipeline_bytes(model, layout, micro_batch, micro_batches)
    # The copies of a tied embedding are averaged over replicas and then summed. These all-reduces
    # at the end of the step overlap with nothing.
    tied, copies = max(tied_bytes(layout, share) for share in shares)
    volume = Communication(
        sent,
        stages + copies,
        data_bytes(layout, parameters - experts, micro_batches) + 2 * ring(d) * tied + of_experts,
        rows,
        keys,
    )
    hidden = hardware.data_overlap if layout.zero == 3 else 0.0
    return (
        StepTime(
            compute=busy - exposed - rows / links - waited,
            tensor=exposed,
            pipeline=(stages * (1 - hardware.pipeline_overlap) + copies)
            / hardware.link_bandwidth(p, t * d),
            data=volume.data / hardware.ring_bandwidth(d, t) * (1 - hidden),
            bubble=busy * bubble_ratio(layout, micro_batches),
            expert=rows / links,
            context=waited,
        ),
        volume,
    )


def exposed_on_host(moved: float, time: StepTime, hardware: Hardware) -> float:
    """Return the seconds for moving ``moved`` bytes between a GPU and host memory that computation
    does not hide."""
    return max(0.0, moved / (1e9 * hardware.host_bandwidth) - time.compute)


def _context_time(
    model: ModelConfig, layout: Layout, micro_batch: int, share: RankShare, hardware: Hardware
) -> tuple[float, float]:
    """Return the bytes that a rank's attention sends to other context-parallel ranks for one micro
    batch, and the seconds of this transfer that computation does not hide. Rings send keys during
    attention, whereas all-to-all over heads and all-gather of keys precede it."""
    sent = waited = 0.0
    if layout.context == 1:
        return sent, waited
    element = 2 if layout.precision != "fp32" else 4
    bandwidth = hardware.ring_bandwidth(layout.context, layout.tensor)
    passes = 3 if layout.recompute is None else 4
    blocks = Counter(chain(*share.stages)).items()
    for (lengths, number), kind in product(blocks, block_kinds(model)):
        count, heads = kind.share * number, heads_of(kind.model, layout.tensor)
        tokens = micro_batch * lengths.own
        rings, rest = attention_bytes(layout, heads, tokens, element)
        pairs = tokens * lengths.keys * (0.5 if counts_half(model) else 1.0)
        scores = passes * pairs * 4 * heads.queries * heads.width / hardware.flops
        hidden = min(rings / bandwidth, hardware.ring_overlap * scores)
        sent += count * (rings + rest)
        waited += count * ((rings + rest) / bandwidth - hidden)
    return sent, waited


def _tensor_bytes(model: ModelConfig, layout: Layout, micro_batch: int, share: RankShare) -> float:
    """Return the bytes that a rank's layers send to tensor-parallel ranks for one micro batch."""
    sent = sum(
        count * tensor_bytes_per_block(model, layout, micro_batch, lengths)
        for lengths, count in Counter(chain(*share.stages)).items()
    )
    # In DualPipeV, the first rank has both the first and the last layers.
    ends = [(share.first, share.stages[0][0]), (share.last, share.stages[-1][-1])]
    return sent + sum(
        tensor_bytes_at_ends(model, layout, micro_batch * lengths.own)
        for is_here, lengths in ends
        if is_here
    )
