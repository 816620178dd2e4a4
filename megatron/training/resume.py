"""Where a run starts: at the beginning, or where a checkpoint left off."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import complete_tags, find
from megatron.config import CheckpointConfig, RunConfig
from megatron.engine.loading import load_checkpoint
from megatron.engine.saving import check_writable
from megatron.engine.train_engine import TrainEngine
from megatron.training.plan import TrainingPlan


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        folder: the checkpoint that was loaded; None without one.
        iteration: steps done before.
        consumed_samples: samples that they took.
        changed: values that the checkpoint's run had otherwise, a line each.
    """

    folder: Path | None = None
    iteration: int = 0
    consumed_samples: int = 0
    changed: tuple[str, ...] = ()


def locate(options: CheckpointConfig) -> Path | None:
    """The checkpoint to load, if any; asked before anything that takes time is built.

    Raises:
        CheckpointError: it is not there or not complete, ``--save`` cannot be written, or saving
            would overwrite another run.
    """
    folder = find(options.load, options.load_tag) if options.load else None
    if folder is None and (options.finetune or options.load_tag):
        flag = "--finetune" if options.finetune else f"--load-tag {options.load_tag}"
        raise CheckpointError(f"{flag}: no checkpoint in --load {options.load}")
    if options.save:
        check_writable(options.save)
        _protect_other_run(options, folder)
    return folder


def load(engine: TrainEngine, plan: TrainingPlan, folder: Path | None) -> Start:
    """Loads what :func:`locate` found.

    Raises:
        CheckpointError: it is damaged or cannot be continued with this configuration.
    """
    if folder is None:
        return Start()
    config = engine.config
    saved, state = load_checkpoint(engine, folder)
    changed = tuple(changes(saved, config))
    if config.checkpoint.finetune:
        return Start(folder, changed=changed)
    loaded = Start(folder, state["iteration"], state["consumed_samples"], changed)
    if not config.training.skip_train:
        _check_position(plan, loaded)
    return loaded


def _protect_other_run(options: CheckpointConfig, loaded: Path | None) -> None:
    """Refuses to save among checkpoints of a run that this one does not continue."""
    save = Path(options.save or "")
    known = complete_tags(save)
    continues = loaded is not None and not options.finetune and loaded.parent.samefile(save)
    if known and not continues:
        raise CheckpointError(
            f"--save {save} holds {known[-1]}, which this run does not continue and would "
            f"overwrite: give --load {save} to go on from there, or another --save"
        )


def _check_position(plan: TrainingPlan, loaded: Start) -> None:
    """Refuses batch sizes with which the rest of the run would not come out."""
    consumed = loaded.consumed_samples
    planned = plan.batch_size.samples(loaded.iteration)
    if consumed > planned or (consumed < planned and plan.unit != "iters"):
        raise CheckpointError(
            f"{loaded.folder} holds step {loaded.iteration} after {consumed} samples; with "
            f"--global-batch-size {plan.global_batch_size} and its ramp-up that step comes after "
            f"{planned}: keep the batch sizes, or start anew from the weights by --finetune"
        )


def changes(saved: RunConfig, wanted: RunConfig) -> list[str]:
    """Values of model, data, training, optimizer and precision that differ, a line each."""
    lines = []
    for part in ("model", "training", "optimizer", "precision", "data"):
        old, new = getattr(saved, part), getattr(wanted, part)
        for field in dataclasses.fields(old):
            before, after = getattr(old, field.name), getattr(new, field.name)
            if before != after:
                lines.append(f"{field.name}: {json.dumps(before)} -> {json.dumps(after)}")
    return lines
