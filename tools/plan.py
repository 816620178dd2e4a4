#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Finds the layout of least estimated step time that fits into the GPUs' memory.

    python tools/plan.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu \
        --seq-length 4096 --vocab-size 32000 --global-batch-size 256 --bf16 --gpus 16

Memory per rank: weights, gradients and optimizer state by ZeRO's stages (Rajbhandari et al. 2020,
arXiv:1910.02054) as DeepSpeed 0.19 holds them, and activations, s b h (34 + 5 a s / h) bytes a
block of GPT-2's shape (Korthikanti et al. 2022, arXiv:2205.05198), counted tensor by tensor for
others.
Step time: FLOPs / (utilisation x peak) + bytes that are not hidden / bandwidth + the pipeline's
bubble, (p - 1) / (v m) of the work (Narayanan et al. 2021, arXiv:2104.04473). What is assumed is
printed, and every number of it is a flag. docs/guides/planning.md has the formulas.

Exit status: 0, 1 when nothing fits, 2 for flags that make no sense.
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
from megatron.planning.hardware import Hardware
from megatron.planning.parameters import model_parameters
from megatron.planning.published import (
    BYTES_PER_PARAMETER,
    KORTHIKANTI,
    NARAYANAN,
    PEAK_TFLOPS,
    Published,
)
from megatron.planning.search import Job, Plan, estimate, fewest_gpus, fitting, search

GIB, GB = 2**30, 10**9


@dataclass(frozen=True)
class PlanConfig:
    """Plan: what is trained, and what is shown."""

    vocab_size: int | None = option(None)
    """Tokens of the vocabulary; it is padded as in training."""
    global_batch_size: int | None = option(None)
    """Samples of one optimizer step over all processes."""
    micro_batch_size: int | None = option(None, derived="powers of two are tried")
    """Samples that one process takes through the model at once."""
    top: int = option(10)
    """How many layouts are listed."""
    like_table: bool = option(False)
    """Print what was published of models from 1.7B to 1T parameters beside the estimates, and the
    bytes per parameter, and exit. The published layouts are taken, only machine flags count."""


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
        job = job_of(config, settings)
    except ConfigError as error:
        parser.error(str(error))
    plans = search(job, hardware)
    best = fitting(plans, hardware)
    print("\n".join(assumptions(job, hardware)))
    if not best:
        print("\n" + nothing_fits(job, hardware, plans))
        return 1
    fit = len(best)
    best = one_each(best)[: config.top]
    print(f"\n{fit} of {len(plans)} combinations fit; the best {len(best)} layouts:\n")
    print(table([HEADER, *(row(job, plan, hardware) for plan in best)]))
    print(LEGEND)
    print(f"\nFlags of the best, for {hardware.gpus} processes:\n  {' '.join(best[0].flags)}")
    return 0


def job_of(config: PlanConfig, settings: Settings) -> Job:
    """The job that the flags describe, completed and checked as the trainer does it.

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
    # Of the trainer's values only the model and the number formats matter here.
    stand_ins = {"micro_batch_size": 1, "zero_stage": 1, "train_iters": 1, "lr": 1.0}
    known = {name: s for name, s in settings.items() if name not in PlanConfig.__annotations__}
    known |= {name: Setting(value, "planner") for name, value in stand_ins.items()}
    run = resolve(known, world_size=1).config
    precision = "fp16" if run.precision.fp16 else "bf16" if run.precision.bf16 else "fp32"
    assert config.vocab_size and config.global_batch_size
    return Job(
        run.model,
        config.vocab_size,
        config.global_batch_size,
        config.micro_batch_size,
        precision,
        run.precision.accumulate_allreduce_grads_in_fp32,
    )


def assumptions(job: Job, hardware: Hardware) -> list[str]:
    """What is planned for, and on what grounds."""
    model = job.padded(1)
    return [
        f"{model_parameters(model) / 1e9:,.2f}B parameters, {job.precision}, "
        f"{job.global_batch_size} x {model.seq_length} tokens a step, "
        f"{job.flops() / 1e15:,.1f} PFLOP of the model",
        f"assumed: {hardware.gpus} GPUs, {hardware.gpus_per_node} a node, --gpu-memory "
        f"{hardware.gpu_memory} less --memory-reserve {hardware.memory_reserve}; "
        f"--utilisation {hardware.utilisation:g} of --peak-tflops {hardware.peak_tflops:g}",
        f"assumed: --intra-node-bandwidth {hardware.intra_node_bandwidth:g} and "
        f"--inter-node-bandwidth {hardware.inter_node_bandwidth:g} GB/s a GPU; hidden: "
        f"--tensor-overlap {hardware.tensor_overlap:g}, "
        f"--pipeline-overlap {hardware.pipeline_overlap:g}, "
        f"--data-overlap {hardware.data_overlap:g} (ZeRO 3)",
        "not counted: the optimizer's own time, data loading, logging, checkpoints, offload",
    ]


HEADER = [
    "layout", "micro", "m", "weights", "grads", "optim.", "buffers", "activ.", "(whole)", "GiB",
    "step s", "TFLOP/s", "bubble", "tensor", "pipe", "data GB",
]  # fmt: skip

LEGEND = """
micro: samples of a micro batch; m: micro batches a step. Memory in GiB of the rank that needs most
(grads: with their float32 copies in the update; whole: activations without recomputation).
TFLOP/s: of the model, per GPU. bubble: share of the step in which a rank of the pipeline waits.
tensor, pipe, data: GB that a rank sends in a step."""


def one_each(plans: Sequence[Plan]) -> list[Plan]:
    """Each layout once, with its best micro batch."""
    found: dict[str, Plan] = {}
    for plan in plans:
        found.setdefault(plan.layout.name, plan)
    return list(found.values())


def row(job: Job, plan: Plan, hardware: Hardware) -> list[str]:
    """A plan's line of the table."""
    kept = dataclasses.replace(plan.layout, recompute=None)
    whole = estimate(job, kept, plan.micro_batch, hardware).memory.activations
    memory, time, sent = plan.memory, plan.time, plan.sent
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.buffers, memory.activations)
    return [
        plan.layout.name,
        str(plan.micro_batch),
        str(plan.layout.micro_batches[0]),
        *(f"{part / GIB:.1f}" for part in (*parts, whole, memory.total)),
        f"{time.total:.2f}",
        f"{job.flops() / plan.layout.processes / time.total / 1e12:.0f}",
        f"{time.bubble_share:.1%}",
        *(f"{part / GB:.1f}" for part in (sent.tensor, sent.pipeline, sent.data)),
    ]


