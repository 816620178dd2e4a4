#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Compares parallel layouts with one process, on your model and data, before you rent GPUs.

    python tools/check_parity.py --layouts tp2,pp2,tp2-sp-dp2-zero3 --num-layers 4 \
        --hidden-size 64 --num-attention-heads 4 --seq-length 64

A correct layout trains like one process: from the same weights and the same data it gets the same
loss and gradients, however the model is cut. For each layout this command starts the processes on
this machine's CPU and compares

  1. one step in float64: every layer's output, the loss, every gradient;
  2. some steps through DeepSpeed's engine: loss and gradient norm of each, and after the first
     one every gradient and every new weight.

It prints the numbers next to those of one process and, for a layout that differs, the first
difference. docs/guides/parity.md explains them.

With --symbolic it checks a run's own flags, of any size, without its processes:

    python tools/check_parity.py --symbolic --ranks 1024 --num-layers 126 --hidden-size 16384 ...

All ranks of a small model with the same layers and layout run in this process, step by step, on
simulated process groups, and are compared with one process in float64.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.apps.parity.check import (
    HALF_LOSS,
    HALF_NORM,
    Checker,
    CheckFlags,
    Outcome,
    check_flags,
)
from megatron.apps.parity.layouts import parse_layout
from megatron.apps.parity.runs import FACTOR, FIRST_STEP
from megatron.apps.parity.symbolic.check import check_run
from megatron.checkpoint.files import write_json
from megatron.config import ConfigError, Settings
from megatron.config.flags import POSITIVE, option
from megatron.config.layouts import Layout
from megatron.families import family_of
from megatron.run.run import RunToolParser
from megatron.util.errors import one_line

EPILOG = """All flags of pretrain_gpt.py (see its --help), with --model-family those of that
family's program, describe model, data, optimizer and batch; layouts are named by --layouts instead.
The default data are synthetic tokens, the default --global-batch-size is the smallest that all
layouts accept. A small model of the same kind finds the same differences as a large one: a few
layers, a few heads, short sequences.

Layouts are made of tpN (tensor parallel over N processes), sp (sequence parallel), ppN (pipeline),
a pipeline schedule such as zbh1, vN (stages per process), dpN (replicas), epN and etp1
(experts divided over N processes, and whole), zero0 to zero3, fp32, bf16 or fp16, and selective,
uniform or block (recomputation), joined by '-'.
`python tools/layouts.py` shows which of them can be combined.

Exit status: 0 if all layouts are equal; 1 if one differs or its processes failed; 2 if one is
refused (the reason is printed) and none differs, or if the command line is wrong.

--symbolic takes the layout's own flags (--tensor-model-parallel-size, ...) instead of --layouts.
Limits: a step in float64 without dropout; DeepSpeed's engine, compiled code and GPU kernels do not
run; of more than 256 ranks fewer replicas, experts' and contexts' ranks are simulated."""


@dataclass(frozen=True)
class ParityConfig:
    """Options of this command."""

    layouts: str | None = option(None)
    """Names of the layouts to compare, separated by commas: tp2,pp2,tp2-sp-dp2-zero3."""
    steps: int = option(5)
    """Steps to train through DeepSpeed's engine, at most the length of the run if it is given."""
    json: str | None = option(None)
    """Write the results with all numbers to this JSON file."""
    symbolic: bool = option(False)
    """Check the run that the other flags describe on simulated ranks, at any size."""
    ranks: int | None = option(None, bounds=POSITIVE)
    """Processes of that run."""


def _settings(argv: Sequence[str] | None) -> tuple[ParityConfig, Settings]:
    return RunToolParser(ParityConfig, __doc__, EPILOG).parse(argv)


