"""From a run to a trainer: data, engine, checkpoints, and what happens around the steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from megatron.apps.tasks.flags import EvalTasksConfig
from megatron.config import (
    RunConfig,
)
from megatron.data.build import DataFile
from megatron.data.indexed.dataset import read_mark
from megatron.data.indexed.dataset_checks import verify_checksums
from megatron.data.loader import TrainingData
from megatron.engine.build import build_engine
from megatron.engine.deepspeed_folder import checkpoint_writer
from megatron.engine.environment import training_device
from megatron.engine.saving import hold_folder, ruined
from megatron.engine.train_engine import TrainEngine
from megatron.families.trained import trained_spec
from megatron.features.distillation.flags import DistillationConfig
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.profiling.callback import profiling
from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.generation import current
from megatron.features.resilience.unattended.replicas import ReplicaCheck
from megatron.features.resilience.unattended.spikes import SpikeGuard, stop_at_spike
from megatron.parallel.mesh import Mesh
from megatron.run.process import (
    compare_checkpoints,
    compare_data,
    compare_folders,
    connected,
)
from megatron.run.run import Run, run_data
from megatron.training import resume
from megatron.training.checkpoints import CheckpointManager
from megatron.training.plan import Epochs, TrainingPlan
from megatron.training.report import Reporter, say
from megatron.training.resume import ResumePoint, ResumeSource
from megatron.training.stopping import NonFiniteGuard, Stopping, StopRequest
from megatron.training.trainer import Callback, Position, Trainer
from megatron.util.files import Lock

BEST_EVALUATION = "megatron.features.keep_best.callback:BestEvaluation"
"""The callback of ``--keep-best`` and ``--early-stopping-patience``, imported for them only."""

EVAL_TASKS = "megatron.apps.tasks.during_training:EvalTasks"
"""The callback of ``--eval-tasks``, which is made of the run's configuration and its tokenizer. It
uses training and is imported for runs with the flag only."""

REFERENCE = "megatron.features.preference.reference:add_reference"
"""Adds what a reference model finds to the data of a run whose loss needs it. It is called with the
run, the mesh and the data, and imported for such runs only."""

INPUTS = "megatron.run.inputs:compared_inputs"
"""The models and texts that a run uses besides its data, compared with those of the checkpoint that
it continues. It is called with the configuration and that, and imported for runs that save or
load."""

COMPARISONS = "megatron.features.preference.comparisons:compare_ahead"
"""Makes an engine compute what kto compares answers with. It is called with the engine, and
imported for such runs only."""

DISTILLATION = "megatron.features.distillation.callback:Distillation"
"""The callback of ``--kd``, which is made of a run and imported for runs with the flag only."""

SECOND_LOOK = "megatron.features.resilience.unattended.second_look:SecondLook"
"""What ``--rerun-on-anomaly`` does with a step before its update; imported for runs with it."""

STRAGGLERS = "megatron.features.resilience.unattended.stragglers:Stragglers"
"""The callback that compares the ranks' own times, imported where there are several."""
ELASTIC = "megatron.features.resilience.elastic"
"""The callback of runs whose number of nodes may change, imported where torchrun has started
several processes."""
ROLLBACK = "megatron.features.resilience.unattended.rollback:Rollback"
"""What ``--on-spike rollback`` does, imported for it only."""
NODE_CHECKPOINTS = "megatron.features.resilience.unattended.node_memory:NodeCheckpoints"
"""The callback of ``--non-persistent-save-interval``, which is made of the engine and imported for
runs with the flag only."""
SPENDING = "megatron.features.energy.callback:SpendingCounter"
"""The callback that counts energy and cost. It is imported for runs that train."""
HOSTS = "megatron.features.run_record.hosts"
"""Where the ranks of a run are, imported where there are several, or a record is written."""
RUN_RECORD = "megatron.features.run_record.callback:RunRecorder"
"""The callback that records how a run was started, imported for runs that save."""
RESTARTED = "megatron.features.resilience.unattended.restarted:restarted"
"""The callback of ``--inprocess-restart``, imported for runs with the flag only."""

