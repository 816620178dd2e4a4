"""Tasks ``WIKITEXT103``, ``LAMBADA`` and ``RAW`` of ``--task``, on one or all checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.apps.tasks.config import TaskConfig, check_inputs, wanted_checkpoints
from megatron.apps.tasks.report import EvaluatedModel, ModelResults, finish
from megatron.apps.tasks.zeroshot.tasks import ZeroShotTask, prepare
from megatron.checkpoint.source import FoundCheckpoint
from megatron.config import ConfigError, ModelConfig, Setting, Settings
from megatron.config.output import check_output
from megatron.engine.environment import training_device
from megatron.engine.loading import load_checkpoint
from megatron.families import family_of, spec_of
from megatron.features.evaluation.checkpoints import evaluation_settings
from megatron.features.evaluation.evaluator import Evaluator, build_evaluator
from megatron.features.raw_text.flags import RawTextConfig
from megatron.parallel.meeting import run_meeting
from megatron.run.process import connected
from megatron.run.run import Run, run_of, show_configuration
from megatron.util.processes import is_main_process
from megatron.util.progress import move_to, progress_bar, say

_PREPARED = {"WIKITEXT103": "wikitext", "LAMBADA": "lambada", "RAW": "json"}
"""Task names that :func:`prepare` expects, by value of ``--task``."""
_WIKITEXT_STRIDE = 32


def run_zero_shot(config: TaskConfig, settings: Settings, processes: int) -> None:
    """Run the task that ``--task`` selects. See
    :data:`megatron.apps.tasks.command.TaskFunction`."""
    name = str(config.task)
    if not config.valid_data:
        raise ConfigError(f"--task {name} needs --valid-data, the file to evaluate on")
    family = settings.get("family", Setting(ModelConfig.family, "default"))
    if not family_of(family.value).generates:
        raise ConfigError(
            f"--task {name} measures how a model continues text, and a model of the family "
            f"{family.value} ({family.origin.removeprefix('flag ')}) does not continue any; give a "
            "checkpoint of a model that does, or another --task"
        )
    check_inputs("--valid-data", config.valid_data)
    check_output("--output", config.output)
    used, unused = evaluation_settings(settings, config.eval_micro_batch_size)
    run = run_of(used, processes)
    show_configuration(run)
    notes = [*run.resolved.notes, *_notes(config, settings, unused)]
    with connected(run, config) as mesh:
        tell: Callable[[str], None] = say if is_main_process() else lambda line: None
        for note in notes:
            tell(note)
        task = _prepared(config, settings, run)
        for note in task.notes:
            tell(note)
        checkpoints = wanted_checkpoints(run.config.checkpoint, config.all_iterations)
        run_meeting().compare_checkpoints(checkpoints)
        spec = spec_of(run.config.model, run.config.parallel)
        engine = build_evaluator(run.config, spec, mesh, training_device())
        evaluated = [_evaluated(name, task, engine, checkpoint, tell) for checkpoint in checkpoints]
        if is_main_process():
            plots = Path(config.output or f"{run.config.checkpoint.load}/{name}")
            finish(evaluated, config.output, plots.with_suffix(".png"))


def _notes(config: TaskConfig, settings: Settings, unused: list[str]) -> list[str]:
    """Return messages about unused flags, and the model family's note about scoring."""
    name, task = config.task, _PREPARED[str(config.task)]
    ignored = {
        "--train-data": config.train_data,
        "--epochs": config.epochs is not None,
        "--keep-last": config.keep_last != TaskConfig.keep_last,
        "--strict-lambada": config.strict_lambada and task != "lambada",
        "--overlapping-eval": config.overlapping_eval and task == "lambada",
        "--eval-iters": "eval_iters" in settings and task != "json",
    }
    note = family_of(settings["family"].value).scoring_note if "family" in settings else None
    lines = [] if note is None else [f"--task {name}: {note}"]
    flags = sorted({flag for flag, value in ignored.items() if value} | set(unused))
    if flags:
        lines.append(f"--task {name} uses all of --valid-data and does not use {', '.join(flags)}")
    return lines


def _prepared(config: TaskConfig, settings: Settings, run: Run) -> ZeroShotTask:
    task, length, most = _PREPARED[str(config.task)], run.config.model.seq_length, None
    stride = min(_WIKITEXT_STRIDE, length) if task == "wikitext" else length
    if "eval_iters" in settings:
        most = run.config.training.eval_iters * run.config.training.global_batch_size
    if most == 0:
        raise ConfigError("--eval-iters 0 leaves nothing to evaluate")
    return prepare(
        task,
        config.valid_data,
        run.tokenizer,
        run.config.model,
        config.overlapping_eval or stride,
        config.strict_lambada,
        raw=run.config.section(RawTextConfig),
        most_windows=most,
    )


def _evaluated(
    name: str,
    task: ZeroShotTask,
    engine: Evaluator,
    found: FoundCheckpoint | None,
    tell: Callable[[str], None],
) -> ModelResults:
    """Return a checkpoint's results, or the results of random weights if ``found`` is None."""
    config, iteration, folder = engine.config, None, None
    if found is None:
        tell("no --load: the weights are random")
        engine.initialise()
    else:
        source = load_checkpoint(engine, found, weights_only=True)
        iteration, folder = source.state.get("iteration"), source.folder
        for note in source.notes:
            tell(note)
    size, every = config.training.micro_batch_size, config.logging.log_interval
    with _progress(name, len(task.texts), size * engine.mesh.samples.size, every, tell) as shown:
        result = task.evaluate(engine, size, shown)
    read = sum(len(text.context) + len(text.continuation) - 1 for text in task.texts)
    speed = read / max(result.seconds, 1e-9)
    tell(f" > {read:,} tokens read in {result.seconds:.1f} s: {speed:,.0f} tokens/s")
    for line in result.lines:
        tell(line)
    return ModelResults(EvaluatedModel.of(config, folder, iteration), [result])


@contextmanager
def _progress(
    name: str, texts: int, per_iteration: int, every: int, tell: Callable[[str], None]
) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows the number of completed texts: with a progress bar on a terminal,
    and with Megatron-LM's lines, one every ``every`` iterations of ``per_iteration`` texts."""
    lines_shown = -1
    with progress_bar(name, total=texts, unit=" texts") as bar:

        def show(done: int) -> None:
            nonlocal lines_shown
            move_to(bar, done)
            lines = done // (per_iteration * every)
            if lines > lines_shown and done < texts:
                lines_shown = lines
                tell(f"> working on iteration: {lines * every}")

        show(0)
        yield show
