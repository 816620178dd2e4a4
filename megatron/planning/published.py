"""What was published of large models, beside what is estimated for them.

All of GPT's shape with sequences of 2048 tokens and a vocabulary of 51,200, on nodes of 8 A100 with
80 GB, 312 TFLOP/s of dense 16-bit peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import ModelFlags
from megatron.config.layouts import Layout
from megatron.planning.hardware import Hardware
from megatron.planning.search import Job, Plan, estimate

SEQ_LENGTH, VOCABULARY, PEAK_TFLOPS = 2048, 51_200, 312.0


@dataclass(frozen=True)
class Published:
    """A published run.

    Attributes:
        name: the model, as the paper calls it or by its billions of parameters.
        heads: attention heads.
        hidden: hidden size.
        layers: blocks.
        tensor: tensor-parallel size.
        pipeline: pipeline ranks.
        chunks: stages per pipeline rank.
        gpus: number of GPUs.
        batch: samples of a step.
        micro_batch: samples of a micro batch; None where the paper does not say.
        seconds: time of a step; None where only the rate was published.
        full_seconds: time of a step with full recomputation, where it was published.
        tflops: TFLOP/s of one GPU, what is recomputed included, where it was published.
        mfu: model FLOPs over peak, where it was published.
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

    @property
    def job(self) -> Job:
        """The run as a job."""
        model = ModelFlags(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            seq_length=SEQ_LENGTH,
            attention_backend="eager",
        ).resolve()
        return Job(model, VOCABULARY, self.batch, precision="fp16")

    @property
    def hardware_flops(self) -> float:
        """FLOPs of a step as Narayanan et al. 2021 count them (equation 3), full recomputation
        included: 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
        layers, hidden = self.layers, self.hidden
        ends = SEQ_LENGTH / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
        return 96.0 * self.batch * SEQ_LENGTH * layers * hidden**2 * (1 + ends)

    def layout(self, *, sequence: bool, recompute: str) -> Layout:
        """The run's layout, with optimizer state whole on every data-parallel rank."""
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
        return estimate(self.job, layout, self.micro_batch or 1, hardware)


KORTHIKANTI = (
    Published("22B", 64, 6144, 48, 8, 1, 1, 8, 4, 4, 1.10, 1.42, mfu=0.415),
    Published("175B", 96, 12288, 96, 8, 8, 3, 64, 64, 1, 13.75, 18.13, mfu=0.514),
    Published("530B", 128, 20480, 105, 8, 35, 3, 280, 280, 1, 37.83, 49.05, mfu=0.560),
    Published("1T", 160, 25600, 128, 8, 64, 1, 512, 512, 1, 71.49, 94.42, mfu=0.563),
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

BYTES_PER_PARAMETER = (
    ("float16 parameters, float16 gradients", 20, "4 + 16/d", 4, 16),
    ("bfloat16 parameters, float32 gradients", 18, "6 + 12/d", 6, 12),
    ("float32 parameters, float32 gradients", 16, "8 + 8/d", 8, 8),
)
"""Megatron-LM, docs/distrib_optimizer.md: (what, bytes per parameter without the distributed
optimizer, with it over d data-parallel ranks; and the latter's two numbers)."""
