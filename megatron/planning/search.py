"""All layouts for a number of GPUs, what each costs, and the best of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron.config import ModelConfig
from megatron.config.layouts import Layout, refusal
from megatron.model.flops import TransformerShape
from megatron.planning.communication import Communication
from megatron.planning.hardware import Hardware
from megatron.planning.memory import Memory, rank_memory
from megatron.planning.parameters import RankShare, rank_shares
from megatron.planning.step_time import StepTime, step_time


@dataclass(frozen=True)
class Job:
    """What is to be trained.

    Attributes:
        model: the model, complete but for its vocabulary.
        vocab_size: tokens of the vocabulary, without padding.
        global_batch_size: samples of a step.
        micro_batch_size: samples of a micro batch; None to try powers of two.
        precision: fp32, bf16 or fp16.
        grads_in_fp32: whether half-precision gradients are accumulated in float32.
    """

    model: ModelConfig
    vocab_size: int
    global_batch_size: int
    micro_batch_size: int | None = None
    precision: str = "bf16"
    grads_in_fp32: bool = False

    def padded(self, tensor: int) -> ModelConfig:
        """The model as ``tensor`` ranks hold it, its vocabulary padded as the trainer pads it."""
        return self.model.with_vocabulary(self.vocab_size, tensor)

    def flops(self) -> float:
        """Model FLOPs of a step, attention over all pairs, nothing for what is recomputed."""
        return TransformerShape.of(self.padded(1)).flops_per_step(
            self.global_batch_size, causal=False
        )


@dataclass(frozen=True)
class Plan:
    """A layout with all that it is estimated to cost.

    Attributes:
        layout: the layout.
        micro_batch: samples of a micro batch.
        memory: bytes of the rank that needs most.
        sent: bytes that a rank sends in a step.
        time: seconds of a step.
    """

    layout: Layout
    micro_batch: int
    memory: Memory
    sent: Communication
    time: StepTime

    @property
    def flags(self) -> list[str]:
        """Flags of the training commands that ask for this plan, the model's aside."""
        samples = self.micro_batch * self.layout.data * self.layout.micro_batches[0]
        sizes = ["--micro-batch-size", str(self.micro_batch), "--global-batch-size", str(samples)]
        return [*self.layout.flags(), *sizes]

    @property
    def rank(self) -> tuple[float, float, tuple[int, ...]]:
        """Less is better: time, then memory, then how little has to be cut."""
        layout = self.layout
        cuts = (layout.tensor, layout.pipeline, layout.zero, layout.sequence)
        return self.time.total, self.memory.total, cuts


def estimate(job: Job, layout: Layout, micro_batch: int, hardware: Hardware) -> Plan:
    """What a layout costs; it names the job's micro batches and exists for the job."""
    model, (count,) = job.padded(layout.tensor), layout.micro_batches
    shares = _shares(model, layout)
    memory = max(
        (rank_memory(model, layout, micro_batch, count, share) for share in heaviest(shares)),
        key=lambda memory: memory.total,
    )
    time, sent = step_time(model, layout, micro_batch, count, heaviest(shares), hardware)
    return Plan(layout, micro_batch, memory, sent, time)


def _shares(model: ModelConfig, layout: Layout) -> tuple[RankShare, ...]:
    place = (layout.tensor, layout.pipeline, layout.schedule, layout.chunks)
    return _shares_at(model, *place)


@lru_cache(maxsize=4096)
def _shares_at(
    model: ModelConfig, tensor: int, pipeline: int, schedule: str, chunks: int
) -> tuple[RankShare, ...]:
    layout = Layout(tensor=tensor, pipeline=pipeline, schedule=schedule, chunks=chunks)
    return tuple(rank_shares(model, layout))


def heaviest(shares: tuple[RankShare, ...]) -> list[RankShare]:
    """The ranks of a pipeline that can need the most of anything: those to which no earlier rank,
    which holds more micro batches, is equal or above in all it holds."""
    found: list[RankShare] = []
    for share in shares:
        if not any(_covers(other, share) for other in found):
            found.append(share)
    return found


def _covers(a: RankShare, b: RankShare) -> bool:
    return (
        a.parameters >= b.parameters
        and a.first >= b.first
        and a.last >= b.last
        and max(a.blocks) >= max(b.blocks)
        and sum(a.blocks) >= sum(b.blocks)
    )


