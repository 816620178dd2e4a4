"""Where a run starts: at the beginning, or where a checkpoint left off."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.registry import FoundCheckpoint, locate_checkpoint
from megatron.checkpoint.source import Source
from megatron.config import CheckpointConfig, RunConfig
from megatron.data.sampler import check_skipped
from megatron.engine.loading import load_checkpoint
from megatron.engine.saving import check_writable
from megatron.engine.train_engine import TrainEngine
from megatron.families import family_names
from megatron.training.plan import TrainingPlan


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts.

    Attributes:
        folder: the checkpoint that was loaded; None without one.
        iteration: steps done before.
        consumed_samples: samples that they took.
        changed: values that the checkpoint's run had otherwise, a line each.
        notes: what was decided where the checkpoint does not say, a line each.
        weights_only: whether nothing but weights was taken.
    """

    folder: Path | None = None
    iteration: int = 0
    consumed_samples: int = 0
    changed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    weights_only: bool = False


@dataclass(frozen=True)
class ResumeSource:
    """The checkpoint that a run starts from.

    Attributes:
        found: where it is.
        flag: the flag and value that named it.
        continues: whether the run goes on where it left off; otherwise only weights are taken.
    """

    found: FoundCheckpoint
    flag: str
    continues: bool


def locate(config: RunConfig) -> ResumeSource | None:
    """The checkpoint to start from, if any; asked before anything that takes time is built.

    Raises:
        CheckpointError: it is not there or not complete, it holds a model of another family,
            ``--save`` cannot be written, or saving would overwrite another run.
    """
    options = config.checkpoint
    origin = find_origin(options)
    if origin is not None:
        _check_family(origin, config.model.family)
    if options.save:
        check_writable(options.save)
        _protect_other_run(options, origin)
    return origin


def find_origin(options: CheckpointConfig) -> ResumeSource | None:
    """The checkpoint that ``--load`` or else ``--pretrained-checkpoint`` names, if any.

    Raises:
        CheckpointError: it is not there or not complete.
    """
    if options.load:
        found = _find(options)
        if found is not None:
            return ResumeSource(found, f"--load {options.load}", not options.finetune)
    if options.pretrained_checkpoint:
        flag = f"--pretrained-checkpoint {options.pretrained_checkpoint}"
        found = locate_checkpoint(options.pretrained_checkpoint)
        if found is None:
            raise CheckpointError(f"{flag}: there is no checkpoint")
        return ResumeSource(found, flag, continues=False)
    for wanted, flag in (
        (options.finetune, "--finetune"),
        (options.load_tag, f"--load-tag {options.load_tag}"),
        (options.universal_checkpoint, "--universal-checkpoint"),
    ):
        if wanted:
            raise CheckpointError(f"{flag}: no checkpoint in --load {options.load}")
    return None


def _check_family(origin: ResumeSource, family: str) -> None:
    folder = origin.found.folder
    held = origin.found.form.family(folder)
    if held == family:
        return
    if held in family_names():
        advice = f"pretrain_{held}.py trains it"
    else:
        advice = f"the families known here are {', '.join(family_names())}"
    raise CheckpointError(
        f"{origin.flag}: {folder} holds a model of the family {held!r}, and this run trains "
        f"{family!r}; {advice}"
    )


def _find(options: CheckpointConfig) -> FoundCheckpoint | None:
    """What ``--load``, ``--load-tag`` and ``--universal-checkpoint`` name."""
    prefer = "universal" if options.universal_checkpoint else "native"
    return locate_checkpoint(options.load or "", options.load_tag, prefer)


def load(engine: TrainEngine, plan: TrainingPlan, origin: ResumeSource | None) -> ResumePoint:
    """Loads what :func:`locate` found.

    Raises:
        CheckpointError: it is damaged or cannot be continued with this configuration.
    """
    if origin is None:
        return ResumePoint()
    source = load_checkpoint(engine, origin.found, weights_only=not origin.continues)
    config = engine.config
    changed, notes = tuple(changes(source, config)), tuple(source.notes)
    if not origin.continues or not source.state:
        return ResumePoint(source.folder, changed=changed, notes=notes, weights_only=True)
    state = source.state
    loaded = ResumePoint(
        source.folder, state["iteration"], state["consumed_samples"], changed, notes
    )
    if not config.training.skip_train:
        _check_position(plan, loaded)
        before = source.run.data.skip_samples if source.run else ()
        check_skipped(before, config.data.skip_samples, loaded.consumed_samples)
    return loaded


def _protect_other_run(options: CheckpointConfig, origin: ResumeSource | None) -> None:
    """Refuses to save among checkpoints of a run that this one does not continue."""
    save = Path(options.save or "")
    there = locate_checkpoint(save)
    continues = (
        origin is not None and origin.continues and origin.found.folder.parent.samefile(save)
    )
    if there is not None and not continues:
        raise CheckpointError(
            f"--save {save} holds {there.folder.name}, which this run does not continue and would "
            f"overwrite: give --load {save} to go on from there, or another --save"
        )


def _check_position(plan: TrainingPlan, loaded: ResumePoint) -> None:
    """Refuses batch sizes with which the rest of the run would not come out."""
    consumed = loaded.consumed_samples
    planned = plan.batch_size.samples(loaded.iteration)
    if consumed > planned or (consumed < planned and plan.unit != "iters"):
        raise CheckpointError(
            f"{loaded.folder} holds step {loaded.iteration} after {consumed} samples; with "
            f"--global-batch-size {plan.global_batch_size} and its ramp-up that step comes after "
            f"{planned}: keep the batch sizes, or start anew from the weights by --finetune"
        )


def changes(source: Source, wanted: RunConfig) -> list[str]:
    """Values of the run that differ, those of checkpoints, logging and layout aside, a line each;
    of the model alone where no run of ours has trained it."""
    trained = source.run if source.state else None
    old = trained.to_dict() if trained else {"model": dataclasses.asdict(source.model.flags())}
    new = wanted.to_dict()
    return [
        f"{name}: {json.dumps(before)} -> {json.dumps(new[part][name])}"
        for part in old
        if part not in _NOT_TOLD
        for name, before in old[part].items()
        if before != new[part][name] and name != "padded_vocab_size"
    ]


_NOT_TOLD = {"parallel", "fast_paths", "checkpoint", "logging", "profiling", "engine"}
