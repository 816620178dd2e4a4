"""What is counted on the null GPU: a layer or two of a model in every layout, and whole models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from contestants.flags import flags_of
from contestants.setting import Setting
from gpu_suite.shapes import SHAPES

STEPS, STEADY = 6, 3
"""The first step compiles, and the first two are logged, for which their losses are read: only from
the fourth on a step is like all that follow. The last one's counts are kept."""
FP8 = ("--fp8-format", "hybrid")
SMALL_STATES = (
    "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16",
    "--main-params-dtype", "bf16",
)  # fmt: skip
"""8 bytes a parameter."""


@dataclass(frozen=True)
class Cell:
    """A training of one rank among ``ranks``, of which ``copies`` see other samples."""

    shape: str
    stage: int = 1
    flags: tuple[str, ...] = ()
    ranks: int = 1
    copies: int = 1
    rank: int = 0
    layers: int = 2
    """Of the model; 0 for all of them."""
    micro_batches: int = 4
    micro_tokens: int = 4096

    @property
    def setting(self) -> Setting:
        """The shape's setting of one copy, with a vocabulary of 32,000 where layers are left
        out."""
        setting = SHAPES[self.shape].setting(None, self.micro_tokens)
        setting = dataclasses.replace(setting, micro_batches=self.micro_batches)
        if not self.layers:
            return setting
        return dataclasses.replace(setting, layers=self.layers, vocab_size=32_000)


def flags_of_cell(cell: Cell) -> list[str]:
    """The command line of a cell."""
    flags = flags_of(cell.setting, cell.stage, ("--torch-compile", *cell.flags))
    samples = flags.index("--global-batch-size") + 1
    flags[samples] = str(int(flags[samples]) * cell.copies)
    return flags


def _cut(kind: str, size: int) -> tuple[str, ...]:
    return (f"--{kind}-parallel-size", str(size))


def _whole(shape: str, micro_tokens: int, *flags: str) -> Cell:
    return Cell(shape, 1, flags, layers=0, micro_batches=2, micro_tokens=micro_tokens)


_TENSOR, _PIPELINE = _cut("tensor-model", 2), _cut("pipeline-model", 2)

CELLS = {
    "one bf16": Cell("1.3B"),
    "one fp8": Cell("1.3B", flags=FP8),
    "one fp8 delayed": Cell("1.3B", flags=(*FP8, "--fp8-recipe", "delayed")),
    "dp2 zero1": Cell("1.3B", 1, ranks=2, copies=2),
    "dp2 zero2": Cell("1.3B", 2, ranks=2, copies=2),
    "dp2 zero3": Cell("1.3B", 3, ranks=2, copies=2),
    "tp2": Cell("1.3B", 1, _TENSOR, 2),
    "tp2 sp": Cell("1.3B", 1, (*_TENSOR, "--sequence-parallel"), 2),
    "tp2 fp8": Cell("1.3B", 1, (*_TENSOR, *FP8), 2),
    "pp2 first": Cell("1.3B", 1, _PIPELINE, 2),
    "pp2 last": Cell("1.3B", 1, _PIPELINE, 2, rank=1),
    "tp2 pp2": Cell("1.3B", 1, (*_TENSOR, *_PIPELINE), 4),
    "ep2": Cell("Qwen3-MoE-3.8B", 1, _cut("expert-model", 2), 2, 2, layers=1),
    "cp2": Cell("1.3B", 1, _cut("context", 2), 2),
    "1.5B bf16": _whole("Qwen2.5-1.5B", 16_384),
    "1.5B fp8": _whole("Qwen2.5-1.5B", 16_384, *FP8),
    "3B bf16": _whole("Qwen2.5-3B", 8192),
    "3B fp8": _whole("Qwen2.5-3B", 8192, *FP8),
    "7B bf16": _whole("Qwen2.5-7B", 4096, *SMALL_STATES),
    "7B fp8": _whole("Qwen2.5-7B", 4096, *SMALL_STATES, *FP8),
}
"""Layouts of two layers; then whole models, on one card."""
