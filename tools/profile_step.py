#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Breaks a training step down: where its time goes.

    python tools/profile_step.py [the flags of pretrain_gpt.py] --mock-data
    torchrun --nproc-per-node 2 tools/profile_step.py [the flags of pretrain_gpt.py]
    python tools/profile_step.py --trace profile/rank0-step10-12.json.gz

With the flags of a run it trains a few steps and saves nothing; with --trace it reads a trace that
--profile wrote. It prints milliseconds and share of the step of attention, matrix products, norms,
elementwise work, embedding, loss, optimizer, communication, data, copies, host and idle time, each
for the forward pass, the backward pass and the optimizer. docs/guides/profiling.md explains the
table.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.apps.profiling.breakdown import break_down
from megatron.apps.profiling.tables import breakdown_text
from megatron.apps.profiling.trace import read_trace
from megatron.config import ConfigError, Setting, Settings
from megatron.config.flags import option
from megatron.run.process import ending_process, errors_for_users
from megatron.run.run import RunToolParser, run_of, start_processes
from megatron.training.build import train
from megatron.util.errors import one_line
from megatron.util.files import write_whole

_LENGTHS = ("train_iters", "train_samples", "train_tokens")
_OUTPUTS = (
    "save", "save_interval", "async_save", "save_universal", "keep_last", "keep_every",
    "metrics_file", "tensorboard_dir", "wandb_project", "report_to",
    "eval_interval", "exit_interval",
)  # fmt: skip


@dataclass(frozen=True)
class ProfileConfig:
    """The breakdown; all flags of pretrain_gpt.py describe the run."""

    trace: str | None = option(None)
    """Read this trace (plain or gzip) instead of training."""
    least: bool = option(False)
    """With --trace: count every operator as in the step in which it was fastest, for a CPU that
    other programs use too."""
    top: int = option(12)
    """With --trace: number of operators and of shapes to list."""
    json: str | None = option(None)
    """With --trace: write the numbers to this JSON file."""

    def check(self, settings: Settings) -> None:
        if self.trace is None:
            given = [f for f in ("least", "json") if getattr(self, f)]
            if given:
                raise ConfigError(f"--{given[0]} needs --trace, the trace to read")
        elif settings:
            flag = next(iter(settings.values())).origin.removeprefix("flag ")
            raise ConfigError(f"{flag} describes a run to train; --trace reads a recorded one")
        if self.top < 1:
            raise ConfigError(f"--top {self.top} must be positive")


def main(argv: Sequence[str] | None = None) -> None:
    config, settings = RunToolParser(ProfileConfig, __doc__).parse(argv)
    try:
        config.check(settings)
        if config.trace is not None:
            show(config, Path(config.trace))
            return
    except (ValueError, OSError) as error:
        sys.exit(f"profile_step.py: error: {one_line(error)}")
    with errors_for_users(outlives_output=False):
        settings = few_steps(settings)
        train(run_of(settings, start_processes(settings)))


def show(config: ProfileConfig, path: Path) -> None:
    breakdown = break_down(read_trace(path), config.least)
    print(breakdown_text(breakdown, config.top))
    if config.json is not None:
        content = json.dumps(breakdown.to_dict(), indent=1)
        write_whole(Path(config.json), f"{content}\n".encode())


def few_steps(settings: Settings) -> Settings:
    """The settings of a run that ends after the recorded steps and saves nothing."""
    few = {name: setting for name, setting in settings.items() if name not in _OUTPUTS}
    start = few.setdefault("profile_step_start", Setting(3, "profile_step.py")).value
    end = few.setdefault("profile_step_end", Setting(start + 5, "profile_step.py")).value
    forced: dict[str, Any] = {"profile": True, "eval_iters": 0}
    if "load" in few:
        forced["finetune"] = True  # its weights only: training starts at the first step
    if any(name in few for name in _LENGTHS):
        forced["exit_interval"] = end
    else:
        forced["train_iters"] = end
    for name, value in forced.items():
        few[name] = Setting(value, "profile_step.py")
    few.setdefault("lr", Setting(1e-4, "profile_step.py"))
    return few


if __name__ == "__main__":
    with ending_process():
        main()
