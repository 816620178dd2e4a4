#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Finds the layout with the shortest estimated step time that fits into the GPUs' memory.

    python tools/plan.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu \
        --seq-length 4096 --vocab-size 32000 --global-batch-size 256 --bf16 --gpus 16

Memory per rank: weights, gradients and optimizer state by ZeRO stage (Rajbhandari et al. 2020,
arXiv:1910.02054) as DeepSpeed 0.19 holds them, and activations, s b h (34 + 5 a s / h) bytes per
block of GPT-2's shape (Korthikanti et al. 2022, arXiv:2205.05198), counted tensor by tensor for
other shapes.
Step time: FLOPs / (utilisation x peak) + exposed bytes / bandwidth + the pipeline's bubble,
(p - 1) / (v m) of the work (Narayanan et al. 2021, arXiv:2104.04473). The assumptions are printed,
and each is a flag. docs/guides/planning.md has the formulas.

Exit status: 0 if a layout fits; 1 if none fits; 2 if the command line is wrong.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import (
    ConfigError,
    FlagParser,
    ModelFlags,
    PrecisionConfig,
    Setting,
    Settings,
    resolve,
)
from megatron.config.flags import build, option
from megatron.config.layouts import Layout
from megatron.planning.parameters import model_parameters
from megatron.planning.search import Plan, Workload, estimate, fewest_gpus, fitting, search
from megatron.planning.step_time import Hardware
from megatron.profiling.tables import aligned

GIB, GB = 2**30, 10**9
SEQ_LENGTH, VOCABULARY, PEAK_TFLOPS = 2048, 51_200, 312.0
"""Of the published runs: all of GPT's shape, on nodes of 8 A100 with 80 GB."""


