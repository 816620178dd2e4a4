"""Start of a run: at the beginning, or from a checkpoint, whose settings it may take over."""

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
    tokenizer_in,
)
from megatron.config import (
    CheckpointConfig,
    ConfigError,
    OptimizerFlags,
    RunConfig,
    Setting,
    Settings,
    TokenizerConfig,
)
from megatron.config.data import SOURCE_FIELDS
from megatron.config.features import taking_part
from megatron.config.flags import build, names_of
from megatron.config.layouts import StateDtypes
from megatron.data.build import DataFile, changed_files
from megatron.data.sampler import check_skipped, continued_ranges
from megatron.engine.saving import check_writable, shareable
from megatron.engine.train_engine import TrainEngine
from megatron.families import family_names, family_of
from megatron.training.longer import check_scaling, unscaled_note
from megatron.training.plan import TrainingPlan
from megatron.training.resume_source import (
    ResumeSource,
    load_finite,
    load_older,
    newest_older,
    saves_next_to,
    set_damaged_aside,
)

SKIPPED = "skip_samples"
"""In ``state.json``: the ranges that the run skips, if they are more than its flags say."""

_FILES = {"vocab_file", "merge_file", "tokenizer_model"}
"""Flags with files of a tokenizer."""
_SCHEDULE = names_of("schedule", OptimizerFlags)
_SAID_OTHERWISE = {
    "padded_vocab_size",
    "use_precision_aware_optimizer",
    *(f"{name}_dtype" for name in StateDtypes._fields),
}
_DATA_FLAGS = (*SOURCE_FIELDS, "corpora_file")
_NOT_COMPARED = {"parallel", "checkpoint", "logging", "profiling", "engine", "resilience"}
_HOW_FAST = {"torch_compile", "torch_compile_mode", "activation_memory_budget"}


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
        _check_family(origin, config.model.family)
        if not config.model.positions.rope_scaling.is_default:
            source = origin.found.open(verify=False)
            check_scaling(source.model, config.model, str(source.folder))
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
    """The checkpoint of ``--load``, or the newest older one that can be opened, as far as the flags
    allow. Raises CheckpointError if it is damaged, naming what could be taken."""
    assert options.load is not None
    flag, continues = f"--load {options.load}", not options.finetune
    prefer = "universal" if options.universal_checkpoint else "native"
    checkpoint: FoundCheckpoint | None = None
    try:
        checkpoint = locate_checkpoint(options.load, options.load_tag, prefer)
        if checkpoint is not None:
            checkpoint.family  # noqa: B018  # reads its configuration
            if options.on_damaged_checkpoint == "previous":
                checkpoint.open(verify=False)
    except CheckpointError as error:
        named, older = newest_older(options, checkpoint, error)
        return ResumeSource(older, flag, continues, {named: str(error)})
    return None if checkpoint is None else ResumeSource(checkpoint, flag, continues)


def _check_family(origin: ResumeSource, family: str) -> None:
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
        source, origin = load_older(engine, origin, error)
    point = _resume_point(engine, plan, origin, source, files)
    point = replace(point, generation=source.generation, tokenizer=source.tokenizer)
    if origin.damaged:
        lines = set_damaged_aside(engine, origin)
        point = replace(point, notes=(*lines, *point.notes))
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
    notes = (*source.notes, *unscaled_note(source.model, config.model))
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
        other = _changed_data(source, config, files)
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


def _changed_data(source: Source, config: RunConfig, files: Sequence[DataFile]) -> list[str]:
    """Return the files of data that differ from those when the checkpoint was saved, a line each;
    none where the flags name other ones, or it does not say. Raises CheckpointError unless
    ``--allow-changed-data`` is given."""
    try:
        saved = [DataFile(**file) for file in source.state.get("data", ())]
        files = [DataFile(**shareable(file._asdict())) for file in files]
        before = {} if source.run is None else source.run.to_dict()["data"]
        now = shareable(config.to_dict()["data"])
        same = all(list(before.get(name) or ()) == list(now[name] or ()) for name in _DATA_FLAGS)
        differences = changed_files(saved, files, same)
    except (TypeError, AttributeError):
        raise CheckpointError(f"{source.folder}: its list of data files is malformed") from None
    if differences and not config.checkpoint.allow_changed_data:
        raise CheckpointError(
            f"{source.folder} was saved by a run on other data: {'; '.join(differences[:3])}"
            + (f", and {len(differences) - 3} more differences" if len(differences) > 3 else "")
            + "; restore the files, or give --allow-changed-data to continue with those of now"
        )
    return differences


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


def with_checkpoint(settings: Settings) -> Settings:
    """Adds the checkpoint's values for --use-checkpoint-args (those of model and tokenizer that
    nothing else gives) and --use-checkpoint-opt_param-scheduler (all values of the schedules).
    Raises ConfigError if no checkpoint is named or found, or it does not have the values. Raises
    CheckpointError if the checkpoint is damaged or of another family than the settings name."""
    arguments = "use_checkpoint_args" in settings
    schedules = "use_checkpoint_opt_param_scheduler" in settings
    if not arguments and not schedules:
        return settings
    flag = "--use-checkpoint-args" if arguments else "--use-checkpoint-opt_param-scheduler"
    options = build(CheckpointConfig, settings)
    if not options.load and not options.pretrained_checkpoint:
        raise ConfigError(f"{flag} needs --load, the checkpoint to read them from")
    origin = find_origin(options)
    if origin is None:
        if arguments and "num_layers" not in settings:
            raise ConfigError(
                f"--use-checkpoint-args: no checkpoint in --load {options.load}, and no "
                "--num-layers"
            )
        return settings
    family = settings["family"].value if "family" in settings else None
    if arguments and family and origin.found.family not in family_of(family).starts_from:
        # Else the values taken over can decide which of the two is trained; `locate` checks it.
        _check_family(origin, family)
    source = origin.found.open(verify=False)
    if arguments:
        settings = _arguments(source, own=not settings.keys() & _FILES) | settings
    if schedules:
        kept = {name: value for name, value in settings.items() if name not in _SCHEDULE}
        settings = kept | _schedules(source)
    return settings


def _arguments(source: Source, own: bool) -> Settings:
    """The values of model and tokenizer; with ``own`` the tokenizer in the folder of the checkpoint
    where files of its run's have gone."""
    settings, tokenizer = _settings(source.model.flags(), source), source.tokenizer
    if tokenizer is not None:
        copied = tokenizer_in(source.folder) if own else None
        files = [Path(file) for name in _FILES if (file := getattr(tokenizer, name))]
        if copied is not None and not all(file.exists() for file in files):
            tokenizer = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(copied))
        settings |= _settings(tokenizer, source)
    settings["unpadded_vocab_size"] = _setting(source.model.vocabulary.size, source)
    return settings


def _schedules(source: Source) -> Settings:
    if source.run is None or not source.run.optimizer.lr:
        raise ConfigError(
            f"--use-checkpoint-opt_param-scheduler: {source.folder} does not say what schedules "
            "its run had"
        )
    optimizer = source.run.optimizer
    values = {name: getattr(optimizer, name, None) for name in _SCHEDULE}
    return {name: _setting(value, source) for name, value in values.items() if value is not None}


def _settings(part: Any, source: Source) -> Settings:
    """The values of a part's flags that are not the defaults."""
    return {
        field.name: _setting(getattr(part, field.name), source)
        for field in dataclasses.fields(part)
        if getattr(part, field.name) != field.default and not field.metadata.get("internal")
    }


def _setting(value: Any, source: Source) -> Setting:
    return Setting(value, f"checkpoint {source.folder.name}")
