"""The measurements (cells), the most valuable first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contestants.registry import is_ours
from contestants.setting import Setting

from gpu_suite.shapes import SHAPES, step_flops
from megatron.kernels.switches import SWITCHES

MACHINE, TESTS, CEILINGS, GRAPHS, RANKS = "machine", "tests", "ceilings", "graphs", "ranks"
MAIN, LLMQ, SWITCHED, ABLATIONS, PEERS = "main", "llmq", "switched", "ablations", "peers"
LARGE, LENGTHS, SMALL, FAMILIES = "large", "lengths", "small", "families"
GENERATION, EXPERTS, LONG = "generation", "experts", "long"
GROUPS = (
    GRAPHS, CEILINGS, MAIN, LLMQ, SWITCHED, RANKS, TESTS, MACHINE, LARGE, EXPERTS, LONG, ABLATIONS,
    PEERS, LENGTHS, SMALL, FAMILIES, GENERATION,
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
"""Ways to save memory of long sequences, each with those before it."""
MUON = "+optimizer=muon"
OPERATORS = tuple(SWITCHES)
"""Operators with a GPU kernel, each of which a cell switches off."""

START_SECONDS = (
    ("torch-compile-mode=max-autotune", 160.0),
    ("fp8-recipe=blockwise", 80.0),
    ("fp8-format", 45.0),
    ("", 40.0),
)
"""Estimates for a training cell before its first step (imports, the model, compilation), by what is
in its contestant's name: the first that is counts."""
AGAIN_SECONDS = 12.0
"""Before the first step of a training like the one before it in the same process: the blocks are
compiled again, and nothing is imported."""
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
    "test_resume_is_bitwise[zero1-bf16]",
)
"""Tests that say whether the cells are right: ZeRO 1, the update, the loss, attention, compilation,
fp8, and a resume with --deterministic-mode, each as the base has it."""
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
OWN_PROCESS = (
    "activation-memory-budget", "attention-backend", "deterministic-mode", "torch-compile-mode",
)  # fmt: skip
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
        without: operators of `megatron.kernels` that are switched off.
        fixed: estimated seconds of a cell that trains nothing.
    """

    group: str
    shape: str = ""
    variant: str = ""
    contestant: str = ""
    seq_length: int = 0
    micro_tokens: int = 0
    trace: bool = False
    without: tuple[str, ...] = ()
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
        start = AGAIN_SECONDS if self.group == SWITCHED else start_seconds(self.contestant)
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
    """(what is different, contestant): flags that make a step fast or small, one at a time."""
    fp8 = base + FP8
    return [
        ("all of it", base),
        ("no torch.compile", base.replace("+torch-compile", "+torch-compile=off")),
        ("gradients accumulated in fp32", f"{base}+accumulate-allreduce-grads-in-fp32"),
        ("states (B), 8 bytes", base + STATES_B),
        ("states (C), 8 bytes", base + STATES_C),
        ("Muon", base + MUON),
        ("activation memory budget 0.5", f"{base}+activation-memory-budget=0.5"),
        ("recompute blocks", f"{base}+recompute-granularity=full+recompute-method=uniform"),
        ("deterministic", f"{base}+deterministic-mode"),
        ("fp8 delayed", f"{fp8}+fp8-recipe=delayed"),
        ("fp8 blockwise", f"{fp8}+fp8-recipe=blockwise"),
        ("fp8 rowwise", f"{fp8}+fp8-recipe=rowwise"),
        (
            "compile mode max-autotune-no-cudagraphs",
            f"{base}+torch-compile-mode=max-autotune-no-cudagraphs",
        ),
        (
            "compile mode reduce-overhead (CUDA graphs)",
            f"{base}+torch-compile-mode=reduce-overhead",
        ),
    ]


PEER_NAMES = {
    "matrix products alone": "matmuls",
    "plain PyTorch, compiled": "plain-compiled",
    "transformers + DeepSpeed": "hf-deepspeed",
}


def switched_off(shape: str, base: str) -> Iterator[Cell]:
    """Every operator of `megatron.kernels`, and then one of them replaced by its formula, compiled,
    at a time. All in one process: the worker's."""
    for variant, names in (
        ("all operators", ()),
        *((f"without {name}", (name,)) for name in OPERATORS if name != "casts"),
    ):
        yield Cell(SWITCHED, shape, variant, base, without=names)
    for variant, names in (("fp8, all operators", ()), ("fp8, without casts", ("casts",))):
        yield Cell(SWITCHED, shape, variant, base + FP8, without=names)


