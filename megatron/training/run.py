"""From a command line to a trainer: one resolved configuration, then data, engine, callbacks."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

import torch

from megatron.checkpoint.source import FoundCheckpoint
from megatron.config import (
    FLAG_CLASSES,
    ConfigError,
    FlagParser,
    ModelConfig,
    Resolved,
    RunConfig,
    Setting,
    Settings,
    TokenizerConfig,
    explain,
    resolve,
)
from megatron.config.flags import ConfigResolver, build
from megatron.config.kinds.preference import PreferenceConfig
from megatron.data.build import DataFile
from megatron.data.indexed.dataset_checks import verify_checksums
from megatron.data.loader import TrainingData
from megatron.data.pipeline import training_texts
from megatron.data.sources import with_corpora
from megatron.engine import deepspeed_json
from megatron.engine.build import build_engine
from megatron.engine.deepspeed_file import output_notes, read_json
from megatron.engine.deepspeed_folder import checkpoint_writer
from megatron.engine.deepspeed_json import Json
from megatron.engine.environment import distributed, training_device
from megatron.engine.saving import hold_folder, ruined
from megatron.engine.train_engine import TrainEngine
from megatron.families import Family, family_of, refuse_unused
from megatron.objectives import trained_spec
from megatron.parallel import agreement
from megatron.parallel.mesh import Mesh
from megatron.resilience.generation import current
from megatron.tokenizer import Tokenizer, build_tokenizer, implied_type, vocabulary_rows
from megatron.training import resume
from megatron.training.checkpoints import CheckpointManager
from megatron.training.launch import start_processes
from megatron.training.plan import Epochs, TrainingPlan
from megatron.training.profiling import profiling
from megatron.training.replicas import ReplicaCheck
from megatron.training.report import Reporter, say, show_log
from megatron.training.resume import ResumePoint, ResumeSource
from megatron.training.spikes import SpikeGuard, stop_at_spike
from megatron.training.stopping import NonFiniteGuard, Stopping, StopRequest
from megatron.training.trainer import Callback, Position, Trainer
from megatron.util.errors import (
    RESTART_STATUS,
    FaultError,
    is_for_users,
    name_lost_pages,
    one_line,
)
from megatron.util.locks import Lock
from megatron.util.processes import is_main_process

Config = TypeVar("Config")

BEST_EVALUATION = "megatron.training.best:BestEvaluation"
"""The callback of ``--keep-best`` and ``--early-stopping-patience``, imported for them only."""

EVAL_TASKS = "megatron.tasks.during_training:EvalTasks"
"""The callback of ``--eval-tasks``, which is made of the run's configuration and its tokenizer. It
uses training and is imported for runs with the flag only."""

REFERENCE = "megatron.training.reference:add_reference"
"""Adds what a reference model finds to the data of a run whose loss needs it. It is called with the
run, the mesh and the data, and imported for such runs only."""

COMPARISONS = "megatron.training.comparisons:compare_ahead"
"""Makes an engine compute what kto compares answers with. It is called with the engine, and
imported for such runs only."""

DISTILLATION = "megatron.training.distillation.callback:Distillation"
"""The callback of ``--kd``, which is made of a run and imported for runs with the flag only."""

SECOND_LOOK = "megatron.training.second_look:SecondLook"
"""What ``--rerun-on-anomaly`` does with a step before its update; imported for runs with it."""

WATCHDOG = "megatron.resilience.watchdog:watchdog_of"
"""What ends a run that does not advance. It is made of the run's configuration."""

FINGERPRINT = "megatron.training.fingerprint"
"""What the processes of a run are compared by, imported where there are several."""

STRAGGLERS = "megatron.training.stragglers:Stragglers"
"""The callback that compares the ranks' own times, imported where there are several."""
ROLLBACK = "megatron.training.rollback:Rollback"
"""What ``--on-spike rollback`` does, imported for it only."""
NODE_CHECKPOINTS = "megatron.training.node_memory:NodeCheckpoints"
"""The callback of ``--non-persistent-save-interval``, which is made of the engine and imported for
runs with the flag only."""
RESTARTED = "megatron.training.restarted:restarted"
"""The callback of ``--inprocess-restart``, imported for runs with the flag only."""

OWN_CHECKPOINT = "megatron.training.restarted:from_own_checkpoint"
"""Changes what a run that has been started again loads; imported likewise."""

EXAMPLE_CHECKS = "megatron.training.example_checks:warn_of_examples"
"""Warns of what is probably wrong with instructions and preferences. It is called with the run and
its data, and imported for such data only."""


