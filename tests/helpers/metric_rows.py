"""Rows of metrics as a run writes them, and those of a file."""

from __future__ import annotations

import json

from megatron.training.registry import METRICS, IntervalMetrics


def interval(iteration: int, loss: float = 2.0) -> IntervalMetrics:
    values = dict.fromkeys(METRICS, 1.0)
    for name in ("seq_length", "trained_tokens_per_second"):
        del values[name]
    values |= {"loss": loss, "samples_per_second": 32.0, "tokens_per_second_per_device": 4096.0}
    values |= {"seconds_per_iteration": 0.5, "memory_allocated_bytes": 2**30}
    values |= dict.fromkeys(["grad_norm", "mfu", "hfu", "memory_reserved_bytes"])
    clock = iteration, 100, 16 * iteration, 2048 * iteration
    return IntervalMetrics(*clock, 1, {"lm loss": loss}, values, METRICS)


def write_train(writer, iterations, loss=2.0) -> None:
    for iteration in iterations:
        row = interval(iteration, loss).row()
        writer.scalars("train", iteration, row, samples=16 * iteration, tokens=2048 * iteration)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]