def layouts(job: Job, hardware: Hardware) -> Iterator[tuple[Layout, int]]:
    """Every layout that exists for the job, each with its micro batch size.

    Tensor parallelism stays inside a node: its collectives are in every layer, and nothing hides
    them (Narayanan et al. 2021, section 3.2).
    """
    assert hardware.gpus
    for tensor in divisors(hardware.gpus):
        if tensor > hardware.gpus_per_node or not divides_model(job.model, tensor):
            continue
        for pipeline in divisors(hardware.gpus // tensor):
            data = hardware.gpus // tensor // pipeline
            for micro_batch in micro_batch_sizes(job, data):
                count = job.global_batch_size // (micro_batch * data)
                for schedule, chunks in schedules(job.model, pipeline):
                    base = Layout(
                        tensor=tensor, pipeline=pipeline, schedule=schedule, chunks=chunks,
                        data=data, precision=job.precision, micro_batches=(count,),
                        grads_in_fp32=job.grads_in_fp32,
                    )  # fmt: skip
                    yield from ((layout, micro_batch) for layout in variants(job, base))


def variants(job: Job, base: Layout) -> Iterator[Layout]:
    """A layout with each ZeRO stage, with and without sequence parallelism and recomputation."""
    stages = (0, 1, 2, 3) if base.data > 1 else (0, 1)
    for zero in stages:
        for sequence in (False, True):
            if sequence and job.model.seq_length % base.tensor:
                continue
            for recompute in (None, "selective", "uniform"):
                layout = dataclasses.replace(
                    base, zero=zero, sequence=sequence, recompute=recompute
                )
                if refusal(layout) is None:
                    yield layout


def divides_model(model: ModelConfig, tensor: int) -> bool:
    """Whether each of ``tensor`` ranks gets whole heads and an equal share of the MLP."""
    groups = model.attention.num_query_groups
    return (
        model.attention.num_attention_heads % tensor == 0
        and model.mlp.ffn_hidden_size % tensor == 0
        and (groups % tensor == 0 or tensor % groups == 0)
    )


def micro_batch_sizes(job: Job, data: int) -> list[int]:
    """Micro batch sizes that make whole steps: the one asked for, or powers of two."""
    samples, rest = divmod(job.global_batch_size, data)
    if rest or not samples:
        return []
    tried = [job.micro_batch_size] if job.micro_batch_size else [2**n for n in range(8)]
    return [size for size in tried if samples % size == 0]


def schedules(model: ModelConfig, pipeline: int) -> list[tuple[str, int]]:
    """Schedules with their stages per rank; every stage needs a block."""
    layers = model.num_layers
    if pipeline == 1:
        return [("1f1b", 1)]
    if pipeline > layers:
        return []
    interleaved = [v for v in range(2, layers // pipeline + 1) if layers % (pipeline * v) == 0]
    both_ways = [("dualpipev", 2)] if 2 * pipeline <= layers else []
    return [("1f1b", 1), *(("interleaved", v) for v in interleaved), *both_ways]


def divisors(number: int) -> list[int]:
    """Divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def search(job: Job, hardware: Hardware) -> list[Plan]:
    """A plan for every layout that exists for the job, whether it fits or not, best first."""
    plans = [estimate(job, *found, hardware) for found in layouts(job, hardware)]
    return sorted(plans, key=lambda plan: plan.rank)


def fitting(plans: list[Plan], hardware: Hardware) -> list[Plan]:
    """The plans that fit into the GPUs' memory, in their order."""
    return [plan for plan in plans if plan.memory.total <= hardware.usable_memory]


def fewest_gpus(job: Job, hardware: Hardware, limit: int = 64) -> int | None:
    """The least number of GPUs, doubling, on which something fits.

    Args:
        job: what is to be trained.
        hardware: the machines; the numbers tried start at twice its GPUs.
        limit: the most to try, in multiples of them.
    """
    assert hardware.gpus
    factor = 2
    while factor <= limit:
        more = dataclasses.replace(hardware, gpus=hardware.gpus * factor)
        for layout, micro_batch in layouts(job, more):
            plan = estimate(job, layout, micro_batch, more)
            if plan.memory.total <= more.usable_memory:
                return more.gpus
        factor *= 2
    return None
