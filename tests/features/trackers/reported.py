"""A small run's reports: it reaches step 4, and continues from the checkpoint of step 2."""

from __future__ import annotations

import dataclasses

from megatron.config.output import LoggingConfig
from megatron.training.registry import WrittenText, WrittenTexts
from megatron.training.writers import build_writers

FLAGS = {"tracker_project": "tests", "run_name": "small"}
CONFIGURATION = {"model": {"hidden_size": 32}, "training": {"lr": [1, 2], "long": "x" * 9000}}
TEXTS = WrittenTexts(2, (WrittenText("Once", " upon\na time", "", True),))


def write(report_to: str, **flags) -> None:
    """Reports both parts of the run."""
    config = dataclasses.replace(LoggingConfig(), report_to=(report_to,), **FLAGS, **flags)
    for first, last, offset in ((1, 4, 0.0), (3, 5, 10.0)):
        writer = build_writers(
            config,
            resume_iteration=first - 1,
            resume_samples=8 * (first - 1),
            configuration=CONFIGURATION,
        )
        if first > 1:
            writer.scalars("resume", first - 1, {}, samples=8 * (first - 1), tokens=0)
        for step in range(first, last + 1):
            samples = 8 * step
            row = {"loss": offset + step, "grad_norm": None, "mfu": 0.5, "rewards/margins": 1.0}
            writer.scalars("train", step, row, samples=samples, tokens=100 * step)
        writer.scalars("validation more", last, {"loss": 7.0}, samples=8 * last, tokens=0)
        writer.scalars("task a", last, {"bits_per_byte": 0.5}, samples=8 * last, tokens=0)
        if first == 1:
            writer.texts(TEXTS, samples=16, tokens=200)
        writer.close()


FIRST, SECOND = [(step, float(step)) for step in range(1, 5)], [(3, 13.0), (4, 14.0), (5, 15.0)]
"""The loss of the two runs by their steps."""