FITS = "megatron.apps.planning.fit:check_fits"
"""Refuses a model that memory has no room for. It uses training, hence the name."""

MARK = "megatron.tokenizer.mark:mark_of"
"""Tells tokenizers apart. A checkpoint has the mark of its tokenizer, with which a run that
continues it is compared."""
MARK_FILE = "tokenizer/mark.json"

GENERATION = "megatron.checkpoint.generation_settings"
"""The settings of generation of models that have them."""

ANSWER_ENDS = "megatron.features.instruction.example_checks:answer_ends"
"""Tells the tokens at which examples teach a model to end a text; imported for such data only."""

EXAMPLE_CHECKS = "megatron.features.instruction.run_checks:warn_of_examples"
"""Warns of what is probably wrong with instructions and preferences. It is called with the run and
its data, and imported for such data only."""


def add_reference(run: Run, mesh: Mesh, data: TrainingData) -> None:
    """Adds what a reference model finds to the data, if the loss of the run needs it. Raises
    ValueError or OSError, naming the flag, if there is no reference or it cannot be used."""
    if run.config.section(PreferenceConfig).needs_reference:
        resolve_name(REFERENCE)(run, mesh, data)


def build_trainer(
    run: Run,
    mesh: Mesh,
    callbacks: Sequence[Callback] = (),
    data: TrainingData | None = None,
    epochs: Epochs | None = None,
    notes: Mapping[str, Any] | None = None,
    brief: bool = False,
) -> Trainer:
    """The trainer of a run: model, data, checkpoints, logging and signals. ``callbacks`` are called
    before those of the run; ``data`` take the place of the run's own, and ``epochs`` that of its
    length; checkpoints keep the objects ``notes``; ``brief`` are short log lines. Raises ValueError
    or OSError if data or checkpoints cannot be used; the message names them."""
    config, device = run.config, training_device()
    evaluated = config.section(EvalTasksConfig).eval_tasks
    tasks = [resolve_name(EVAL_TASKS)(config, run.tokenizer)] if evaluated else []
    compare_folders(config)
    resolve_name(FITS)(config, run.content, mesh, device)
    data = data or run_data(run)
    if config.data.verify_data:
        verify_checksums([file.path for file in data.files()], mesh.world.rank, mesh.world.size)
    compare_data(data)
    request = StopRequest(
        config.training.exit_duration_in_mins,
        run.launched,
        config.training.kill_switch_file,
        started=None if (guarded := current()) is None else guarded.started,
    )
    plan = TrainingPlan(config, epochs)
    lock = hold_folder(config.checkpoint.save, mesh.world, device, say)
    checkpoint = resume.locate(config)
    compare_checkpoints([None if checkpoint is None else checkpoint.found], config)
    noted, changed = dict(notes or {}), list[str]()
    if checkpoint is not None or config.checkpoint.save:
        inputs, changed = resolve_name(INPUTS)(config, checkpoint)
        noted |= {"inputs": inputs} if inputs else {}
    if data.weighed:
        resolve_name(EXAMPLE_CHECKS)(run, data)
    add_reference(run, mesh, data)
    teaching = [resolve_name(DISTILLATION)(run)] if config.section(DistillationConfig).kd else []
    spec = trained_spec(config)
    engine = build_engine(config, run.content, spec, mesh, device)
    files = data.files() if checkpoint is not None or config.checkpoint.save else []
    saved = [file._asdict() for file in files]
    in_memory, on_disk = [], checkpoint
    if config.section(ResilienceConfig).non_persistent_save_interval is not None:
        in_memory = [resolve_name(NODE_CHECKPOINTS)(engine)]
        checkpoint = in_memory[0].newest(on_disk)
    begin = resume.load(engine, plan, checkpoint, files)
    begin = dataclasses.replace(begin, changed=(*begin.changed, *changed))
    _check_tokenizer(run, begin)
    save_tokenizer = _tokenizer_writer(run, data, begin)
    writer = checkpoint_writer(engine, run.content, save_tokenizer, saved)
    if begin.skip_samples != config.data.skip_samples:
        data = data.skipping(begin.skip_samples)
    if config.section(PreferenceConfig).preference == "kto":
        resolve_name(COMPARISONS)(engine)
    sizes = list if data.weighed else data.sizes  # examples are padded
    report = Reporter(run.resolved, plan, mesh, device, begin, sizes, brief)
    for teacher in teaching:
        teacher.start(engine, data, plan, begin.consumed_samples)
        report.beside = teacher.flops
    counted = []
    if not config.training.skip_train:
        counted = [resolve_name(SPENDING)(config, mesh, device, report, begin)]
    recorded = _recorded(run, mesh, device, report, begin, files)
    replicas = ReplicaCheck(engine, config.section(ResilienceConfig).check_replicas_interval)
    compared = []
    if mesh.world.size > 1:
        compared = [
            resolve_name(STRAGGLERS)(config.section(ResilienceConfig), mesh, device, report)
        ]
    newest = begin.folder if begin.iteration else None
    if checkpoint is not on_disk:
        newest = on_disk.found.folder if on_disk is not None and on_disk.continues else None
    interval = config.checkpoint.save_interval
    checkpoints = CheckpointManager(writer, report, interval, newest, replicas.check)
    checkpoints.counted |= {name: partial(dict, value) for name, value in noted.items()}
    replicas.newest = lambda: checkpoints.newest_shown
    for saves in in_memory:
        saves.check = replicas.check
        saves.begin(checkpoints)
    return Trainer(
        engine,
        data,
        plan,
        (
            _Closing(engine, lock),
            *recorded,
            *counted,
            *_elastic(mesh),
            *callbacks,
            *teaching,
            *tasks,
            Stopping(request, device, mesh.world.size, config.training.exit_interval),
            *compared,
            report,
            *_judges(run, engine, data, report, checkpoints, replicas, begin, checkpoint, files),
            *in_memory,
            checkpoints,
            *_restarted(config, checkpoints, report, begin),
            *best_evaluation(config, checkpoints, mesh, begin.iteration),
            *profiling(config, engine, begin.iteration),
        ),
        Position(begin.iteration, begin.consumed_samples),
        config.data.num_workers,
        report.evaluated_before(config, begin, list(data.datasets.valid), list(data.datasets.test)),
    )


