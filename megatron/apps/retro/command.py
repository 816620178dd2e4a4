"""Command line of ``tools/retro/preprocess_data.py``, which runs the stages of a project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from megatron.apps.retro.blocks import connected, naming_full_disks
from megatron.apps.retro.config import RetroPreprocessConfig
from megatron.apps.retro.database import build_database
from megatron.apps.retro.index.stages import add_to_index, train_index
from megatron.apps.retro.preprocessing import Preprocessing, configured
from megatron.apps.retro.query import query_neighbors
from megatron.config import ConfigError
from megatron.config.flags import ConfigResolver, build, nearest
from megatron.features.retro.hdf5 import needed_h5py
from megatron.run.run import RunToolParser, start_processes
from megatron.training.report import show_log

STAGES: dict[str, Callable[[Preprocessing], None]] = {
    "db-build": build_database,
    "index-train": train_index,
    "index-add": add_to_index,
    "query-neighbors": query_neighbors,
}
"""Stages by name, in the order in which they must run."""
GROUPS = {"build": tuple(STAGES), "index-build": ("index-train", "index-add")}
_SPELLINGS = {
    "query-pretraining-neighbors": "query-neighbors",
    "pretraining-query-neighbors": "query-neighbors",
}
"""Alternative task names: those of 2023, and a misspelling in upstream's documentation."""


def run_preprocessing(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Run the tasks that the command line selects. Raises ValueError or OSError, naming the flag or
    file, if a flag or file cannot be used."""
    show_log()
    settings = RunToolParser(RetroPreprocessConfig, description).settings(argv)
    ConfigResolver((RetroPreprocessConfig,), settings)
    stages = stages_of(build(RetroPreprocessConfig, settings).retro_tasks)
    needed_h5py()  # fail now, not after hours of work
    processes = start_processes(settings, argv)
    with connected(settings, processes), ExitStack() as locks:
        work = configured(settings, locks)
        for stage in stages:
            with naming_full_disks(work.project.folder, stage):
                STAGES[stage](work)


def stages_of(tasks: str) -> list[str]:
    """Return the stages of ``--retro-tasks``, in order. Raises ConfigError for unknown tasks."""
    stages: list[str] = []
    for task in tasks.split(","):
        name = _SPELLINGS.get(task.strip(), task.strip())
        if name not in STAGES and name not in GROUPS:
            known = (*GROUPS, *STAGES)
            hint = nearest(name, known, "; the nearest is {}")
            raise ConfigError(f"--retro-tasks {task}: the tasks are {', '.join(known)}{hint}")
        stages += GROUPS.get(name, (name,))
    return stages
