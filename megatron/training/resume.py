"""Start of a run: at the beginning, or from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError, DamagedError
from megatron.checkpoint.source import (
    FoundCheckpoint,
    Source,
    locate_checkpoint,
    nothing_at,
    reader,
)
from megatron.config import CheckpointConfig, RunConfig, TokenizerConfig
from megatron.config.features import taking_part
from megatron.config.layouts import StateDtypes
from megatron.data.build import DataFile
from megatron.data.sampler import check_skipped, continued_ranges
from megatron.engine.loading import load_checkpoint
from megatron.engine.saving import check_writable, ruined, shareable
from megatron.engine.train_engine import TrainEngine
from megatron.families import family_names, family_of
from megatron.parallel.mesh import first_reason
from megatron.training.plan import TrainingPlan

SKIPPED = "skip_samples"
"""In ``state.json``: the ranges that the run skips, if they are more than its flags say."""

_SAID_OTHERWISE = {
    "padded_vocab_size",
    "use_precision_aware_optimizer",
    *(f"{name}_dtype" for name in StateDtypes._fields),
}
_NOT_COMPARED = {"parallel", "checkpoint", "logging", "profiling", "engine", "resilience"}
_HOW_FAST = {"torch_compile", "torch_compile_mode", "activation_memory_budget"}


@dataclass(frozen=True)
class ResumeSource:
    """The checkpoint that a run starts from, and the flag and value that named it; ``continues``
    its run, or else loads only weights. ``damaged`` are newer ones that are damaged, with what is
    wrong with them, a line each by folder."""

    found: FoundCheckpoint
    flag: str
    continues: bool
    damaged: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumePoint:
    """Start of a run. ``folder`` is None without a checkpoint; ``changed`` are values that differ
    from its run, ``notes`` what was decided where it does not say, a line each. ``restarts``: also
    the optimizer's state was loaded, and the count starts again. ``skip_samples`` are the ranges of
    training samples that the run skips, those that its flags name and those that it found bad
    itself; ``spikes`` is what its rule of spikes has learned; ``generation`` and ``tokenizer`` are
    those of its :class:`Source`."""

    folder: Path | None = None
    iteration: int = 0
    consumed_samples: int = 0
    changed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    weights_only: bool = False
    restarts: bool = False
    skip_samples: tuple[str, ...] = ()
    spikes: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerConfig | None = None


def locate(config: RunConfig) -> ResumeSource | None:
    """The checkpoint to start from, if any; called before anything that takes time is built. Raises
    CheckpointError if it does not exist or is incomplete, it is of another model family, ``--save``
    cannot be written, or saving would overwrite another run; ConfigError if its RoPE scaling cannot
    become that of the run."""
    options = config.checkpoint
    origin = find_origin(options)
    if origin is not None:
        check_family(origin, config.model.family)
    for feature in taking_part():
        feature.check_source(config, origin)
    if options.save:
        check_writable(options.save)
        _protect_other_run(options, origin)
    return origin


def find_origin(options: CheckpointConfig) -> ResumeSource | None:
    """The checkpoint that ``--load`` or else ``--pretrained-checkpoint`` names, if any. Raises
    CheckpointError if it does not exist or is incomplete; with ``--on-damaged-checkpoint previous``
    an older one is taken, of those that can be opened."""
    if options.load:
        origin = _newest_opened(options)
        if origin is not None:
            form = origin.found.form
            if options.universal_checkpoint and form is not reader("universal"):
                raise CheckpointError(
                    f"--universal-checkpoint: --load {options.load} has no universal checkpoint, "
                    f"but a {form.title}; leave the flag out to load that, or write one with "
                    "tools/convert_checkpoint.py to-universal"
                )
            checkpoint = origin.found._replace(base=options.pretrained_checkpoint)
            return replace(origin, found=checkpoint)
        _refuse_other_files(options)
    if options.pretrained_checkpoint:
        flag = f"--pretrained-checkpoint {options.pretrained_checkpoint}"
        base = locate_checkpoint(options.pretrained_checkpoint)
        if base is None:
            raise CheckpointError(f"{flag}: {nothing_at(options.pretrained_checkpoint)}")
        return ResumeSource(base, flag, continues=False)
    for wanted, flag in (
        (options.finetune, "--finetune"),
        (options.load_tag, f"--load-tag {options.load_tag}"),
        (options.universal_checkpoint, "--universal-checkpoint"),
        (options.load and options.exit_on_missing_checkpoint, "--exit-on-missing-checkpoint"),
    ):
        if wanted:
            where = f"in --load {options.load}" if options.load else "without --load"
            raise CheckpointError(f"{flag}: no checkpoint {where}")
    return None


def _refuse_other_files(options: CheckpointConfig) -> None:
    """Refuses a --load that has files and no checkpoint, unless the run saves there: then it is a
    run's folder before its first checkpoint."""
    load, save = Path(options.load or ""), Path(options.save or "")
    if not load.is_dir() or (options.save and save.resolve() == load.resolve()):
        return
    names = sorted(path.name for path in load.iterdir() if not path.name.startswith("."))
    if names:
        more = ", ..." if len(names) > 3 else ""
        raise CheckpointError(
            f"--load {load}: no checkpoint of a known format among its files ("
            f"{', '.join(names[:3])}{more}); give the folder of a checkpoint, or leave --load out "
            "to start from random weights"
        )