@dataclass(frozen=True)
class Run:
    """A training command, completed: ``content`` is the DeepSpeed JSON, ``resolved`` the
    configuration with the origin of every value, ``launched`` whether a launcher would end this
    process."""

    config: RunConfig
    content: Json
    tokenizer: Tokenizer
    resolved: Resolved
    launched: bool


def parse_run(
    description: str | None, argv: Sequence[str] | None = None, family: str | None = None
) -> Run:
    """Resolves flags, DeepSpeed JSON and checkpoint into a run of ``family`` (by default that of
    :class:`ModelConfig`), in each of its processes, which it starts if the flags say so
    (:func:`start_processes`). With ``--explain-config`` it prints every value with its origin and
    exits. Raises ValueError if a value is missing, wrong or contradicted; the message names it."""
    hidden = family_of(family).unused_flags if family else frozenset[str]()
    settings = FlagParser(*FLAG_CLASSES, description=description, hidden=hidden).settings(argv)
    show_log()
    if family is not None:
        given = settings.setdefault("family", Setting(family, "this program"))
        if given.value != family:
            raise ConfigError(
                f"--model-family {given.value}: this program trains {family}; leave the flag out, "
                f"or start pretrain_{given.value}.py"
            )
    run = run_of(settings, start_processes(settings, argv))
    show_configuration(run)
    return run


def show_configuration(run: Run) -> None:
    """With ``--explain-config`` prints every value with its origin and ends the process."""
    if run.config.training.explain_config:
        if is_main_process():
            print(explain(run.resolved))
        sys.exit(0)


def run_of(settings: Settings, processes: int, samples: str | None = None) -> Run:
    """Completes the settings of a training command for a number of processes; ``samples`` is the
    family of its data, if that is not the model's. Raises ValueError if a value is missing, wrong
    or contradicted; the message names it."""
    given = settings.get("deepspeed_config")
    path = given.value if given else ""
    content = read_json(path) if path else {}
    settings = deepspeed_json.merge(settings, content, path, processes)
    if "inprocess_restart" in settings:
        settings = resolve_name(OWN_CHECKPOINT)(settings)
    settings = resume.with_origin(resume.with_checkpoint(with_corpora(settings)))
    trained = settings["family"].value if "family" in settings else ModelConfig.family
    family = family_of(samples or trained)
    refuse_unused(settings, family)
    settings = _with_tokenizer_type(family.complete_settings(settings), family)
    resolved = resolve(settings, processes)
    named = resolved.config.tokenizer
    tokenizer = build_tokenizer(named, training_texts(resolved.config))
    # A model may have more rows than its tokenizer has tokens: a checkpoint says how many.
    rows = max(resolved.config.model.vocabulary.size, vocabulary_rows(named, tokenizer))
    resolved = resolved.with_vocabulary(rows)
    if rows == named.vocab_size != tokenizer.vocab_size:
        note = f"--vocab-size {rows} is more than the tokenizer's {tokenizer.vocab_size} ids"
        resolved = dataclasses.replace(resolved, notes=(*resolved.notes, note))
    completed = deepspeed_json.complete(content, resolved.config)
    notes = deepspeed_json.stage_notes(completed, resolved.config)
    notes += output_notes(completed, path)
    resolved = dataclasses.replace(resolved, notes=(*resolved.notes, *notes))
    launched = "LOCAL_RANK" in os.environ
    return Run(resolved.config, completed, tokenizer, resolved, launched)


def _with_tokenizer_type(settings: Settings, family: Family) -> Settings:
    """Adds the tokenizer's type where the other flags imply it."""
    if "tokenizer_type" in settings:
        return settings
    implied = implied_type(build(TokenizerConfig, settings), family.tokenizer_type)
    if implied is None:
        return settings
    value, reason = implied
    return settings | {"tokenizer_type": Setting(value, f"derived: {reason}")}