@dataclass(frozen=True)
class PlanConfig:
    """Plan: what to train, and what to show."""

    vocab_size: int | None = option(None)
    """Tokens of the vocabulary, which is padded as in training."""
    global_batch_size: int | None = option(None)
    """Samples of one optimizer step over all processes."""
    micro_batch_size: int | None = option(None, derived="powers of two are tried")
    """Samples of a micro batch."""
    top: int = option(10)
    """Number of layouts to list."""
    like_table: bool = option(False)
    """Print published numbers of models from 1.7B to 1T parameters beside the estimates, and the
    bytes per parameter, and exit. The layouts are the published ones; only machine flags apply."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = FlagParser(PlanConfig, Hardware, ModelFlags, PrecisionConfig, description=__doc__)
    settings = parser.settings(argv)
    config, hardware = build(PlanConfig, settings), build(Hardware, settings)
    try:
        if config.like_table:
            hardware = dataclasses.replace(hardware, gpus=hardware.gpus or 8)
            hardware.check()
            print(published_tables(hardware))
            return 0
        hardware.check()
        work = workload_of(config, settings)
    except ConfigError as error:
        parser.error(str(error))
    plans = search(work, hardware)
    best = fitting(plans, hardware)
    print("\n".join(assumptions(work, hardware)))
    if not best:
        print("\n" + nothing_fits(work, hardware, plans))
        return 1
    fit = len(best)
    best = one_each(best)[: config.top]
    print(f"\n{fit} of {len(plans)} combinations fit; the best {len(best)} layouts:\n")
    print(aligned([HEADER, *(row(work, plan, hardware) for plan in best)]))
    print(LEGEND)
    print(f"\nFlags of the best, for {hardware.gpus} processes:\n  {' '.join(best[0].flags)}")
    return 0


def workload_of(config: PlanConfig, settings: Settings) -> Workload:
    """The workload of the flags, completed and checked as the trainer does it.

    Raises:
        ConfigError: a value is missing or contradicts another; the message names the flags.
    """
    for name in ("vocab_size", "global_batch_size"):
        flag = "--" + name.replace("_", "-")
        if getattr(config, name) is None:
            raise ConfigError(f"{flag} is missing")
    for name in ("vocab_size", "global_batch_size", "micro_batch_size", "top"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be positive")
    # Of the trainer's values only the model and the dtypes matter here.
    stand_ins = {"micro_batch_size": 1, "zero_stage": 1, "train_iters": 1, "lr": 1.0}
    known = {name: s for name, s in settings.items() if name not in PlanConfig.__annotations__}
    known |= {name: Setting(value, "planner") for name, value in stand_ins.items()}
    run = resolve(known, world_size=1).config
    precision = "fp16" if run.precision.fp16 else "bf16" if run.precision.bf16 else "fp32"
    assert config.vocab_size and config.global_batch_size
    return Workload(
        run.model,
        config.vocab_size,
        config.global_batch_size,
        config.micro_batch_size,
        precision,
        run.precision.accumulate_allreduce_grads_in_fp32,
        states=run.precision.states,
        float8=run.fast_paths.fp8_format is not None,
    )


def assumptions(work: Workload, hardware: Hardware) -> list[str]:
    """The lines that say what is planned and what is assumed."""
    model = work.padded(1)
    return [
        f"{model_parameters(model) / 1e9:,.2f}B parameters, {work.precision}, "
        f"{work.global_batch_size} x {model.seq_length} tokens a step, "
        f"{work.flops() / 1e15:,.1f} PFLOP of the model",
        f"assumed: {hardware.gpus} GPUs, {hardware.gpus_per_node} a node, --gpu-memory "
        f"{hardware.gpu_memory} less --memory-reserve {hardware.memory_reserve}; "
        f"--utilisation {hardware.utilisation:g} of --peak-tflops {hardware.peak_tflops:g}",
        f"assumed: --intra-node-bandwidth {hardware.intra_node_bandwidth:g} and "
        f"--inter-node-bandwidth {hardware.inter_node_bandwidth:g} GB/s a GPU; overlapped: "
        f"--tensor-overlap {hardware.tensor_overlap:g}, "
        f"--pipeline-overlap {hardware.pipeline_overlap:g}, "
        f"--data-overlap {hardware.data_overlap:g} (ZeRO 3)",
        "not counted: the optimizer's own time, data loading, logging, checkpoints, offload",
    ]


HEADER = [
    "layout", "micro", "m", "weights", "grads", "optim.", "buffers", "activ.", "(whole)", "GiB",
    "step s", "TFLOP/s", "MFU", "HFU", "bubble", "tensor", "pipe", "data GB",
]  # fmt: skip

LEGEND = """
micro: samples of a micro batch; m: micro batches per step. Memory in GiB of the rank that needs
most (grads: with their float32 copies in the update; whole: activations without recomputation).
TFLOP/s: of the model, per GPU; MFU: of --peak-tflops; HFU: with recomputation. bubble: share of the
step in which a pipeline rank waits. tensor, pipe, data: GB that a rank sends in a step."""


def one_each(plans: Sequence[Plan]) -> list[Plan]:
    """Each layout once, with its best micro batch."""
    found: dict[str, Plan] = {}
    for plan in plans:
        found.setdefault(plan.layout.name, plan)
    return list(found.values())


def row(work: Workload, plan: Plan, hardware: Hardware) -> list[str]:
    """A plan's line of the table."""
    kept = dataclasses.replace(plan.layout, recompute=None)
    whole = estimate(work, kept, plan.micro_batch, hardware).memory.activations
    memory, time, sent = plan.memory, plan.time, plan.sent
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.buffers, memory.activations)
    seconds = plan.layout.processes * time.total
    rate = work.flops() / seconds / 1e12
    hardware_rate = work.hardware_flops(plan.layout.recompute) / seconds / 1e12
    return [
        plan.layout.name,
        str(plan.micro_batch),
        str(plan.layout.micro_batches[0]),
        *(f"{part / GIB:.1f}" for part in (*parts, whole, memory.total)),
        f"{time.total:.2f}",
        f"{rate:.0f}",
        f"{rate / hardware.peak_tflops:.1%}",
        f"{hardware_rate / hardware.peak_tflops:.1%}",
        f"{time.bubble_share:.1%}",
        *(f"{part / GB:.1f}" for part in (sent.tensor, sent.pipeline, sent.data)),
    ]