def _newest_opened(options: CheckpointConfig) -> ResumeSource | None:
    """The checkpoint of ``--load``, or another one that a feature takes where it cannot be opened.
    Raises CheckpointError if it is damaged, naming what could be taken."""
    assert options.load is not None
    flag, continues = f"--load {options.load}", not options.finetune
    prefer = "universal" if options.universal_checkpoint else "native"
    checkpoint: FoundCheckpoint | None = None
    try:
        checkpoint = locate_checkpoint(options.load, options.load_tag, prefer)
        if checkpoint is not None:
            checkpoint.family  # noqa: B018  # reads its configuration
            if options.falls_back:
                checkpoint.open(verify=False)
    except CheckpointError as error:
        others = (f.checkpoint_instead(options, checkpoint, error) for f in taking_part())
        named, other = next((other for other in others if other is not None), (None, None))
        if named is None or other is None:
            raise
        return ResumeSource(other, flag, continues, {named: str(error)})
    return None if checkpoint is None else ResumeSource(checkpoint, flag, continues)


def check_family(origin: ResumeSource, family: str) -> None:
    folder = origin.found.folder
    saved = origin.found.family
    begins = saved in family_of(family).starts_from
    if saved == family or (begins and not origin.continues):
        return
    if begins:
        advice = f"--finetune --no-load-optim starts a {family} from its weights"
    elif saved in family_names():
        advice = f"pretrain_{saved}.py trains it"
    else:
        advice = f"the known families are {', '.join(family_names())}"
    raise CheckpointError(
        f"{origin.flag}: {folder} contains a model of the family {saved!r}, and this run trains "
        f"{family!r}; {advice}"
    )


def saves_next_to(save: Path, origin: ResumeSource, options: CheckpointConfig) -> bool:
    """True if a run saves next to the checkpoint that it continues."""
    continues = origin.continues and not options.reset_iteration
    return continues and origin.found.folder.parent.samefile(save)


def _protect_other_run(options: CheckpointConfig, origin: ResumeSource | None) -> None:
    """Refuses to save among checkpoints of a run that this one does not continue."""
    save = Path(options.save or "")
    if origin is not None and saves_next_to(save, origin, options):
        return
    other = locate_checkpoint(save, others=True)
    if other is not None:
        raise CheckpointError(
            f"--save {save} contains {other.folder.name}, which this run does not continue and "
            f"would overwrite: give --load {save} to continue from it, or another --save"
        )


def load_finite(engine: TrainEngine, origin: ResumeSource) -> Source:
    """Loads a checkpoint. Raises DamagedError also if it would be continued from weights or moments
    that are not finite: earlier versions saved such."""
    source = load_checkpoint(engine, origin.found, weights_only=not origin.continues)
    if origin.continues and source.state:
        reason = first_reason(ruined(engine), engine.device)
        if reason is not None:
            raise DamagedError(f"{source.folder}: {reason}")
    return source