class RunToolParser(FlagParser, Generic[Config]):
    """Parser of a tool about a run: the flags of the tool's ``config`` class, which --help shows,
    and those of training, except where the tool has a field of the same name."""

    def __init__(
        self, config: type[Config], description: str | None, epilog: str | None = None
    ) -> None:
        self._config = config
        super().__init__(config, *FLAG_CLASSES, description=description)
        self.epilog = epilog

    def format_help(self) -> str:
        """The text of --help."""
        own = FlagParser(self._config, description=self.description, prog=self.prog)
        own.usage, own.epilog = "%(prog)s [flags] [flags of pretrain_gpt.py]", self.epilog
        return own.format_help()

    def parse(self, argv: Sequence[str] | None = None) -> tuple[Config, Settings]:
        """The tool's options, and the settings of the run; log messages are shown from now on.
        Raises ConfigError if an option is out of its bounds."""
        show_log()
        settings = self.settings(argv)
        ConfigResolver((self._config,), settings)
        own = {field.name for field in dataclasses.fields(self._config)}  # type: ignore[arg-type]
        rest = {name: setting for name, setting in settings.items() if name not in own}
        return build(self._config, settings), rest


def run_data(run: Run) -> TrainingData:
    """The datasets of training, validation and test, and the function that batches samples. Raises
    ValueError or OSError, naming flag and file, if data cannot be used."""
    plan = TrainingPlan(run.config)
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    return data.training_data(plan.sample_counts, plan.batch_sizes)


def add_reference(run: Run, mesh: Mesh, data: TrainingData) -> None:
    """Adds what a reference model finds to the data, if the loss of the run needs it. Raises
    ValueError or OSError, naming the flag, if there is no reference or it cannot be used."""
    if run.config.kind(PreferenceConfig).needs_reference:
        resolve_name(REFERENCE)(run, mesh, data)


def build_trainer(
    run: Run,
    mesh: Mesh,
    callbacks: Sequence[Callback] = (),
    data: TrainingData | None = None,
    epochs: Epochs | None = None,
) -> Trainer:
    """The trainer of a run: model, data, checkpoints, logging and signals. ``callbacks`` are called
    before those of the run; ``data`` take the place of the run's own, and ``epochs`` that of its
    length. Raises ValueError or OSError if data or checkpoints cannot be used; the message names
    them."""
    config, device = run.config, training_device()
    tasks = [resolve_name(EVAL_TASKS)(config, run.tokenizer)] if config.tasks.eval_tasks else []
    data = data or run_data(run)
    if config.data.verify_data:
        verify_checksums([file.path for file in data.files()], mesh.world.rank, mesh.world.size)
    files_of = data.files
    agreement.compare(lambda: _fingerprint().data_facts(files_of()))
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
    if data.weighed:
        resolve_name(EXAMPLE_CHECKS)(run, data)
    add_reference(run, mesh, data)
    teaching = [resolve_name(DISTILLATION)(run)] if config.distillation.kd else []
    spec = trained_spec(config)
    engine = build_engine(config, run.content, spec, mesh, device)
    files = data.files() if checkpoint is not None or config.checkpoint.save else []
    saved = [file._asdict() for file in files]
    writer = checkpoint_writer(engine, run.content, run.tokenizer.save_pretrained, saved)
    in_memory, on_disk = [], checkpoint
    if config.resilience.non_persistent_save_interval is not None:
        in_memory = [resolve_name(NODE_CHECKPOINTS)(engine)]
        checkpoint = in_memory[0].newest(on_disk)
    begin = resume.load(engine, plan, checkpoint, files)
    if begin.skip_samples != config.data.skip_samples:
        data = data.skipping(begin.skip_samples)
    if config.kind(PreferenceConfig).preference == "kto":
        resolve_name(COMPARISONS)(engine)
    report = Reporter(run.resolved, plan, mesh, device, begin)
    for teacher in teaching:
        teacher.start(engine, data, plan, begin.consumed_samples)
        report.beside = teacher.flops
    replicas = ReplicaCheck(engine, config.resilience.check_replicas_interval)
    compared = []
    if mesh.world.size > 1:
        compared = [resolve_name(STRAGGLERS)(config.resilience, mesh, device, report)]
    newest = begin.folder if begin.iteration else None
    if checkpoint is not on_disk:
        newest = on_disk.found.folder if on_disk is not None and on_disk.continues else None
    interval = config.checkpoint.save_interval
    checkpoints = CheckpointManager(writer, report, interval, newest, replicas.check)
    replicas.newest = lambda: checkpoints.newest_shown
    for saves in in_memory:
        saves.check = replicas.check
        saves.begin(checkpoints)
    guard = NonFiniteGuard(
        device,
        config.precision.fp16,
        config.training.check_for_nan_in_loss_and_grad,
        config.training.max_skipped_steps,
        ruined=lambda: ruined(engine),
        newest=lambda: checkpoints.newest_shown,
        fresh=begin.iteration == 0,
        replicas=replicas.check,
    )
    spikes = _spike_guard(config, device, checkpoints, begin, checkpoint, files)
    looks = []
    if config.resilience.rerun_on_anomaly != "disabled":
        looks = [resolve_name(SECOND_LOOK)(run, engine, data, report, spikes)]
    return Trainer(
        engine,
        data,
        plan,
        (
            _Closing(engine, lock),
            *callbacks,
            *teaching,
            *tasks,
            Stopping(request, device, mesh.world.size, config.training.exit_interval),
            *compared,
            report,
            guard,
            *looks,
            *spikes,
            replicas,
            *in_memory,
            checkpoints,
            *_restarted(config, checkpoints, report, begin),
            *best_evaluation(config, checkpoints, mesh, begin.iteration),
            *profiling(config, engine, begin.iteration),
        ),
        Position(begin.iteration, begin.consumed_samples),
        config.data.num_workers,
    )