def nothing_fits(work: Workload, hardware: Hardware, plans: Sequence[Plan]) -> str:
    """How much memory the smallest layout lacks, and what would help."""
    if not plans:
        return (
            f"no layout exists: --global-batch-size {work.global_batch_size} is not a multiple of "
            f"any data-parallel size (times --micro-batch-size) of {hardware.gpus} GPUs"
        )
    plan = min(plans, key=lambda plan: plan.memory.total)
    memory, usable = plan.memory, hardware.usable_memory
    missing = memory.total - usable
    helps = []
    more = fewest_gpus(work, hardware)
    if more:
        helps.append(f"--gpus {more}")
    helps.append(f"GPUs with {missing / GIB:.1f} GiB more memory")
    helps += offload(plans, usable)
    if memory.activations > missing:
        helps.append(f"a shorter --seq-length: activations take {memory.activations / GIB:.1f} GiB")
    kinds = ("weights", "gradients", "optimizer", "buffers", "activations")
    split = ", ".join(f"{kind} {getattr(memory, kind) / GIB:.1f}" for kind in kinds)
    return "\n".join(
        [
            f"nothing fits: the smallest of {len(plans)} layouts, {plan.layout.name} with micro "
            f"batches of {plan.micro_batch}, needs {memory.total / GIB:.1f} GiB ({split}), "
            f"{missing / GIB:.1f} GiB more than a GPU has available. What would help:",
            *(f"  {help}" for help in helps),
        ]
    )


def offload(plans: Sequence[Plan], usable: int) -> list[str]:
    """The effect of moving the optimizer to main memory; nothing where no plan uses ZeRO."""
    held = {
        plan: plan.memory.total - plan.memory.optimizer for plan in plans if plan.layout.zero > 0
    }
    if not held:
        return []
    plan = min(held, key=lambda plan: held[plan])
    missing = held[plan] - usable
    left = "fits" if missing <= 0 else f"lacks {missing / GIB:.1f} GiB"
    return [
        f"offloading the optimizer (offload_optimizer in the DeepSpeed JSON; slower, not timed "
        f"here): {plan.layout.name} then needs {held[plan] / GIB:.1f} GiB and {left}"
    ]


