"""Published training runs, compared with the planner's estimates for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.apps.planning.parameters import model_parameters
from megatron.apps.planning.search import Plan, Workload, estimate
from megatron.apps.planning.step_time import Hardware
from megatron.apps.profiling.tables import aligned
from megatron.config import ModelFlags
from megatron.config.layouts import Layout

GIB = 2**30
# All runs use GPT's architecture, on nodes of 8 A100 GPUs with 80 GB.
SEQ_LENGTH, VOCABULARY, PEAK_TFLOPS = 2048, 51_200, 312.0


@dataclass(frozen=True)
class Published:
    """A published training run.

    Attributes:
        name: name of the model, as in the paper or by its billions of parameters.
        chunks: stages per pipeline rank.
        batch: samples per step.
        micro_batch: samples per micro batch. None if the paper does not say.
        seconds, full_seconds: step time with selective and with full recomputation.
        tflops: TFLOP/s of one GPU, including recomputation.
        mfu, hfu: model and hardware FLOPs utilisation with selective recomputation. The paper's
          appendix A counts hardware FLOPs as 72 B s l h^2 (1 + s / 3h + V / 12lh), with B
          samples, s sequence length, l layers, h hidden size and V vocabulary size.
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
        """Return the run's layout. It has ZeRO 1, which partitions only optimizer state, over the
        data-parallel ranks."""
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
        """Return the planner's estimate. If the paper gives no micro batch size, 1 is assumed."""
        layout = self.layout(sequence=sequence, recompute=recompute)
        return estimate(self.work, layout, self.micro_batch or 1, hardware)


# Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5: sequence parallelism with selective
# recomputation, and full recomputation without sequence parallelism. No data parallelism.
KORTHIKANTI = (
    Published("22B", 64, 6144, 48, 8, 1, 1, 8, 4, 4, 1.10, 1.42, mfu=0.415, hfu=0.437),
    Published("175B", 96, 12288, 96, 8, 8, 3, 64, 64, 1, 13.75, 18.13, mfu=0.514, hfu=0.528),
    Published("530B", 128, 20480, 105, 8, 35, 3, 280, 280, 1, 37.83, 49.05, mfu=0.560, hfu=0.570),
    Published("1T", 160, 25600, 128, 8, 64, 1, 512, 512, 1, 71.49, 94.42, mfu=0.563, hfu=0.570),
)

# Narayanan et al. 2021 (arXiv:2104.04473), table 1: full recomputation. The table lists neither
# micro batch sizes nor stages per rank.
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

# Megatron-LM's README, GPT-3 example: "around 32 seconds" per step.
MEGATRON_LM = (
    Published("175B", 96, 12288, 96, 8, 16, 1, 1024, 1536, None, full_seconds=32.0, tflops=138),
)

# Megatron-LM, docs/distrib_optimizer.md: dtypes, bytes per parameter without the distributed
# optimizer, bytes with it over d data-parallel ranks, and the two numbers in that formula.
BYTES_PER_PARAMETER = (
    ("float16 parameters, float16 gradients", 20, "4 + 16/d", 4, 16),
    ("bfloat16 parameters, float32 gradients", 18, "6 + 12/d", 6, 12),
    ("float32 parameters, float32 gradients", 16, "8 + 8/d", 8, 8),
)


