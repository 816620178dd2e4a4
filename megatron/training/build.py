"""Builds a run's trainer: data, engine, checkpoints, and callbacks around the steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.source import saver_of
from megatron.config.features import first_answer, taking_part
from megatron.data.indexed import read_mark
from megatron.data.loader import TrainingData
from megatron.engine.build import build_engine
from megatron.engine.environment import training_device
from megatron.engine.saving import CheckpointWriter, hold_folder, ruined
from megatron.families import trained_spec
from megatron.parallel.meeting import run_meeting
from megatron.parallel.mesh import Mesh
from megatron.run.process import connected
from megatron.run.run import Run, run_data
from megatron.tokenizer.mark import mark_of
from megatron.training import resume
from megatron.training.checkpoints import CheckpointManager
from megatron.training.context import Order, RunContext
from megatron.training.plan import Epochs, TrainingPlan
from megatron.training.report import Reporter, say
from megatron.training.resume import ResumePoint
from megatron.training.stopping import NonFiniteGuard, Stopping, StopRequest
from megatron.training.trainer import Callback, Position, Trainer
from megatron.util.files import Lock

MARK_FILE = "tokenizer/mark.json"
"""File in a checkpoint that identifies its tokenizer."""


def build_trainer(
    run: Run,
    mesh: Mesh,
    callbacks: Sequence[Callback] = (),
    data: TrainingData | None = None,
    epochs: Epochs | None = None,
    notes: Mapping[str, Any] | None = None,
    brief: bool = False,
) -> Trainer:
    """Return a run's trainer, with its model, data, checkpoints, logging and signal handling.

    Args:
        callbacks: additional callbacks, called before most of the run's own (see :class:`Order`).
        data: data to use instead of the run's own.
        epochs: length of the run in epochs, instead of the configured length.
        notes: values that are stored in checkpoints, by name.
        brief: whether to print short log lines.

    Raises ValueError or OSError if data or checkpoints cannot be used; the message names them.
    """
    context = RunContext(run, mesh, training_device())
    context.notes |= notes or {}
    for callback in callbacks:
        context.add(Order.CALLER, callback)
    _open(context, data, epochs)
    _build_engine(context)
    _watch_steps(context, brief)
    for feature in taking_part():
        feature.ready(context)
    origin, datasets = context.origin, context.data.datasets
    return Trainer(
        context.engine,
        context.data,
        context.plan,
        context.callbacks,
        Position(origin.iteration, origin.consumed_samples),
        context.config.data.num_workers,
        context.report.evaluated_before(
            context.config, origin, list(datasets.valid), list(datasets.test)
        ),
    )


def _open(context: RunContext, data: TrainingData | None, epochs: Epochs | None) -> None:
    """Open data and folders, plan the training, and locate the checkpoint to start from. Everything
    that is fast and can fail is done in this function, before the engine is built."""
    run, mesh, config, device = context.run, context.mesh, context.config, context.device
    for feature in taking_part():
        feature.begin(context)
    for feature in taking_part():
        feature.check_run(run, mesh, device)
    context.data = data = data or run_data(run)
    for feature in taking_part():
        feature.data_opened(context)
    run_meeting().compare_data(data)
    request = StopRequest(
        config.training.exit_duration_in_mins,
        run.launched,
        config.training.kill_switch_file,
        started=context.started,
    )
    interval = config.training.exit_interval
    context.add(Order.STOP, Stopping(request, device, mesh.world.size, interval))
    context.plan = TrainingPlan(config, epochs)
    lock = hold_folder(config.checkpoint.save, mesh.world, device, say)
    context.on_disk = context.source = resume.locate(config)
    loaded = [None if context.source is None else context.source.found]
    run_meeting().compare_checkpoints(loaded, config)
    recorded = context.source is not None or bool(config.checkpoint.save)
    context.files = list(data.files()) if recorded else []
    for feature in taking_part():
        feature.before_engine(context)
    context.add(Order.CLOSE, _Closing(context, lock))


def _build_engine(context: RunContext) -> None:
    """Build the engine and load the checkpoint to start from."""
    run, config = context.run, context.config
    spec = trained_spec(config)
    engine = build_engine(config, run.content, spec, context.mesh, context.device)
    context.engine = engine
    for feature in taking_part():
        feature.before_load(context)
    origin = resume.load(engine, context.plan, context.source, context.files)
    changed = (*origin.changed, *context.changed)
    context.origin = origin = dataclasses.replace(origin, changed=changed)
    _check_tokenizer(run, origin)


def _watch_steps(context: RunContext, brief: bool) -> None:
    """Add the callbacks that every run has: reports, the check for finite steps, and saves."""
    config, run, origin = context.config, context.run, context.origin
    if config.checkpoint.checkpoint_format == "safetensors":
        saver = first_answer(lambda f: f.saver(config.checkpoint)) or CheckpointWriter
    else:
        saver = saver_of(config.checkpoint.checkpoint_format)
    writer = saver(
        context.engine,
        run.content,
        _tokenizer_writer(run, context.data, origin),
        [file._asdict() for file in context.files],
    )
    if origin.skip_samples != config.data.skip_samples:
        context.data = context.data.skipping(origin.skip_samples)
    data = context.data
    sizes = list if data.weighed else data.sizes  # lengths of padded examples are not meaningful
    report = Reporter(
        run.resolved, context.plan, context.mesh, context.device, origin, sizes, brief
    )
    context.report = report
    newest = origin.folder if origin.iteration else None
    if context.source is not context.on_disk:
        on_disk = context.on_disk
        newest = on_disk.found.folder if on_disk is not None and on_disk.continues else None
    context.checkpoints = CheckpointManager(
        writer,
        report,
        config.checkpoint.save_interval,
        newest,
        context.check,
        {name: partial(dict, value) for name, value in context.notes.items()},
    )
    context.guard = NonFiniteGuard(
        context.device,
        config.precision.fp16,
        config.training.check_for_nan_in_loss_and_grad,
        config.training.max_skipped_steps,
        ruined=lambda: ruined(context.engine),
        newest=context.newest_shown,
        fresh=origin.iteration == 0,
        replicas=context.check,
    )
    context.add(Order.REPORT, report)
    context.add(Order.JUDGE, context.guard)
    context.add(Order.SAVE, context.checkpoints)


def _check_tokenizer(run: Run, origin: ResumePoint) -> None:
    """Raise ValueError if a run continues from a checkpoint with a different tokenizer."""
    if origin.folder is None or not origin.iteration:
        return
    theirs = read_mark(origin.folder / MARK_FILE)
    ours = mark_of(run.tokenizer, run.config.tokenizer.tokenizer_type)
    if theirs is not None and ours is not None and theirs.digest != ours.digest:
        raise ValueError(
            f"{origin.folder} was trained with another tokenizer: {theirs}, and this run has "
            f"{ours}, {run.tokenizer.source}: name that tokenizer (--tokenizer-type ...), or start "
            "again from the weights with --finetune"
        )


def _tokenizer_writer(run: Run, data: TrainingData, origin: ResumePoint) -> Callable[[Path], None]:
    """Return a function that writes the tokenizer, with features' files, to a folder."""
    mark = mark_of(run.tokenizer, run.config.tokenizer.tokenizer_type)
    writers = [feature.tokenizer_folder(run, data, origin) for feature in taking_part()]

    def save(folder: Path) -> None:
        run.tokenizer.save_pretrained(folder)
        if mark is not None:
            (folder.parent / MARK_FILE).write_bytes(mark.json())
        for write in writers:
            if write is not None:
                write(folder)

    return save


def train(run: Run) -> None:
    """Train a run from its start or checkpoint to its end. Raises as :func:`build_trainer` does."""
    with connected(run) as mesh:
        build_trainer(run, mesh).fit()


class _Closing(Callback):
    """Releases the checkpoint folder and the engine at the end of a run, but not after an error:
    closing waits for the device, which may be waiting for another rank."""

    def __init__(self, context: RunContext, lock: Lock | None) -> None:
        self._context, self._lock = context, lock

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            return
        if self._lock is not None:
            self._lock.release()
        self._context.engine.close()