def _check_tokenizer(run: Run, begin: ResumePoint) -> None:
    """Raises ValueError if a run continues with another tokenizer than its checkpoint's."""
    if begin.folder is None or not begin.iteration:
        return
    theirs = read_mark(begin.folder / MARK_FILE)
    ours = resolve_name(MARK)(run.tokenizer, run.config.tokenizer.tokenizer_type)
    if theirs is not None and ours is not None and theirs.digest != ours.digest:
        raise ValueError(
            f"{begin.folder} was trained with another tokenizer: {theirs}, and this run has "
            f"{ours}, {run.tokenizer.source}: name that tokenizer (--tokenizer-type ...), or start "
            "again from the weights with --finetune"
        )


def _tokenizer_writer(run: Run, data: TrainingData, begin: ResumePoint) -> Callable[[Path], None]:
    """Writes the files of a run's tokenizer into a folder, and next to them where the texts of its
    model end, as far as its base or its examples say so."""
    settings = resolve_name(GENERATION)
    generation = settings.for_tokenizer(
        begin.generation, begin.tokenizer, run.config.tokenizer, run.tokenizer
    )
    mark = resolve_name(MARK)(run.tokenizer, run.config.tokenizer.tokenizer_type)
    taught, train = None, data.datasets.train
    if data.weighed and train is not None:
        of_base = settings.ends_of(generation)
        taught = resolve_name(ANSWER_ENDS)(train, run.tokenizer, of_base)

    def save(folder: Path) -> None:
        run.tokenizer.save_pretrained(folder)
        if mark is not None:
            (folder.parent / MARK_FILE).write_bytes(mark.json())
        if generation or taught is not None:
            settings.write_of_run(folder, run.tokenizer, generation, taught)

    return save


def _elastic(mesh: Mesh) -> list[Callback]:
    if mesh.world.size == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    elastic = import_module(ELASTIC)
    return [elastic.ElasticNodes()] if elastic.is_elastic() else []