def nothing_fits(job: Job, hardware: Hardware, plans: Sequence[Plan]) -> str:
    """By how much the leanest layout misses, and what would help."""
    if not plans:
        return (
            f"no layout exists: --global-batch-size {job.global_batch_size} is no multiple of any "
            f"number of replicas (times --micro-batch-size) that {hardware.gpus} GPUs can make"
        )
    plan = min(plans, key=lambda plan: plan.memory.total)
    memory, usable = plan.memory, hardware.usable_memory
    missing = memory.total - usable
    helps = []
    more = fewest_gpus(job, hardware)
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
            f"nothing fits: of {len(plans)} layouts the leanest, {plan.layout.name} with micro "
            f"batches of {plan.micro_batch}, needs {memory.total / GIB:.1f} GiB ({split}), "
            f"{missing / GIB:.1f} GiB more than a GPU has to give. What would help:",
            *(f"  {help}" for help in helps),
        ]
    )


def offload(plans: Sequence[Plan], usable: int) -> list[str]:
    """What moving the optimizer to main memory would bring; nothing where no plan uses ZeRO."""
    held = {
        plan: plan.memory.total - plan.memory.optimizer for plan in plans if plan.layout.zero > 0
    }
    if not held:
        return []
    plan = min(held, key=lambda plan: held[plan])
    missing = held[plan] - usable
    left = "fits" if missing <= 0 else f"misses by {missing / GIB:.1f} GiB"
    return [
        f"offloading the optimizer (offload_optimizer in the DeepSpeed JSON; slower, not timed "
        f"here): {plan.layout.name} then needs {held[plan] / GIB:.1f} GiB and {left}"
    ]


def published_tables(hardware: Hardware) -> str:
    """Published models beside their estimates, and the bytes per parameter."""
    head = ["model", "params B", "heads", "hidden", "layers", "t", "p", "v", "GPUs", "batch"]
    korthikanti = [
        [*head, "recompute", "published s", "estimate s", "ratio", "MFU", "bubble", "activ. GiB"]
    ]
    for run in KORTHIKANTI:
        for sequence, recompute, seconds in (
            (True, "selective", run.seconds), (False, "uniform", run.full_seconds)
        ):  # fmt: skip
            assert seconds is not None
            plan = run.plan(hardware, sequence=sequence, recompute=recompute)
            rate = run.job.flops() / run.gpus / PEAK_TFLOPS / 1e12
            korthikanti.append(
                [
                    *shape(run),
                    "selective + sp" if sequence else "full",
                    f"{seconds:.2f}",
                    f"{plan.time.total:.2f}",
                    f"{plan.time.total / seconds:.2f}",
                    f"{rate / seconds:.1%} / {rate / plan.time.total:.1%}",
                    f"{plan.time.bubble_share:.1%}",
                    f"{plan.memory.activations / GIB:.1f}",
                ]
            )
    narayanan = [
        [*head, "TFLOP/s published", "estimated", "step s", "estimated", "bubble", "activ. GiB"]
    ]
    for run in NARAYANAN:
        assert run.tflops is not None
        plan = run.plan(hardware, sequence=False, recompute="uniform")
        work = run.hardware_flops / run.gpus / 1e12
        narayanan.append(
            [
                *shape(run),
                f"{run.tflops:.0f}",
                f"{work / plan.time.total:.0f}",
                f"{work / run.tflops:.2f}",
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
            "Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5; MFU: published / "
            "estimated.\n",
            table(korthikanti),
            "\nNarayanan et al. 2021 (arXiv:2104.04473), table 1, full recomputation; the "
            "step time follows from the\npublished rate, 96 B s l h^2 (1 + s/6h + V/16lh) FLOPs. "
            "Micro batches of 1 and 1F1B are assumed: the\ntable names neither.\n",
            table(narayanan),
            f"\nBoth estimated at --utilisation {hardware.utilisation:g} of --peak-tflops "
            f"{hardware.peak_tflops:g}, {hardware.intra_node_bandwidth:g} GB/s in a node and "
            f"{hardware.inter_node_bandwidth:g} between nodes, --tensor-overlap "
            f"{hardware.tensor_overlap:g};\nlarger matrices reach more of the "
            "peak, so that small models come out too fast here and large ones too slow.\n"
            "\nMegatron-LM's distributed optimizer (its docs/distrib_optimizer.md); what DeepSpeed "
            "holds differs,\nsee docs/guides/planning.md.\n",
            table(sizes),
        ]
    )


def shape(run: Published) -> list[str]:
    """The first columns of a published model."""
    numbers = (run.heads, run.hidden, run.layers, run.tensor, run.pipeline, run.chunks, run.gpus,
               run.batch)  # fmt: skip
    parameters = model_parameters(run.job.padded(1)) / 1e9
    return [run.name, f"{parameters:.1f}", *map(str, numbers)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, the first aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in rows
    )


if __name__ == "__main__":
    sys.exit(main())