def parse(argv: Sequence[str] | None) -> tuple[ParityConfig, dict[str, Layout], CheckFlags]:
    """This command's options, the layouts by name, and the flags of their runs.

    Raises:
        ConfigError: something is missing, unknown or contradicted.
    """
    config, others = _settings(argv)
    if config.layouts is None:
        raise ConfigError(
            "--layouts is missing: the layouts to compare with one process, as in --layouts tp2,pp2"
        )
    if config.steps < 1:
        raise ConfigError(f"--steps {config.steps} must be at least 1")
    if config.json and not Path(config.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {config.json}: its folder does not exist")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("start this command with plain python: it starts the processes itself")
    layouts = {name: parse_layout(name) for name in config.layouts.split(",")}
    return config, layouts, check_flags(others, list(layouts.values()), config.steps)


def introduction(checker: Checker, flags: CheckFlags) -> str:
    """The model and the bounds."""
    model, training = checker.config.model, checker.config.training
    # Of an encoder and a decoder both numbers are shown.
    stacks = Counter(family_of(model.family).block_lengths(model))
    layers = " + ".join(map(str, stacks.values()))
    tokens = " + ".join(str(lengths.own) for lengths in stacks)
    lines = [
        f"Model: {layers} layers of width {model.hidden_size}, {model.vocabulary.padded} "
        f"rows of vocabulary; sequences of {tokens} tokens, {training.global_batch_size} "
        f"per step, {training.micro_batch_size} per micro batch.",
        "Bounds:\n  float64: 1e-12 x the largest value.",
        f"  fp32: {FIRST_STEP:g} x loss and gradient norm at the first step, then {FACTOR} x "
        "the effect of rounding on one process.",
        f"  bf16, fp16: {HALF_LOSS:g} x the loss and {HALF_NORM:g} x the gradient norm of one "
        "process in fp32.",
    ]
    if flags.left_out:
        lines.append(f"Ignored by this check: {' '.join(sorted(flags.left_out))}")
    return "\n".join([*lines, ""])


def heading(name: str, outcome: Outcome) -> str:
    """The layout, its processes, and dropout."""
    more = [f"{outcome.processes} process{'es' * (outcome.processes > 1)}"]
    if outcome.resolved != name:
        more.append(f"in full {outcome.resolved}")
    if outcome.dropout_off:
        more.append(f"without {outcome.dropout_off}, whose masks differ from those of one process")
    return f"{name} ({', '.join(more)})"


def details(outcome: Outcome) -> str:
    """Step by step, and the result."""
    lines = []
    if outcome.status != "refused":
        lines.append(heading(outcome.layout, outcome))
    if outcome.losses:
        lines.append(
            "  step          loss   one process   difference "
            "  gradient norm   one process   relative"
        )
        rows = zip(
            outcome.losses, outcome.plain_losses, outcome.norms, outcome.plain_norms, strict=True
        )
        for step, (loss, plain_loss, norm, plain_norm) in enumerate(rows, 1):
            lines.append(
                f"  {step:4}  {loss:12.7f}  {plain_loss:12.7f}   {loss - plain_loss:10.1e}   "
                f"{norm:13.7f}  {plain_norm:12.7f}   {norm / plain_norm - 1:8.1e}"
            )
    reason = f": {outcome.reason}" if outcome.reason else ""
    return "\n".join([*lines, f"{outcome.layout}: {outcome.status}{reason}", ""])


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line for each layout."""
    table = [("layout", "result", "loss", "allowed", "norm", "allowed", "")]
    for a in outcomes:
        numbers = ("",) * 4
        if a.largest and a.allowed:
            figures = (a.largest.loss, a.allowed.loss, a.largest.norm, a.allowed.norm)
            numbers = tuple(f"{number:.1e}" for number in figures)  # type: ignore[assignment]
        # The last line of a process says what happened.
        lines = a.reason.splitlines()
        reason = " ".join(dict.fromkeys((*lines[:1], *(line.strip() for line in lines[-1:]))))
        table.append((a.layout, a.status, *numbers, reason))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join(
        ["Largest differences from one process (loss absolute, norm relative):", *lines]
    )


def to_json(value: Any) -> Any:
    """The same as JSON values, whose numbers are finite."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_symbolically(config: ParityConfig, settings: Settings) -> int:
    """Checks the run of a command line on simulated ranks; returns the exit status."""
    for flag, value in (("--layouts", config.layouts), ("--ranks is missing", not config.ranks)):
        if value:
            raise ConfigError(
                f"{flag}: --symbolic checks the layout of the run's own flags, on as many "
                "processes as --ranks says, as in --symbolic --ranks 16 "
                "--tensor-model-parallel-size 8"
            )
    assert config.ranks is not None
    report = check_run(settings, config.ranks, say=partial(print, flush=True))
    print(f"different: {report.fault}" if report.fault else "equal")
    if config.json:
        write_json(Path(config.json), to_json(dataclasses.asdict(report)))
    return 1 if report.fault else 0


def check(argv: Sequence[str] | None = None) -> int:
    """Checks the layouts of a command line; returns the exit status."""
    config, settings = _settings(argv)
    if config.symbolic:
        return check_symbolically(config, settings)
    config, layouts, flags = parse(argv)
    checker = Checker(flags)
    print(introduction(checker, flags), flush=True)
    outcomes = []
    for name, layout in layouts.items():
        outcomes.append(checker.check(name, layout))
        print(details(outcomes[-1]), flush=True)
    print(summary(outcomes), flush=True)
    if config.json:
        write_json(Path(config.json), to_json([dataclasses.asdict(a) for a in outcomes]))
    statuses = {outcome.status for outcome in outcomes}
    return 1 if statuses & {"different", "failed"} else 2 if "refused" in statuses else 0


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(check(argv))
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