def load(
    engine: TrainEngine,
    plan: TrainingPlan,
    origin: ResumeSource | None,
    files: Sequence[DataFile] = (),
) -> ResumePoint:
    """Loads what :func:`locate` found, for a run on the data of ``files``. Raises CheckpointError
    if it is damaged or cannot be continued with this configuration or these data."""
    flags = engine.config.data.skip_samples
    if origin is None:
        return ResumePoint(skip_samples=flags)
    try:
        source = load_finite(engine, origin)
    except DamagedError as error:
        others = (feature.load_instead(engine, origin, error) for feature in taking_part())
        other = next((other for other in others if other is not None), None)
        if other is None:
            raise
        source, origin = other
    point = _resume_point(engine, plan, origin, source, files)
    lines = [line for f in taking_part() for line in f.loaded(engine, origin, source)]
    notes = (*lines, *point.notes)
    point = replace(point, generation=source.generation, tokenizer=source.tokenizer, notes=notes)
    return point if point.iteration else replace(point, skip_samples=flags)


def _resume_point(
    engine: TrainEngine,
    plan: TrainingPlan,
    origin: ResumeSource,
    source: Source,
    files: Sequence[DataFile],
) -> ResumePoint:
    config = engine.config
    changed = tuple(changes(source, config))
    notes = tuple(source.notes)
    if not origin.continues or not source.state:
        return ResumePoint(source.folder, changed=changed, notes=notes, weights_only=True)
    state = source.state
    if config.checkpoint.reset_iteration:
        return ResumePoint(source.folder, changed=changed, notes=notes, restarts=True)
    loaded = ResumePoint(
        source.folder,
        state["iteration"],
        state["consumed_samples"],
        changed,
        notes,
        skip_samples=config.data.skip_samples,
        spikes=state.get("spikes", {}),
    )
    if not config.training.skip_train:
        _check_position(plan, loaded)
        other = [line for f in taking_part() for line in f.changed_data(config, source, files)]
        loaded = replace(loaded, changed=(*changed, *other))
        loaded = replace(loaded, skip_samples=_skipped(source, config, loaded.consumed_samples))
    return loaded


def _skipped(source: Source, config: RunConfig, consumed_samples: int) -> tuple[str, ...]:
    """Ranges that are skipped. Raises ConfigError if a sample would be repeated or lost."""
    flags = source.run.data.skip_samples if source.run else ()
    before = tuple(source.state.get(SKIPPED, flags))
    now = continued_ranges(flags, before, config.data.skip_samples)
    check_skipped(before, now, consumed_samples)
    return now


def _check_position(plan: TrainingPlan, loaded: ResumePoint) -> None:
    """Refuses batch sizes that do not lead to the checkpoint's position."""
    consumed = loaded.consumed_samples
    planned = plan.batch_size.samples(loaded.iteration)
    by_steps = plan.unit == "iters" and not plan.ends_by_tokens
    if consumed > planned or (consumed < planned and not by_steps):
        raise CheckpointError(
            f"{loaded.folder} is of step {loaded.iteration} after {consumed} samples; with "
            f"--global-batch-size {plan.global_batch_size} and its ramp-up that step comes after "
            f"{planned}: keep the batch sizes, or start again from the weights with --finetune"
        )


def changes(source: Source, wanted: RunConfig) -> list[str]:
    """Values of the run that differ, those of checkpoints, logging, layout and compilation aside, a
    line each;
    only the model's where the checkpoint was not written by a run of this project."""
    trained = source.run if source.state else None
    old = trained.to_dict() if trained else {"model": dataclasses.asdict(source.model.flags())}
    new = shareable(wanted.to_dict())  # as the checkpoint's is
    lines = [
        f"{name}: {json.dumps(before)} -> {json.dumps(new[part][name])}"
        for part in old
        if part not in _NOT_COMPARED
        for name, before in old[part].items()
        if before != new[part][name] and name not in _SAID_OTHERWISE | _HOW_FAST
    ]
    if trained is not None and trained.precision.states != wanted.precision.states:
        lines.append(_states_line(trained.precision.states, wanted.precision.states))
    return lines


def _states_line(old: StateDtypes | None, new: StateDtypes | None) -> str:
    before, now = ("float32" if states is None else states.shown for states in (old, new))
    pairs = zip(old or StateDtypes(), new or StateDtypes(), strict=True)
    rounds = any(dtype not in (was, "fp32") for was, dtype in pairs)
    return f"optimizer states: {before} -> {now}" + "; rounded to nearest" * rounds
