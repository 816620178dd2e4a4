#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Prints the table of layouts: which combinations are supported, and why the others are not.

python tools/layouts.py
python tools/layouts.py --markdown > docs/reference/layouts.md
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.apps.parity.layouts import parse_layout
from megatron.config import parse_configs
from megatron.config.flags import option
from megatron.config.layouts import PRECISIONS, RULES, Layout, StateDtypes, refusal

STAGES = range(4)

FAMILIES: tuple[tuple[str, Layout], ...] = (
    ("data", parse_layout("dp2")),
    ("tensor", parse_layout("tp2-dp2")),
    ("tensor, sequence", parse_layout("tp2-sp-dp2")),
    ("pipeline 1f1b", parse_layout("pp2-dp2")),
    ("pipeline interleaved", parse_layout("pp2-interleaved-dp2")),
    ("pipeline dualpipev", parse_layout("pp2-dualpipev-dp2")),
    ("pipeline zbh1", parse_layout("pp2-zbh1-dp2")),
    ("pipeline dualpipev_zb", parse_layout("pp2-dualpipev_zb-dp2")),
    ("tensor, pipeline 1f1b", parse_layout("tp2-pp2-dp2")),
    ("tensor, pipeline interleaved", parse_layout("tp2-pp2-interleaved-dp2")),
    ("tensor, pipeline dualpipev", parse_layout("tp2-pp2-dualpipev-dp2")),
    ("tensor, pipeline zbh1", parse_layout("tp2-pp2-zbh1-dp2")),
    ("tensor, sequence, pipeline 1f1b", parse_layout("tp2-sp-pp2-dp2")),
    ("tensor, sequence, pipeline interleaved", parse_layout("tp2-sp-pp2-interleaved-dp2")),
    ("tensor, sequence, pipeline dualpipev", parse_layout("tp2-sp-pp2-dualpipev-dp2")),
    ("tensor, sequence, pipeline zbh1", parse_layout("tp2-sp-pp2-zbh1-dp2")),
    ("context", parse_layout("cp2")),
    ("tensor, context", parse_layout("tp2-cp2")),
    ("tensor, sequence, context", parse_layout("tp2-sp-cp2")),
    ("pipeline 1f1b, context", parse_layout("pp2-cp2")),
    ("pipeline dualpipev, context", parse_layout("pp2-dualpipev-cp2")),
    ("pipeline zbh1, context", parse_layout("pp2-zbh1-cp2")),
    ("experts", parse_layout("ep2-dp4")),
    ("tensor, experts", parse_layout("tp2-ep2-dp4")),
    ("tensor, sequence, experts whole", parse_layout("tp2-sp-ep4-etp1-dp4")),
    ("context, experts", parse_layout("cp2-ep2-dp4")),
    ("pipeline 1f1b, experts", parse_layout("pp2-ep2-dp4")),
    ("pipeline dualpipev, experts", parse_layout("pp2-dualpipev-ep2-dp4")),
    ("pipeline zbh1, experts", parse_layout("pp2-zbh1-ep2-dp4")),
)
"""Kinds of layouts; a size of 2 represents all larger ones."""

OPTIONS: tuple[tuple[str, Layout], ...] = (
    ("offload_optimizer cpu", Layout(offload_optimizer="cpu")),
    ("offload_param cpu", Layout(offload_param="cpu")),
    ("offload to NVMe", Layout(offload_optimizer="nvme")),
    ("gradients in fp32", Layout(grads_in_fp32=True)),
    ("precision-aware optimizer", Layout(states=StateDtypes())),
    (
        "precision-aware optimizer, gradients in fp32",
        Layout(states=StateDtypes(), grads_in_fp32=True),
    ),
    ("recompute selective", Layout(recompute="selective")),
    ("recompute uniform", Layout(recompute="uniform")),
    ("recompute block", Layout(recompute="block")),
)
"""Options; shown without and with a pipeline, tensor parallel or not."""

INTRODUCTION = """# Supported layouts

A supported layout trains like one process: the same loss, gradients and weights, up to rounding.
Any other is refused at start-up with the reason below. This page is the output of
`python tools/layouts.py --markdown`, from `megatron/config/layouts.py`.

`no8` is refused for reason 8. Size 2 represents all larger sizes. Columns 0 to 3 are ZeRO stages;
bf16 at stage 0 runs as autocast over float32 weights.
"""

LEGEND = """Columns: dtype and ZeRO stage. no8 is refused for reason 8. dropout: which masks equal
those of one process."""

DROPOUT = """*Dropout* says which masks equal those of one process: `all`, those of `hidden`
activations only (attention weights have other masks on each tensor-parallel or context-parallel
process), or `none`.
Without dropout every layout gives the same result; with it, those with `all` do.
"""