def _spike_guard(
    config: RunConfig,
    device: torch.device,
    checkpoints: CheckpointManager,
    begin: ResumePoint,
    origin: ResumeSource | None,
    files: Sequence[DataFile],
) -> list[Callback]:
    """What judges the steps of a run, and acts on spikes as ``--on-spike`` says."""
    flags = config.resilience
    if not flags.spike_sigma:
        return []
    found = SpikeGuard(device, flags, checkpoints, begin.spikes)
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
    if not config.resilience.inprocess_restart:
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


@contextlib.contextmanager
def connected(run: Run, *more: Any, watched: bool = True) -> Iterator[Mesh]:
    """The mesh of a run's processes, which are compared first, also by the dataclasses of flags
    ``more`` of a tool. A watchdog ends the run where it does not advance, unless it may wait as
    long as it likes (``watched``). Raises what :func:`distributed` raises, and LostRankError."""

    def facts() -> agreement.Facts:
        facts: agreement.Facts = _fingerprint().run_facts(run.config, run.content, *more)
        return facts

    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(resolve_name(WATCHDOG)(run.config)) if watched else None
        mesh = stack.enter_context(distributed(run.config.parallel, facts))
        if watchdog is not None:
            stack.callback(watchdog.part)
            stack.enter_context(watchdog.explaining())
        yield mesh


def compare_checkpoints(
    found: Sequence[FoundCheckpoint | None], config: RunConfig | None = None
) -> None:
    """Compares the checkpoints that the processes of a run load, the last thing that they compare;
    with ``config`` also those that its flags name beside them. Raises DisagreementError if they
    differ."""
    agreement.compare(lambda: _fingerprint().checkpoint_facts(found, config))
    agreement.settled()


def _fingerprint() -> Any:
    return import_module(FINGERPRINT)


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


@contextlib.contextmanager
def errors_for_users() -> Iterator[None]:
    """Turns errors about the user's input into one line and exit status 2. These are errors that
    this package raised with a message for users; anything raised deeper (torch, deepspeed, an
    assertion) keeps its traceback. A mapped file that is cut short ends the process likewise."""
    name_lost_pages()
    try:
        yield
    except agreement.DisagreementError as error:
        _print_error(error)
        sys.exit(2)
    except FaultError as error:
        agreement.give_up(str(error))
        if is_main_process() or hasattr(error, "status"):
            _print_error(error)
        else:
            time.sleep(1)  # the launcher ends all others as soon as one has ended
        sys.exit(getattr(error, "status", RESTART_STATUS))
    except (ValueError, OSError) as error:
        if not is_for_users(error):
            agreement.give_up(repr(error))
            raise
        if is_main_process():
            _print_error(error)
            agreement.give_up(str(error))
        else:
            # Usually all processes find the same error; the launcher ends this one once the main
            # process has printed it.
            time.sleep(1 if agreement.give_up(str(error)) else 5)
            _print_error(error)
        sys.exit(2)
    except SystemExit:  # also of --help and --explain-config, which only one may have been given
        agreement.give_up("it has ended before the run began; see what it printed")
        raise
    except BaseException as error:
        agreement.give_up(repr(error))
        raise


def _print_error(error: Exception) -> None:
    who = "" if is_main_process() else f"rank {os.environ['RANK']}: "
    print(f"{who}error: {one_line(error)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ending_process() -> Iterator[None]:
    """Ends the process after a command without finalising the interpreter. gloo's threads release
    tensors some time after a collective. When that happens during finalisation, they cannot get the
    interpreter's lock and abort the finished process with SIGABRT (torch 2.13)."""
    status: Any = 0
    try:
        yield
    except SystemExit as exit:
        status = exit.code
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