def _recorded(
    run: Run,
    mesh: Mesh,
    device: torch.device,
    report: Reporter,
    begin: ResumePoint,
    files: Sequence[DataFile],
) -> list[Callback]:
    """Says where the ranks of a run are; the record of its start, if it saves."""
    saves = bool(run.config.checkpoint.save)
    if mesh.world.size == 1 and not saves:
        return []
    places = resolve_name(f"{HOSTS}:places_of_ranks")(mesh, device)
    if mesh.world.size > 1:
        for line in resolve_name(f"{HOSTS}:rank_map")(places):
            report.say(line)
    return [resolve_name(RUN_RECORD)(run, mesh, begin, files, places)] if saves else []


def _judges(
    run: Run,
    engine: TrainEngine,
    data: TrainingData,
    report: Reporter,
    checkpoints: CheckpointManager,
    replicas: ReplicaCheck,
    begin: ResumePoint,
    origin: ResumeSource | None,
    files: Sequence[DataFile],
) -> list[Callback]:
    """What judges the steps of a run, in the order in which it does: whether they are finite, far
    from those before, and the same on all ranks that must have the same."""
    training, flags = run.config.training, run.config.section(ResilienceConfig)
    guard = NonFiniteGuard(
        engine.device,
        run.config.precision.fp16,
        training.check_for_nan_in_loss_and_grad,
        training.max_skipped_steps,
        ruined=lambda: ruined(engine),
        newest=lambda: checkpoints.newest_shown,
        fresh=begin.iteration == 0,
        replicas=replicas.check,
    )
    spikes = _spike_guard(flags, guard, checkpoints, begin, origin, files)
    looks = []
    if flags.rerun_on_anomaly != "disabled":
        looks = [resolve_name(SECOND_LOOK)(run, engine, data, report, spikes)]
    return [guard, *looks, *spikes, replicas]


def _spike_guard(
    flags: ResilienceConfig,
    steps: NonFiniteGuard,
    checkpoints: CheckpointManager,
    begin: ResumePoint,
    origin: ResumeSource | None,
    files: Sequence[DataFile],
) -> list[Callback]:
    """What finds spikes, and acts on them as ``--on-spike`` says."""
    if not flags.spike_sigma:
        return []
    found = SpikeGuard(steps, flags, checkpoints, begin.spikes)
    if flags.on_spike == "stop":
        found.act = stop_at_spike(checkpoints)
    elif flags.on_spike == "rollback":
        most = flags.spike_rollbacks
        rollback = resolve_name(ROLLBACK)(most, found.rule, checkpoints, begin, origin, files)
        found.act = rollback
        return [found, rollback]
    return [found]


def _restarted(
    config: RunConfig, checkpoints: CheckpointManager, report: Reporter, begin: ResumePoint
) -> list[Callback]:
    if not config.section(ResilienceConfig).inprocess_restart:
        return []
    found: list[Callback] = resolve_name(RESTARTED)(config, checkpoints, report, begin)
    return found


def best_evaluation(
    config: RunConfig, checkpoints: CheckpointManager, mesh: Mesh, iteration: int
) -> list[Callback]:
    """What follows the best evaluation, for runs that need it and begin after so many steps."""
    keeps, patience = config.checkpoint.keep_best, config.training.early_stopping_patience
    if not keeps and patience is None:
        return []
    follow = resolve_name(BEST_EVALUATION)
    return [follow(checkpoints, mesh, config.checkpoint.save, keeps, patience, iteration)]


def train(run: Run) -> None:
    """Trains from the checkpoint that the run loads, or the first step, to its end. Raises what
    :func:`build_trainer` raises."""
    with connected(run) as mesh:
        build_trainer(run, mesh).fit()


class _Closing(Callback):
    """Releases the folder and the engine at the end of a run. Not after an error: closing waits for
    the device, which may wait for another rank."""

    def __init__(self, engine: TrainEngine, lock: Lock | None) -> None:
        self._engine, self._lock = engine, lock

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            return
        if self._lock is not None:
            self._lock.release()
        self._engine.close()
