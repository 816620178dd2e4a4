"""The measurements (cells), the most valuable first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contestants.registry import is_ours
from contestants.setting import Setting

from gpu_suite.shapes import SHAPES, step_flops

MACHINE, TESTS, CEILINGS = "machine", "tests", "ceilings"
MAIN, LLMQ, ABLATIONS, PEERS = "main", "llmq", "ablations", "peers"
LARGE, LENGTHS, SMALL, FAMILIES = "large", "lengths", "small", "families"
GENERATION, EXPERTS, LONG = "generation", "experts", "long"
GROUPS = (
    MACHINE, TESTS, CEILINGS, MAIN, LLMQ, EXPERTS, LONG, ABLATIONS, PEERS, LARGE, LENGTHS, SMALL,
    FAMILIES, GENERATION,
)  # fmt: skip

BASE = "ours-zero1+torch-compile"
FP8 = "+fp8-format=hybrid"
AWARE = "+use-precision-aware-optimizer"
STATES_A = f"{AWARE}+exp-avg-dtype=bf16+exp-avg-sq-dtype=bf16"
STATES_B = f"{STATES_A}+main-params-dtype=bf16"
STATES_C = f"{AWARE}+exp-avg-dtype=int8+exp-avg-sq-dtype=int8"

FULL = "+recompute-granularity=full"
TILES = f"{FULL}+mlp-chunks-for-training=0"
HOST = f"{TILES}+checkpoint-in-cpu"
FPDT = f"{HOST}+ds-sequence-parallel-fpdt+ds-sequence-parallel-fpdt-offloading"
SAVING = {"blocks recomputed": FULL, "tiles": TILES, "inputs on the host": HOST, "FPDT": FPDT}
"""Ways to save memory of long sequences, each with those before it."""

START_SECONDS = (
    ("torch-compile-mode=max-autotune", 160.0),
    ("fp8-recipe=blockwise", 80.0),
    ("fp8-format", 60.0),
    ("", 40.0),
)
"""Estimates for a training cell before its first step (imports, the model, compilation), by what is
in its contestant's name: the first that is counts."""
GPU_TESTS = Path(__file__).resolve().parents[2] / "tests" / "gpu"
CHOSEN = "chosen"
CHOSEN_TESTS = (
    "test_against_float64_on_the_cpu[1-bf16]",
    "test_against_float64_and_without_waiting[compiled]",
    "test_it_is_compiled_and_the_cpu_only_queues_work",
    "test_against_float64[torch.bfloat16-uneven-None]",
    "test_the_line_names_the_kernel_that_runs[sdpa]",
    "test_attention_kernels_against_float64[llama-flash]",
    "test_every_stage_takes_one_graph[1]",
    "test_8_bit_products_against_float64[hybrid-tensorwise]",
    "test_losses_next_to_bf16[tensorwise-True]",
)
"""Tests that say first whether the cells that follow are right: ZeRO 1, the update, the loss,
attention, compilation and fp8, each as the base has it."""
TESTS_SECONDS = {
    CHOSEN: 95.0, "attention": 150.0, "compile": 150.0, "float8": 120.0, "loss_head": 80.0,
    "model": 150.0, "states": 60.0, "update": 60.0, "zero_stages": 100.0,
}  # fmt: skip
"""Estimates; of other files :data:`OTHER_TESTS_SECONDS`."""
OTHER_TESTS_SECONDS = 40.0
EXPECTED_MFU = 0.45
"""Share of the data sheet's rate that durations are estimated with."""
SLACK = 2.5
"""A cell may take this many times its estimated duration."""
OWN_PROCESS = ("activation-memory-budget", "attention-backend", "torch-compile-mode")
"""Flags that change what is global in torch, or leave CUDA graphs behind."""


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        group: of :data:`GROUPS`.
        shape: of `SHAPES`; empty where nothing is trained.
        variant: what is different from the group's first of this shape, for people.
        contestant: of `contestants.registry`.
        seq_length, micro_tokens: in place of the shape's; 0 for the shape's own.
        trace: whether steps are traced afterwards.
        fixed: estimated seconds of a cell that trains nothing.
    """

    group: str
    shape: str = ""
    variant: str = ""
    contestant: str = ""
    seq_length: int = 0
    micro_tokens: int = 0
    trace: bool = False
    fixed: float = 0.0

    @property
    def name(self) -> str:
        """Name of its file, and for ``--cells``."""
        length = str(self.seq_length) if self.seq_length else ""
        words = (self.group, self.shape, length, self.variant)
        return re.sub(r"[^\w.]+", "-", "-".join(word for word in words if word)).strip("-")

    @property
    def setting(self) -> Setting:
        """Setting of its training."""
        return SHAPES[self.shape].setting(self.seq_length, self.micro_tokens)

    def seconds(self, peak_flops: float) -> float:
        """Estimated duration on a device of this rate."""
        if not self.shape:
            return self.fixed
        steps = SHAPES[self.shape].steps
        count = steps.total + steps.traced * self.trace
        start = start_seconds(self.contestant)
        return start + count * step_flops(self.setting) / (EXPECTED_MFU * peak_flops)


def start_seconds(contestant: str) -> float:
    """Estimate before the first step; see :data:`START_SECONDS`."""
    return next(seconds for flag, seconds in START_SECONDS if flag in contestant)


def _tests(variant: str) -> Cell:
    return Cell(TESTS, variant=variant, fixed=TESTS_SECONDS.get(variant, OTHER_TESTS_SECONDS))


def selection(cell: Cell) -> list[str]:
    """Arguments of pytest for a cell of :data:`TESTS`, from the root of the tree."""
    if cell.variant == CHOSEN:
        return ["tests/gpu", "-k", " or ".join(CHOSEN_TESTS)]
    return [f"tests/gpu/test_{cell.variant}.py"]


def turned_off(base: str) -> list[tuple[str, str]]:
    """(what is different, contestant): everything that makes a step fast, one at a time."""
    fp8 = base + FP8
    return [
        ("all of it", base),
        ("no torch.compile", base.replace("+torch-compile", "+torch-compile=off")),
        ("logits by 64 MiB", f"{base}+logits-chunk-mib=64"),
        ("logits by 1024 MiB", f"{base}+logits-chunk-mib=1024"),
        ("logits whole", f"{base}+logits-chunk-mib=0"),
        ("attention cuDNN", f"{base}+attention-backend=cudnn"),
        ("attention eager", f"{base}+attention-backend=eager"),
        ("gradients accumulated in fp32", f"{base}+accumulate-allreduce-grads-in-fp32"),
        ("states (A), 10 bytes", base + STATES_A),
        ("states (B), 8 bytes", base + STATES_B),
        ("states (C), 8 bytes", base + STATES_C),
        ("ZeRO 0 (autocast)", base.replace("zero1", "zero0")),
        ("activation memory budget 0.5", f"{base}+activation-memory-budget=0.5"),
        ("recompute attention", f"{base}+recompute-granularity=selective"),
        ("recompute blocks", f"{base}+recompute-granularity=full+recompute-method=uniform"),
        ("fp8", fp8),
        ("fp8 delayed", f"{fp8}+fp8-recipe=delayed"),
        ("fp8 blockwise", f"{fp8}+fp8-recipe=blockwise"),
        ("fp8 rowwise", f"{fp8}+fp8-recipe=rowwise"),
        ("fp8, no torch.compile", fp8.replace("+torch-compile", "+torch-compile=off")),
        (
            "compile mode max-autotune-no-cudagraphs",
            f"{base}+torch-compile-mode=max-autotune-no-cudagraphs",
        ),
        (
            "compile mode reduce-overhead (CUDA graphs)",
            f"{base}+torch-compile-mode=reduce-overhead",
        ),
        # Packages that are rarely there.
        ("attention flash-attention 2", f"{base}+attention-backend=flash2"),
        ("attention flash-attention 3", f"{base}+attention-backend=flash3"),
        ("attention flash-attention 4", f"{base}+attention-backend=flash4"),
    ]


PEER_NAMES = {
    "matrix products alone": "matmuls",
    "plain PyTorch, compiled": "plain-compiled",
    "transformers + DeepSpeed": "hf-deepspeed",
    "transformers' Trainer": "hf-trainer",
}


def full() -> Iterator[Cell]:
    """For a GPU."""
    yield Cell(MACHINE, fixed=40)
    yield _tests(CHOSEN)
    yield Cell(CEILINGS, fixed=60)
    yield from _both(MAIN, "1.3B", trace=True)
    yield from _both(LLMQ, "Qwen2.5-1.5B", trace=True)
    yield from _both(LLMQ, "Qwen2.5-3B", trace=True)
    yield from _both(MAIN, "3B", trace=True)
    for shape in ("Qwen3-MoE-3.8B", "Mixtral-4.6B", "OLMoE-3.5B"):
        yield Cell(EXPERTS, shape, "bf16", BASE + STATES_B, trace=True)
        yield Cell(EXPERTS, shape, "matrix products alone", "matmuls")
    eager = BASE.replace("+torch-compile", "+torch-compile=off")
    yield Cell(EXPERTS, "Qwen3-MoE-3.8B", "no torch.compile", eager + STATES_B)
    yield from _long()
    small = dict(micro_tokens=4096)
    yield Cell(EXPERTS, "Qwen3-MoE-3.8B", "micro batch of 4,096 tokens", BASE + STATES_B, **small)
    for variant, contestant in turned_off(BASE):
        yield Cell(ABLATIONS, "1.3B", variant, contestant)
    yield Cell(ABLATIONS, "1.3B", "micro batch of 32,768 tokens", BASE, micro_tokens=32_768)
    yield Cell(ABLATIONS, "1.3B", "micro batch of 8,192 tokens", BASE, micro_tokens=8192)
    for variant, contestant in PEER_NAMES.items():
        yield Cell(PEERS, "1.3B", variant, contestant, trace=contestant == "plain-compiled")
    states = (("8 bytes (B)", STATES_B), ("8 bytes (C)", STATES_C))
    for kind, flags in states:
        yield Cell(LARGE, "Qwen2.5-7B", f"bf16, {kind}", BASE + flags)
    yield from _both(LARGE, "Qwen2.5-7B")
    yield from _both(LARGE, "7B")
    for kind, flags in (("10 bytes (A)", STATES_A), ("8 bytes (B)", STATES_B)):
        yield Cell(LARGE, "Qwen2.5-3B", f"bf16, {kind}", BASE + flags, micro_tokens=16_384)
    for kind, flags in states:
        # 80 GB hardly hold them: 8-bit weights are kept next to those of 16 bits.
        flags += FP8
        yield Cell(LARGE, "Qwen2.5-7B", f"fp8, {kind}", BASE + flags, micro_tokens=2048)
    for length in (4096, 8192):
        yield from _both(LENGTHS, "3B", seq_length=length)
    for file in sorted(GPU_TESTS.glob("test_*.py")):
        yield _tests(file.stem.removeprefix("test_"))
    for shape in ("Qwen2.5-1.5B", "Qwen2.5-3B", "3B"):
        yield Cell(PEERS, shape, "matrix products alone", "matmuls")
    for shape in ("350M", "124M"):
        yield from _both(SMALL, shape)
    graphs = f"{BASE}+torch-compile-mode=reduce-overhead"
    yield Cell(SMALL, "124M", "bf16, CUDA graphs", graphs)
    for shape in ("BERT-345M", "T5-220M", "T5-770M"):
        yield Cell(FAMILIES, shape, "bf16", BASE, trace=True)
        for variant, contestant in PEER_NAMES.items():
            yield Cell(FAMILIES, shape, variant, contestant)
    yield Cell(FAMILIES, "Retro-350M", "bf16", BASE, trace=True)
    yield Cell(GENERATION, variant="124M", fixed=150)


def _long() -> Iterator[Cell]:
    """One card: each way to save memory at growing lengths, and layers of 8B at half a million
    tokens."""
    base, tiled = BASE + STATES_B, dict(list(SAVING.items())[1:])
    for length in (65_536, 131_072, 262_144):
        for variant, flags in SAVING.items():
            yield Cell(LONG, "Llama3-1.24B", variant, base + flags, length, length)
    for variant, flags in tiled.items():
        yield Cell(LONG, "Llama3-8B", variant, base + flags, 65_536, 65_536)
    for variant, flags in tiled.items():
        yield Cell(LONG, "Llama3-8B-layers-1.5B", variant, base + flags)


def tiny() -> Iterator[Cell]:
    """For a trial on a CPU: each kind of cell once, without compilation."""
    base = "ours-zero1"
    yield Cell(MACHINE, fixed=10)
    yield _tests(CHOSEN)
    yield Cell(CEILINGS, fixed=10)
    yield Cell(MAIN, "tiny", "bf16", base, trace=True)
    yield Cell(MAIN, "tiny", "fp8", base + FP8)
    yield Cell(LLMQ, "tiny-qwen", "bf16", base)
    yield Cell(EXPERTS, "tiny-experts", "bf16", base, trace=True)
    yield Cell(EXPERTS, "tiny-experts", "matrix products alone", "matmuls")
    yield Cell(LONG, "tiny", "FPDT", base + FPDT, seq_length=64)
    yield Cell(ABLATIONS, "tiny", "all of it", base)
    yield Cell(ABLATIONS, "tiny", "attention eager", f"{base}+attention-backend=eager")
    yield Cell(ABLATIONS, "tiny", "a flag of another version", f"{base}+no-such-flag=1")
    yield Cell(PEERS, "tiny", "matrix products alone", "matmuls")
    yield Cell(PEERS, "tiny", "plain PyTorch", "plain")
    yield Cell(PEERS, "tiny", "transformers + DeepSpeed", "hf-deepspeed")
    yield Cell(LENGTHS, "tiny", "bf16", base, seq_length=64)
    for shape in ("tiny-bert", "tiny-t5"):
        yield Cell(FAMILIES, shape, "bf16", base)
        yield Cell(FAMILIES, shape, "matrix products alone", "matmuls")
        yield Cell(FAMILIES, shape, "plain PyTorch", "plain")
        yield Cell(FAMILIES, shape, "transformers + DeepSpeed", "hf-deepspeed")
    yield Cell(FAMILIES, "tiny-retro", "bf16", base)
    yield Cell(GENERATION, variant="tiny", fixed=20)


SCALES = {"full": full, "tiny": tiny}


def cells(scale: str, groups: Sequence[str] = GROUPS, names: Sequence[str] = ()) -> list[Cell]:
    """The cells of a scale, in their order; of these groups, or those with one of these names."""
    every = list(SCALES[scale]())
    if names:
        return [cell for cell in every if cell.name in names]
    return [cell for cell in every if cell.group in groups]


def _both(group: str, shape: str, trace: bool = False, seq_length: int = 0) -> Iterator[Cell]:
    for variant, flags in (("bf16", ""), ("fp8", FP8)):
        yield Cell(group, shape, variant, BASE + flags, seq_length=seq_length, trace=trace)


def needs_own_process(cell: Cell) -> bool:
    """True if the cell leaves its process in a state of its own, as :data:`OWN_PROCESS`, peers, and
    generation, which initialises torch.distributed in another way."""
    if cell.group == GENERATION:
        return True
    ours = not cell.contestant or is_ours(cell.contestant)
    return not ours or any(flag in cell.contestant for flag in OWN_PROCESS)
