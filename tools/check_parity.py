#!/usr/bin/env python
"""Compares parallel layouts with one process, on your model and data, before you rent GPUs.

    python tools/check_parity.py --layouts tp2,pp2,tp2-sp-dp2-zero3 --num-layers 4 \
        --hidden-size 64 --num-attention-heads 4 --seq-length 64

Takes the flags of pretrain_gpt.py, layout flags excepted. A layout's name is made of tpN, sp, ppN,
vN, 1f1b/interleaved/dualpipev, dpN, zero0-3, fp32/bf16/fp16, joined by '-' (tools/layouts.py prints
what goes with what). For each: one step in float64, every gradient and layer output compared; then
--train-iters steps through the engine. Exit status: 0 all equal, 1 a difference or failure (the first
parameter or layer output that differs is named), 2 a refused layout or bad input.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.files import write_json
from megatron.config import ConfigError
from megatron.config.layouts import Layout, parse_layout
from megatron.parity.check import Checker, Outcome, smallest_batch

DEFAULTS = {
    "--micro-batch-size": ["1"],
    "--train-iters": ["5"],
    "--lr": ["1e-3"],
    "--eval-iters": ["0"],
    "--num-workers": ["0"],
    "--peak-tflops": ["1"],
}
"""Flags that a check needs and few will want to say."""
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
LAYOUT_FLAGS = (
    "--tensor-model-parallel-size --model-parallel-size --sequence-parallel "
    "--pipeline-model-parallel-size --pipeline-schedule --num-layers-per-virtual-pipeline-stage "
    "--num-virtual-stages-per-pipeline-rank --zero-stage --bf16 --fp16"
).split()


def complete(argv: Sequence[str], layouts: Sequence[Layout]) -> list[str]:
    """The flags, with what a check needs filled in.

    Raises:
        ConfigError: a layout flag is among them.
    """
    given = {word.split("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
    for flag in LAYOUT_FLAGS:
        if flag in given:
            raise ConfigError(f"{flag}: layouts are named by --layouts, as in --layouts tp2,pp2")
    words = list(argv)
    for flag, values in DEFAULTS.items():
        if flag not in given:
            words += [flag, *values]
    if not given & {"--data-path", "--train-data-path", "--mock-data"}:
        words += MOCK[:1]
    if not given & {"--tokenizer-type", "--tokenizer-model", "--vocab-file"}:
        words += MOCK[1:]
    if "--global-batch-size" not in given:
        micro = next(
            (int(w) for f, w in zip(words, words[1:], strict=False) if f == "--micro-batch-size"), 1
        )
        words += ["--global-batch-size", str(smallest_batch(layouts, micro))]
    return words


def show(outcome: Outcome) -> None:
    """Prints what was compared."""
    if outcome.status == "refused":
        print(f"{outcome.layout}: refused: {outcome.reason}", flush=True)
        return
    if outcome.losses:
        print(f"{outcome.layout}{'' if outcome.dropout else ' (dropout off)'}")
        print("  step   loss, one process   difference   norm, one process   difference")
        steps = zip(outcome.losses, outcome.norms, outcome.reference, strict=True)
        for step, (loss, norm, (plain_loss, plain_norm)) in enumerate(steps, 1):
            print(
                f"  {step:4}   {plain_loss:17.7f}   {loss - plain_loss:10.1e}   "
                f"{plain_norm:17.6f}   {norm - plain_norm:10.1e}"
            )
        print(
            f"  largest differences: loss {outcome.drift[0]:.1e}, norm {outcome.drift[1]:.1e} "
            f"(one process in other orders of summation: {outcome.noise[0]:.1e}, "
            f"{outcome.noise[1]:.1e})"
        )
    reason = f": {outcome.reason}" if outcome.reason else ""
    print(f"{outcome.layout}: {outcome.status}{reason}", flush=True)


def check(argv: Sequence[str] | None = None) -> int:
    """Checks the layouts of a command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--layouts", required=True, help="names, separated by commas")
    parser.add_argument("--json", help="file for the outcomes")
    own, rest = parser.parse_known_args(argv)
    layouts = [parse_layout(name) for name in own.layouts.split(",")]
    checker = Checker(complete(rest, layouts))
    outcomes = []
    for layout in layouts:
        outcomes.append(checker.check(layout))
        show(outcomes[-1])
    if own.json:
        write_json(Path(own.json), [dataclasses.asdict(outcome) for outcome in outcomes])
    statuses = {outcome.status for outcome in outcomes}
    return 1 if statuses & {"different", "failed"} else 2 if "refused" in statuses else 0


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    try:
        sys.exit(check(argv))
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
