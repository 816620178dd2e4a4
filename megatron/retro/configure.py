"""The configuration of a project: written by its first stage, compared by the others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron.config import ConfigError, DataConfig, Settings, TokenizerConfig
from megatron.data.kinds.retro.project import CONFIG_FILE, GPT, RetroProject
from megatron.retro.blocks import barrier
from megatron.retro.config import PreprocessConfig
from megatron.retro.gpt_run import gpt_run, gpt_settings
from megatron.training.plan import TrainingPlan
from megatron.training.run import Run
from megatron.util.files import write_whole
from megatron.util.processes import is_main_process


def configured_project(
    config: PreprocessConfig, settings: Settings
) -> tuple[RetroProject, PreprocessConfig]:
    """The project of ``--retro-project-dir`` and the flags, completed by its ``config.json``; which
    is written if there is none. ConfigError if the flags contradict it."""
    if config.retro_project_dir is None:
        raise ConfigError("missing --retro-project-dir: the folder of the project")
    folder = Path(config.retro_project_dir)
    if not (folder / CONFIG_FILE).exists():
        content = _content(config, gpt_run(gpt_settings(config, settings)))
        barrier()  # nobody writes while all look
        if is_main_process():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / CONFIG_FILE, json.dumps(content, indent=2).encode())
        barrier()
    return RetroProject(folder), config


def project_run(project: RetroProject) -> Run:
    """The run of a GPT whose samples get neighbours, from the project's configuration."""
    found = project.data_settings()
    return gpt_run({name: value for name, value in found.items() if not name.startswith("retro_")})


def _content(config: PreprocessConfig, run: Run) -> dict[str, Any]:
    """What ``config.json`` has."""
    training = run.config.training
    counts = TrainingPlan(run.config).sample_counts
    return {
        "retro_gpt_chunk_length": config.retro_gpt_chunk_length,
        "retro_gpt_seq_length": run.config.model.seq_length,
        "retro_gpt_seed": training.seed,
        "retro_gpt_global_batch_size": training.global_batch_size,
        "retro_gpt_eval_interval": training.eval_interval,
        "retro_gpt_eval_iters": training.eval_iters,
        "retro_gpt_train_samples": counts[0],
        "retro_gpt_valid_samples": counts[1],
        "retro_gpt_test_samples": counts[2],
        "retro_block_size": config.retro_block_size,
        "retro_doc_block_size": config.retro_doc_block_size,
        **_given(run.config.data),
        **_given(run.config.tokenizer),
        "retro_gpt_split": run.config.data.split,
        "retro_neighbor_dirs": {},
    }


def _given(part: DataConfig | TokenizerConfig) -> dict[str, Any]:
    """The values that are not the default, under the project's names."""
    return {
        GPT + field.name: getattr(part, field.name)
        for field in dataclasses.fields(part)
        if getattr(part, field.name) != field.default
    }