def full() -> Iterator[Cell]:
    """For a GPU. The first groups, to the chosen tests, take eight to ten minutes and say
    whether and how fast everything works; what follows answers one question each."""
    yield Cell(GRAPHS, fixed=20)
    yield Cell(CEILINGS, fixed=45)
    yield from _both(MAIN, "1.3B", trace=True)
    yield from _both(LLMQ, "Qwen2.5-1.5B")
    yield from switched_off("1.3B-layers-333M", BASE)
    yield Cell(RANKS, fixed=45)
    yield _tests(CHOSEN)
    yield Cell(MACHINE, fixed=40)
    yield Cell(LARGE, "Qwen2.5-7B", "bf16, 8 bytes (B)", BASE + STATES_B, trace=True)
    yield Cell(LARGE, "Qwen2.5-7B", "fp8, 8 bytes (B)", BASE + STATES_B + FP8, trace=True)
    yield from _both(LLMQ, "Qwen2.5-3B", trace=True)
    large = dict(micro_tokens=32_768)
    yield Cell(LLMQ, "Qwen2.5-1.5B", "32,768 tokens, 8 bytes (B)", BASE + STATES_B, **large)
    yield Cell(EXPERTS, "Qwen3-MoE-3.8B", "bf16", BASE + STATES_B, trace=True)
    yield Cell(EXPERTS, "Qwen3-MoE-3.8B", "matrix products alone", "matmuls")
    yield Cell(EXPERTS, "Mixtral-4.6B", "bf16", BASE + STATES_B)
    yield from _long()
    for variant, contestant in turned_off(BASE):
        yield Cell(ABLATIONS, "1.3B", variant, contestant)
    for variant, contestant in PEER_NAMES.items():
        yield Cell(PEERS, "1.3B", variant, contestant, trace=contestant == "plain-compiled")
    yield Cell(LARGE, "Qwen2.5-7B", "bf16, 8 bytes (C)", BASE + STATES_C)
    yield from _both(LENGTHS, "3B", seq_length=8192)
    for file in sorted(GPU_TESTS.glob("test_*.py")):
        yield _tests(file.stem.removeprefix("test_"))
    yield Cell(SMALL, "124M", "bf16", BASE)
    graphs = f"{BASE}+torch-compile-mode=reduce-overhead"
    yield Cell(SMALL, "124M", "bf16, CUDA graphs", graphs)
    for shape in ("BERT-345M", "T5-220M", "Retro-350M"):
        yield Cell(FAMILIES, shape, "bf16", BASE)
    yield Cell(GENERATION, variant="124M", fixed=150)


def _long() -> Iterator[Cell]:
    """One card: the longest sequences of a 1B and of layers of an 8B that each way to save memory
    is for."""
    base = BASE + STATES_B
    for shape, length, variant, flags in (
        ("Llama3-1.24B", 131_072, "blocks recomputed", FULL),
        ("Llama3-1.24B", 131_072, "tiles", TILES),
        ("Llama3-1.24B", 524_288, "FPDT", FPDT),
        ("Llama3-8B", 65_536, "inputs on the host", HOST),
        ("Llama3-8B", 131_072, "FPDT", FPDT),
        ("Llama3-8B-layers-1.5B", 524_288, "FPDT", FPDT),
    ):
        yield Cell(LONG, shape, variant, base + flags, length, length)


def tiny() -> Iterator[Cell]:
    """For a trial on a CPU: each kind of cell once, without compilation."""
    base = "ours-zero1"
    yield Cell(CEILINGS, fixed=10)
    yield Cell(MAIN, "tiny", "bf16", base, trace=True)
    yield Cell(MAIN, "tiny", "fp8", base + FP8)
    yield Cell(LLMQ, "tiny-qwen", "bf16", base)
    yield Cell(SWITCHED, "tiny", "all operators", base)
    yield Cell(SWITCHED, "tiny", "no operators", base, without=OPERATORS)
    yield Cell(RANKS, fixed=30)
    yield _tests(CHOSEN)
    yield Cell(MACHINE, fixed=10)
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
    for shape in ("tiny-bert", "tiny-t5", "tiny-retro"):
        yield Cell(FAMILIES, shape, "bf16", base)
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
