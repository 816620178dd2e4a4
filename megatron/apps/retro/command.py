"""The command line of ``tools/retro/preprocess_data.py``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pkgutil import resolve_name

from megatron.apps.retro.blocks import naming_full_disks
from megatron.apps.retro.config import TASK_SPELLINGS, RetroPreprocessConfig
from megatron.apps.retro.configure import configured
from megatron.config import ConfigError, ParallelConfig, Setting, Settings
from megatron.config.flags import ConfigResolver, build, nearest
from megatron.engine.environment import distributed
from megatron.features.retro.hdf5 import needed_h5py
from megatron.run.fingerprint import given_facts, program_facts
from megatron.run.launch import start_processes
from megatron.run.run import RunToolParser
from megatron.training.report import show_log

STAGES = {
    "db-build": "megatron.apps.retro.database.building:build_database",
    "index-train": "megatron.apps.retro.index.training:train_index",
    "index-add": "megatron.apps.retro.index.adding:add_to_index",
    "query-neighbors": "megatron.apps.retro.query.neighbors:query_neighbors",
}
"""The stages in their order: functions of :class:`Preprocessing`, imported when they run."""
_WAITING_MINUTES = 14.0 * 24 * 60
GROUPS = {"build": tuple(STAGES), "index-build": ("index-train", "index-add")}


def run_preprocessing(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs the tasks of a command line. Raises ValueError or OSError if a flag or file cannot be
    used; the message names it."""
    show_log()
    settings = RunToolParser(RetroPreprocessConfig, description).settings(argv)
    ConfigResolver((RetroPreprocessConfig,), settings)
    stages = stages_of(build(RetroPreprocessConfig, settings).retro_tasks)
    needed_h5py()  # not after hours of work
    processes = start_processes(settings, argv)
    with connected(settings) if processes > 1 else nullcontext(), ExitStack() as held:
        work = configured(settings, held)
        for stage in stages:
            with naming_full_disks(work.project.folder, stage):
                resolve_name(STAGES[stage])(work)


def connected(settings: Settings) -> AbstractContextManager[object]:
    """The processes of a run, which wait for the slowest one, for days if no flag says else. They
    exchange nothing but that they have finished, so that gloo does on GPUs, too."""
    minutes = settings.get("distributed_timeout_minutes", Setting(_WAITING_MINUTES, "default"))
    local_rank = settings.get("local_rank", Setting(None, "default"))
    return distributed(
        ParallelConfig(
            distributed_backend="gloo",
            distributed_timeout_minutes=minutes.value,
            local_rank=local_rank.value,
        ),
        lambda: {**given_facts(settings), **program_facts()},
    )


def stages_of(tasks: str) -> list[str]:
    """The stages of ``--retro-tasks``, in the order given. ConfigError if one is unknown."""
    found: list[str] = []
    for task in tasks.split(","):
        name = TASK_SPELLINGS.get(task.strip(), task.strip())
        if name not in STAGES and name not in GROUPS:
            known = (*GROUPS, *STAGES)
            hint = nearest(name, known, "; the nearest is {}")
            raise ConfigError(f"--retro-tasks {task}: the tasks are {', '.join(known)}{hint}")
        found += GROUPS.get(name, (name,))
    return found
