"""Open a checkpoint for generation, from the flags of a command."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.apps.generation.execution.adapters import (
    ServedAdapters,
    named_folders,
    served_adapters,
)
from megatron.apps.generation.execution.runner import (
    PagedRunner,
    has_states,
    page_shape,
    page_size_of,
    state_shape,
)
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.generation.memory import CacheConfig
from megatron.checkpoint.files import CheckpointError
from megatron.config import ConfigError, Setting, Settings
from megatron.engine.train_engine import ModelEngine
from megatron.families import family_of
from megatron.features.evaluation.checkpoints import opened_checkpoint
from megatron.run.run import Run
from megatron.tokenizer import Tokenizer
from megatron.util.processes import is_main_process
from megatron.util.progress import say

_OWN = Setting(False, "this program")
_ONE = Setting(1, _OWN.origin)


@dataclass(frozen=True)
class OpenedRunner:
    """Checkpoint loaded from ``folder`` for generation, with its run. ``ends`` contains the tokens
    that end a text."""

    run: Run
    tokenizer: Tokenizer
    runner: PagedRunner
    folder: Path
    iteration: int | None
    ends: frozenset[int]


@contextmanager
def opened_runner(
    settings: Settings,
    processes: int,
    cache: CacheConfig,
    adapters: Sequence[str] = (),
    retrieves: bool = False,
) -> Iterator[OpenedRunner | None]:
    """Load the checkpoint of ``--load`` in the layout that the flags set. On the main rank, yield
    the runner. Other ranks compute the main rank's steps until it leaves the context, then yield
    None. ``adapters`` contains the values of ``--adapter``. Raises ConfigError, CheckpointError or
    OSError if the checkpoint cannot be used."""
    settings = for_generation(settings)
    load = settings["load"].value if "load" in settings else "."
    with _naming_rights(load), opened_checkpoint(settings, processes, "generation") as opened:
        mesh, tokenizer = opened.engine.mesh, opened.run.tokenizer
        experts = opened.run.config.parallel.expert_model_parallel_size
        if mesh.group("expert").size > 1:
            raise ConfigError(
                f"--expert-model-parallel-size {experts}: generation has no data-parallel replicas "
                "to divide experts over; leave it out, or divide them over tensor-parallel ranks: "
                f"--tensor-model-parallel-size {experts} --expert-tensor-parallel-size 1"
            )
        if mesh.dense.size > 1:
            raise ConfigError(
                f"{mesh.world.size} processes for a model over {mesh.model.size}: generation has "
                "no data-parallel replicas; start as many processes as --tensor-model-parallel-size"
                " x --pipeline-model-parallel-size, and another server for each replica"
            )
        served = served_adapters(opened.engine, named_folders(adapters), opened.folder)
        where = f"--load {opened.folder}"
        runner = runner_of(opened.engine, tokenizer, cache, where, served, retrieves)
        if not runner.main:
            runner.follow()
            yield None
            return
        try:
            yield OpenedRunner(
                opened.run, tokenizer, runner, opened.folder, opened.iteration, opened.ends
            )
        finally:
            runner.close()


@contextmanager
def _naming_rights(load: str) -> Iterator[None]:
    """If opening fails because a file of the checkpoint is not readable, raise ConfigError."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        files = itertools.chain([Path(load)], Path(load).rglob("*"))
        locked = next((f for f in files if f.exists() and not os.access(f, os.R_OK)), None)
        if locked is None:
            raise
        raise ConfigError(
            f"--load {load}: this user may not read {locked}; change its rights (chmod u+rX), or "
            "name a copy"
        ) from error


def runner_of(
    engine: ModelEngine,
    tokenizer: Tokenizer,
    cache: CacheConfig,
    where: str = "--load",
    adapters: ServedAdapters | None = None,
    retrieves: bool = False,
) -> PagedRunner:
    """Return this rank's runner for an engine whose settings come from :func:`for_generation`.
    Collective: every rank must call it. Each data-parallel replica has its own main rank. ``where``
    describes the checkpoint in messages. With ``retrieves``, every part of a step must provide the
    neighbours of its chunks. Raises ConfigError if the model family does not support generation or
    retrieval, or if memory is too small."""
    config, mesh = engine.config, engine.mesh
    assert not config.parallel.sequence_parallel, "see for_generation"
    family = family_of(config.model.family)
    if not family.generates:
        raise ConfigError(
            f"{where}: a model of the family {family.name} does not generate text token by token; "
            "name a checkpoint of another family"
        )
    stages, generation = StagedLayers.of(engine), family.generation(config, tokenizer)
    if retrieves and generation.neighbors is None:
        raise ConfigError(
            f"{where}: a model of the family {family.name} reads no retrieved text: leave out "
            "--retro, or name a checkpoint of pretrain_retro.py with --retro-add-retriever"
        )
    if generation.neighbors is not None and not retrieves:
        if is_main_process():
            say(f"{where}: without --retro the model's attention to retrieved text is left out")
        generation = generation._replace(neighbors=None)
    drafts = cache.drafts(config.model)
    shape = page_shape(stages, config.model, page_size_of(generation), generation.neighbors, drafts)
    slots, states = cache.texts, state_shape(stages, config.model)
    if has_states(config.model):
        slots = cache.slots(states, shape, engine.device, mesh.world)
    taken = slots * states.bytes
    pages = cache.pages(shape, generation.max_positions, engine.device, mesh.world, taken)
    return PagedRunner(
        stages, config.model, generation, pages, adapters=adapters, slots=slots, drafts=drafts
    )


def for_generation(settings: Settings) -> Settings:
    """Return the settings with those that only apply to training disabled: sequence and context
    parallelism, and compiled blocks, because generation has many shapes."""
    replaced = {"sequence_parallel": _OWN, "torch_compile": Setting("off", _OWN.origin)}
    replaced |= dict.fromkeys(("context_parallel_size", "ds_sequence_parallel_size"), _ONE)
    for name in ("cp_comm_type", "hierarchical_context_parallel_sizes"):
        replaced[name] = Setting((), _OWN.origin)
    replaced["force_ds_sequence_parallel"] = _OWN
    return {name: value for name, value in settings.items() if name not in replaced} | replaced