@dataclass(frozen=True)
class Published:
    """A published run.

    Attributes:
        name: the model, as the paper calls it or by its billions of parameters.
        chunks: stages per pipeline rank.
        batch: samples of a step.
        micro_batch: samples of a micro batch; None where the paper does not say.
        seconds, full_seconds: time of a step, with selective and with full recomputation.
        tflops: TFLOP/s of one GPU, recomputation included.
        mfu: model FLOPs over peak, with selective recomputation.
        hfu: the same with what is recomputed, 72 B s l h^2 (1 + s / 3h + V / 12lh) FLOPs by the
            paper's appendix A: a recomputation of attention counts as both passes of it.
    """

    name: str
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    chunks: int
    gpus: int
    batch: int
    micro_batch: int | None
    seconds: float | None = None
    full_seconds: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None

    @property
    def work(self) -> Workload:
        """The run's workload."""
        model = ModelFlags(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            seq_length=SEQ_LENGTH,
            attention_backend="eager",
        ).resolve()
        return Workload(model, VOCABULARY, self.batch, precision="fp16")

    @property
    def hardware_flops(self) -> float:
        """FLOPs of a step with full recomputation, 96 B s l h^2 (1 + s / 6h + V / 16lh) (Narayanan
        et al. 2021, equation 3)."""
        layers, hidden = self.layers, self.hidden
        ends = SEQ_LENGTH / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
        return 96.0 * self.batch * SEQ_LENGTH * layers * hidden**2 * (1 + ends)

    def layout(self, *, sequence: bool, recompute: str) -> Layout:
        """The run's layout; every data-parallel rank has the whole optimizer state."""
        data = self.gpus // (self.tensor * self.pipeline)
        return Layout(
            tensor=self.tensor,
            sequence=sequence,
            pipeline=self.pipeline,
            schedule="interleaved" if self.chunks > 1 else "1f1b",
            chunks=self.chunks,
            data=data,
            zero=1,
            precision="fp16",
            recompute=recompute,
            micro_batches=(self.batch // (data * (self.micro_batch or 1)),),
        )

    def plan(self, hardware: Hardware, *, sequence: bool, recompute: str) -> Plan:
        """The estimate of the run; a micro batch of 1 where the paper does not say."""
        layout = self.layout(sequence=sequence, recompute=recompute)
        return estimate(self.work, layout, self.micro_batch or 1, hardware)


KORTHIKANTI = (
    Published("22B", 64, 6144, 48, 8, 1, 1, 8, 4, 4, 1.10, 1.42, mfu=0.415, hfu=0.437),
    Published("175B", 96, 12288, 96, 8, 8, 3, 64, 64, 1, 13.75, 18.13, mfu=0.514, hfu=0.528),
    Published("530B", 128, 20480, 105, 8, 35, 3, 280, 280, 1, 37.83, 49.05, mfu=0.560, hfu=0.570),
    Published("1T", 160, 25600, 128, 8, 64, 1, 512, 512, 1, 71.49, 94.42, mfu=0.563, hfu=0.570),
)
"""Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5: sequence parallelism with selective
recomputation, and full recomputation without sequence parallelism; no data parallelism."""

NARAYANAN = (
    Published("1.7B", 24, 2304, 24, 1, 1, 1, 32, 512, None, tflops=137),
    Published("3.6B", 32, 3072, 30, 2, 1, 1, 64, 512, None, tflops=138),
    Published("7.5B", 32, 4096, 36, 4, 1, 1, 128, 512, None, tflops=142),
    Published("18.4B", 48, 6144, 40, 8, 1, 1, 256, 1024, None, tflops=135),
    Published("39.1B", 64, 8192, 48, 8, 2, 1, 512, 1536, None, tflops=138),
    Published("76.1B", 80, 10240, 60, 8, 4, 1, 1024, 1792, None, tflops=140),
    Published("145.6B", 96, 12288, 80, 8, 8, 1, 1536, 2304, None, tflops=148),
    Published("310.1B", 128, 16384, 96, 8, 16, 1, 1920, 2160, None, tflops=155),
    Published("529.6B", 128, 20480, 105, 8, 35, 1, 2520, 2520, None, tflops=163),
    Published("1008.0B", 160, 25600, 128, 8, 64, 1, 3072, 3072, None, tflops=163),
)
"""Narayanan et al. 2021 (arXiv:2104.04473), table 1: full recomputation. Micro batches and stages
per rank are not in the table."""

MEGATRON_LM = (
    Published("175B", 96, 12288, 96, 8, 16, 1, 1024, 1536, None, full_seconds=32.0, tflops=138),
)
"""Megatron-LM's README, GPT-3 example: "around 32 seconds" a step."""

BYTES_PER_PARAMETER = (
    ("float16 parameters, float16 gradients", 20, "4 + 16/d", 4, 16),
    ("bfloat16 parameters, float32 gradients", 18, "6 + 12/d", 6, 12),
    ("float32 parameters, float32 gradients", 16, "8 + 8/d", 8, 8),
)
"""Megatron-LM, docs/distrib_optimizer.md: (dtypes, bytes per parameter without the distributed
optimizer, with it over d data-parallel ranks, and the two numbers of that formula)."""


def published_tables(hardware: Hardware) -> str:
    """Published models beside their estimates, and the bytes per parameter."""
    head = ["model", "params B", "heads", "hidden", "layers", "t", "p", "v", "GPUs", "batch"]
    times = ["recompute", "published s", "estimate s", "ratio", "MFU", "HFU", "HFU published"]
    korthikanti = [[*head, *times, "bubble", "activ. GiB"]]
    for run in KORTHIKANTI:
        selective, full = (True, "selective", run.seconds), (False, "uniform", run.full_seconds)
        for sequence, recompute, seconds in (selective, full):
            assert seconds is not None
            plan = run.plan(hardware, sequence=sequence, recompute=recompute)
            peak = run.gpus * PEAK_TFLOPS * 1e12
            rate = run.work.flops() / peak
            hardware_rate = run.work.hardware_flops(recompute) / peak
            korthikanti.append(
                [
                    *shape(run),
                    "selective + sp" if sequence else "full",
                    f"{seconds:.2f}",
                    f"{plan.time.total:.2f}",
                    f"{plan.time.total / seconds:.2f}",
                    f"{rate / seconds:.1%} / {rate / plan.time.total:.1%}",
                    f"{hardware_rate / seconds:.1%} / {hardware_rate / plan.time.total:.1%}",
                    f"{run.hfu:.1%}" if sequence else "",
                    f"{plan.time.bubble_share:.1%}",
                    f"{plan.memory.activations / GIB:.1f}",
                ]
            )
    narayanan = [
        [*head, "TFLOP/s published", "estimated", "step s", "estimated", "bubble", "activ. GiB"]
    ]
    for run in (*NARAYANAN, *MEGATRON_LM):
        assert run.tflops is not None
        plan = run.plan(hardware, sequence=False, recompute="uniform")
        work = run.hardware_flops / run.gpus / 1e12
        narayanan.append(
            [
                *shape(run),
                f"{run.tflops:.0f}",
                f"{work / plan.time.total:.0f}",
                f"{run.full_seconds or work / run.tflops:.2f}",
                f"{plan.time.total:.2f}",
                f"{plan.time.bubble_share:.1%}",
                f"{plan.memory.activations / GIB:.1f}",
            ]
        )
    sizes = [["bytes per parameter", "whole", "over d ranks", *(f"d = {d}" for d in (2, 8, 64))]]
    for what, whole, text, fixed, shared in BYTES_PER_PARAMETER:
        sizes.append([what, str(whole), text, *(f"{fixed + shared / d:.2f}" for d in (2, 8, 64))])
    return "\n".join(
        [
            "Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5; MFU and HFU: from the "
            "published time / estimated.\nThe published HFU counts a recomputation of attention "
            "as another forward and backward pass of it,\n1 + s/3h + V/12lh; ours as the forward "
            "pass that it is.\n",
            aligned(korthikanti),
            "\nNarayanan et al. 2021 (arXiv:2104.04473), table 1, full recomputation; the "
            "step time follows from the\npublished rate, 96 B s l h^2 (1 + s/6h + V/16lh) FLOPs. "
            "Micro batches of 1 and 1F1B are assumed: the\ntable names neither. Last, 175B of "
            "Megatron-LM's README, whose 32 s and 138 TFLOP/s are both published.\n",
            aligned(narayanan),
            f"\nBoth estimated at --utilisation {hardware.utilisation:g} of --peak-tflops "
            f"{hardware.peak_tflops:g}, {hardware.intra_node_bandwidth:g} GB/s in a node and "
            f"{hardware.inter_node_bandwidth:g} between nodes, --tensor-overlap "
            f"{hardware.tensor_overlap:g};\nlarger matrices reach more of the "
            "peak, so the estimates are too fast for small models and too slow for large ones.\n"
            "\nMegatron-LM's distributed optimizer (its docs/distrib_optimizer.md); what DeepSpeed "
            "holds differs,\nsee docs/guides/planning.md.\n",
            aligned(sizes),
        ]
    )


def shape(run: Published) -> list[str]:
    """The first columns of a published model."""
    numbers = (run.heads, run.hidden, run.layers, run.tensor, run.pipeline, run.chunks, run.gpus,
               run.batch)  # fmt: skip
    parameters = model_parameters(run.work.padded(1)) / 1e9
    return [run.name, f"{parameters:.1f}", *map(str, numbers)]


if __name__ == "__main__":
    sys.exit(main())