NOTES = """All of them support tied and untied embeddings, grouped-query attention (the number of
key-value heads divides the tensor-parallel size or is a multiple of it; with fewer heads than
processes they are replicated), gradient accumulation and `--torch-compile`, whose graphs
contain the collectives of tensor parallelism; modes with CUDA graphs need a layout without a
pipeline at ZeRO 0 to 2.

Every model family trains in all of them, a Retro without a context. The decoder of a T5 starts
where the blocks of encoder and decoder together are divided most evenly, which may be within a
stage; with `1f1b`
`--pipeline-model-parallel-split-rank` starts it at a process. Tensor parallelism and sequence
parallelism cut the sequences of both.

Sizes must also fit: the tensor-parallel size divides attention heads, feed-forward size and, with
sequence parallelism, the sequence lengths; every stage of a pipeline has at least one block. The
expert-parallel size divides the data-parallel size and the experts of every layer. Each process of
a context has two pieces of every sequence, so that twice the context-parallel size (times the
tensor-parallel size with sequence parallelism) divides the sequence lengths; with `a2a` it divides
the query heads of a tensor-parallel process. ZeRO partitions over the data-parallel and the context
processes together.
Accumulating gradients in fp32 has an effect only if they are bf16 or fp16.
"""

NAMES = """## Short names

Tools name a layout by its tokens joined by `-`, without sizes of 1 and other defaults:
`tp2-sp-pp2-interleaved-dp2-zero1-bf16`.

| token | flag |
|---|---|
| `tpN` | `--tensor-model-parallel-size N` |
| `sp` | `--sequence-parallel` |
| `ppN` | `--pipeline-model-parallel-size N` |
| `1f1b` `interleaved` `dualpipev` `zbh1` `dualpipev_zb` | `--pipeline-schedule` |
| `vN` | `--num-virtual-stages-per-pipeline-rank N` |
| `dpN` | N replicas: the number of processes |
| `epN` | `--expert-model-parallel-size N`, among the data-parallel processes: `ep2` is `ep2-dp2` |
| `etp1` | `--expert-tensor-parallel-size 1`; `epN` is then a multiple of `tpN` |
| `cpN` | `--context-parallel-size N` |
| `a2a` `allgather` `a2a+p2p` | `--cp-comm-type`; the last with pairs that exchange heads |
| `zeroN` | `--zero-stage N` |
| `fp32` `bf16` `fp16` | neither, `--bf16`, `--fp16` |
| `selective` | `--recompute-granularity selective` |
| `uniform` `block` | `--recompute-granularity full --recompute-method` |
"""


@dataclass(frozen=True)
class LayoutsConfig:
    """Layouts: how the table is printed."""

    markdown: bool = option(False)
    """Print the page of the documentation, in Markdown."""


def kinds() -> Iterator[tuple[str, Layout]]:
    """Title and layout of every row, without ZeRO stage and dtype."""
    yield from FAMILIES
    for title, added in OPTIONS:
        for place, pipeline in (("", 1), (", pipeline", 2)):
            yield title + place, replace(added, pipeline=pipeline, data=2)


def cells(kind: Layout) -> list[Layout]:
    """The layouts of a row: every dtype, at every ZeRO stage."""
    return [replace(kind, precision=p, zero=zero) for p in PRECISIONS for zero in STAGES]


def mark(layout: Layout) -> str:
    """``yes``, or ``no`` and the number of the reason."""
    rule = refusal(layout)
    return "yes" if rule is None else f"no{RULES.index(rule) + 1}"


def heading() -> list[str]:
    """Columns; the dtype is at the first of its stages."""
    stages = [f"{precision} {zero}" for precision in PRECISIONS for zero in STAGES]
    stages = [name if name.endswith(" 0") else name.split()[1] for name in stages]
    return ["layout", *stages, "dropout"]


def rows() -> list[list[str]]:
    """The table without its heading."""
    return [[title, *map(mark, cells(kind)), kind.dropout] for title, kind in kinds()]


def reasons() -> list[str]:
    return [
        f"{number}. {rule.name}: {rule.explanation(ramp=True)}."
        for number, rule in enumerate(RULES, 1)
    ]


def text() -> str:
    """The table for a terminal."""
    table = [heading(), *rows()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join([*lines, "", LEGEND, "", *reasons()])


def markdown() -> str:
    """The page of the documentation."""
    table = [heading(), ["---"] * len(heading()), *rows()]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join(
        [INTRODUCTION, *lines, "", DROPOUT, "## Reasons", "", *reasons(), "", NOTES, NAMES.rstrip()]
    )


def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_configs((LayoutsConfig,), argv, description=__doc__)
    print(markdown() if config.markdown else text())


if __name__ == "__main__":
    main()
