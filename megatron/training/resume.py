"""Finds and loads the state from which a run starts: initial weights or a checkpoint."""

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
from megatron.engine.saving import check_writable, ruined
from megatron.engine.train_engine import TrainEngine
from megatron.families import family_names, family_of
from megatron.parallel.mesh import first_reason
from megatron.training.plan import TrainingPlan
from megatron.util.secrets import without_secrets

SKIPPED = "skip_samples"
"""Key in ``state.json`` for the sample ranges to skip, if the run's flags do not list them all."""

_SAID_OTHERWISE = {
    "padded_vocab_size",
    "use_precision_aware_optimizer",
    *(f"{name}_dtype" for name in StateDtypes._fields),
}
_NOT_COMPARED = {"parallel", "checkpoint", "logging", "profiling", "engine", "resilience"}
_HOW_FAST = {"torch_compile", "torch_compile_mode", "activation_memory_budget"}


@dataclass(frozen=True)
class ResumeSource:
    """Checkpoint that a run starts from, and ``flag``, the flag with its value that selects it.
    ``continues`` tells whether the run continues the checkpoint's run or only loads the weights.
    ``damaged`` has the error for the folder of each newer checkpoint that is damaged."""

    found: FoundCheckpoint
    flag: str
    continues: bool
    damaged: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumePoint:
    """State from which a run starts.

    Attributes:
        folder: folder of the checkpoint; None without one.
        changed: a line for each value that differs from the checkpoint's run.
        notes: a line for each decision about something that the checkpoint does not record.
        restarts: whether optimizer state was loaded, but iterations count from 0 again.
        skip_samples: ranges of training samples to skip, from flags or found to be bad by the run.
        spikes: learned state of the run's spike rule.
        generation, tokenizer: as in :class:`~megatron.checkpoint.source.Source`.
    """

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
    """Return the checkpoint to start from, or None. Called before anything slow is built. Raises
    CheckpointError if the checkpoint does not exist, is incomplete or has another model family,
    ``--save`` is not writable, or saving would overwrite another run. Raises ConfigError if the
    checkpoint's RoPE scaling cannot become the run's."""
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
    """Return the checkpoint that ``--load`` or else ``--pretrained-checkpoint`` selects, or None.
    With ``--on-damaged-checkpoint previous`` it can be an older checkpoint that can be opened.
    Raises CheckpointError if the checkpoint does not exist or is incomplete."""
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
    """Raise CheckpointError if ``--load`` has files but no checkpoint. A run that also saves there
    may start in this folder: it contains the run's own files before its first checkpoint."""
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
    """Return the checkpoint in ``--load``, or one that a feature selects if that cannot be opened.
    Raises CheckpointError if it is damaged; the message lists possible alternatives."""
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
    """Return whether a run saves to the same folder as the checkpoint that it continues."""
    continues = origin.continues and not options.reset_iteration
    return continues and origin.found.folder.parent.samefile(save)


def _protect_other_run(options: CheckpointConfig, origin: ResumeSource | None) -> None:
    """Raise CheckpointError if ``--save`` has checkpoints of a run that is not continued."""
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
    """Load a checkpoint. Raises DamagedError also if training would continue from non-finite
    weights or moments, which earlier versions could save. Collective."""
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
    """Load the checkpoint that :func:`locate` found, for a run on the data ``files``. Collective.
    Raises CheckpointError if it is damaged or does not fit the configuration or the data."""
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
    point = ResumePoint(
        source.folder,
        changed=tuple(changes(source, engine.config)),
        notes=tuple(source.notes),
        skip_samples=flags,
    )
    point = _continued(point, engine.config, plan, origin, source, files)
    lines = [line for f in taking_part() for line in f.loaded(engine, origin, source)]
    notes = (*lines, *point.notes)
    return replace(point, generation=source.generation, tokenizer=source.tokenizer, notes=notes)


def _continued(
    point: ResumePoint,
    config: RunConfig,
    plan: TrainingPlan,
    origin: ResumeSource,
    source: Source,
    files: Sequence[DataFile],
) -> ResumePoint:
    """Return the point with as much of the checkpoint run's progress as the flags continue."""
    if not origin.continues or not source.state:
        return replace(point, weights_only=True)
    if config.checkpoint.reset_iteration:
        return replace(point, restarts=True)
    state = source.state
    point = replace(
        point,
        iteration=state["iteration"],
        consumed_samples=state["consumed_samples"],
        spikes=state.get("spikes", {}),
    )
    if config.training.skip_train:
        return point
    _check_position(plan, point)
    other = [line for f in taking_part() for line in f.changed_data(config, source, files)]
    point = replace(point, changed=(*point.changed, *other))
    skipped = _skipped(source, config, point.consumed_samples)
    return replace(point, skip_samples=skipped) if point.iteration else point


def _skipped(source: Source, config: RunConfig, consumed_samples: int) -> tuple[str, ...]:
    """Return the ranges to skip. Raises ConfigError if a sample would be repeated or lost."""
    flags = source.run.data.skip_samples if source.run else ()
    before = tuple(source.state.get(SKIPPED, flags))
    now = continued_ranges(flags, before, config.data.skip_samples)
    check_skipped(before, now, consumed_samples)
    return now


def _check_position(plan: TrainingPlan, loaded: ResumePoint) -> None:
    """Raise CheckpointError if these batch sizes do not lead to the checkpoint's sample count."""
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
    """Return a line for each value that differs from the checkpoint's run, except for checkpoints,
    logging, layout and compilation. Compare only the model if no run of this project wrote it."""
    trained = source.run if source.state else None
    old = trained.to_dict() if trained else {"model": dataclasses.asdict(source.model.flags())}
    new = without_secrets(wanted.to_dict())  # secrets were removed from the checkpoint's values too
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
