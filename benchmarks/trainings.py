"""Shared parts of the benchmarks of losses: their flags, and a training."""

from __future__ import annotations

import argparse

from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.engine.environment import distributed
from megatron.run.run import Run


def new_parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    """A parser of the length of a training, its other flags, and where to write its losses."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--steps", type=int, default=steps)
    result.add_argument("--json", help="also write all losses to this file")
    result.add_argument("flags", nargs="*", help="more flags of training, after --")
    return result


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds what :func:`data_flags` reads, and ``--plot``."""
    parser.add_argument("--data", required=True, help="made with --split-sentences")
    parser.add_argument("--vocab-file", required=True, help="of the same WordPiece vocabulary")
    parser.add_argument("--plot", help="a PNG file of the losses")


def data_flags(options: argparse.Namespace) -> list[str]:
    """The flags of a run's data and length, and those that follow ``--``."""
    data = ["--data-path", options.data, "--vocab-file", options.vocab_file]
    return [*data, "--train-iters", str(options.steps), *options.flags]


def losses_of(run: Run) -> list[float]:
    """Trains; the losses of all steps."""
    record = RunRecord()
    with distributed(run.config.parallel) as mesh:
        watched_trainer(run, mesh, record.add).fit()
    return record.losses
