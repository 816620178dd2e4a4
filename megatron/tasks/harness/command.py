"""An evaluation with lm-eval, from a command line."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.engine.environment import distributed
from megatron.tasks.command import task_settings
from megatron.tasks.harness.config import HarnessConfig
from megatron.training.launch import start_processes
from megatron.training.run import RunToolParser
from megatron.util.files import write_whole
from megatron.util.processes import is_main_process


def run_evaluation(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Evaluates the checkpoint of a command line. Raises ValueError or OSError if a flag, a file or
    a checkpoint cannot be used; the message names it."""
    config, settings = RunToolParser(HarnessConfig, description).parse(argv)
    require_harness()
    start_processes(settings, argv)