def published_tables(hardware: Hardware) -> str:
    """Return tables of published runs with their estimates, and a table of bytes per parameter."""
    return "\n".join(
        [
            "Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5; MFU and HFU: from the "
            "published time / estimated.\nThe published HFU counts a recomputation of attention "
            "as another forward and backward pass of it,\n1 + s/3h + V/12lh; ours as the forward "
            "pass that it is.\n",
            aligned(_korthikanti(hardware)),
            "\nNarayanan et al. 2021 (arXiv:2104.04473), table 1, full recomputation; the "
            "step time follows from the\npublished rate, 96 B s l h^2 (1 + s/6h + V/16lh) FLOPs. "
            "Micro batches of 1 and 1F1B are assumed: the\ntable names neither. Last, 175B of "
            "Megatron-LM's README, whose 32 s and 138 TFLOP/s are both published.\n",
            aligned(_narayanan(hardware)),
            f"\nBoth estimated at --utilisation {hardware.utilisation:g} of --peak-tflops "
            f"{hardware.peak_tflops:g}, {hardware.intra_node_bandwidth:g} GB/s in a node and "
            f"{hardware.inter_node_bandwidth:g} between nodes, --tensor-overlap "
            f"{hardware.tensor_overlap:g};\nlarger matrices reach more of the "
            "peak, so the estimates are too fast for small models and too slow for large ones.\n"
            "\nMegatron-LM's distributed optimizer (its docs/distrib_optimizer.md); what DeepSpeed "
            "holds differs,\nsee docs/guides/planning.md.\n",
            aligned(_bytes_per_parameter()),
        ]
    )


_FIRST = ["model", "params B", "heads", "hidden", "layers", "t", "p", "v", "GPUs", "batch"]
_LAST = ["bubble", "activ. GiB"]


def _korthikanti(hardware: Hardware) -> list[list[str]]:
    times = ["recompute", "published s", "estimate s", "ratio", "MFU", "HFU", "HFU published"]
    lines = [[*_FIRST, *times, *_LAST]]
    for run in KORTHIKANTI:
        for recompute, seconds in (("selective", run.seconds), ("uniform", run.full_seconds)):
            assert seconds is not None
            sequence = recompute == "selective"
            plan = run.plan(hardware, sequence=sequence, recompute=recompute)
            peak = run.gpus * PEAK_TFLOPS * 1e12
            rates = [run.work.flops() / peak, run.work.hardware_flops(recompute) / peak]
            cells = [
                "selective + sp" if sequence else "full",
                f"{seconds:.2f}",
                f"{plan.time.total:.2f}",
                f"{plan.time.total / seconds:.2f}",
                *(f"{rate / seconds:.1%} / {rate / plan.time.total:.1%}" for rate in rates),
                f"{run.hfu:.1%}" if sequence else "",
            ]
            lines.append(_row(run, plan, cells))
    return lines


def _narayanan(hardware: Hardware) -> list[list[str]]:
    times = ["TFLOP/s published", "estimated", "step s", "estimated"]
    lines = [[*_FIRST, *times, *_LAST]]
    for run in (*NARAYANAN, *MEGATRON_LM):
        assert run.tflops is not None
        plan = run.plan(hardware, sequence=False, recompute="uniform")
        work = run.hardware_flops / run.gpus / 1e12
        cells = [
            f"{run.tflops:.0f}",
            f"{work / plan.time.total:.0f}",
            f"{run.full_seconds or work / run.tflops:.2f}",
            f"{plan.time.total:.2f}",
        ]
        lines.append(_row(run, plan, cells))
    return lines


def _bytes_per_parameter() -> list[list[str]]:
    lines = [["bytes per parameter", "whole", "over d ranks", *(f"d = {d}" for d in (2, 8, 64))]]
    for what, whole, text, fixed, shared in BYTES_PER_PARAMETER:
        each = (f"{fixed + shared / d:.2f}" for d in (2, 8, 64))
        lines.append([what, str(whole), text, *each])
    return lines


def _row(run: Published, plan: Plan, cells: Sequence[str]) -> list[str]:
    """Return a table row: ``cells`` between the columns that all tables of runs have."""
    numbers = (run.heads, run.hidden, run.layers, run.tensor, run.pipeline, run.chunks, run.gpus,
               run.batch)  # fmt: skip
    parameters = model_parameters(run.work.padded(1)) / 1e9
    ends = f"{plan.time.bubble_share:.1%}", f"{plan.memory.activations / GIB:.1f}"
    return [run.name, f"{parameters:.1f}", *map(str, numbers), *cells, *ends]
