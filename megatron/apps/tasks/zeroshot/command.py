"""``--task WIKITEXT103``, ``LAMBADA`` and ``RAW``: one checkpoint, one task, its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.apps.tasks.config import TaskConfig
from megatron.apps.tasks.inputs import check_inputs, wanted_checkpoints
from megatron.apps.tasks.registry import TaskCommand
from megatron.apps.tasks.report import (
    EvaluatedModel,
    ModelResults,
    finish,
)
from megatron.apps.tasks.zeroshot import ZeroShotTask, prepare
from megatron.checkpoint.source import FoundCheckpoint
from megatron.config import (
    ConfigError,
    ModelConfig,
    Setting,
    Settings,
)
from megatron.engine.environment import training_device
from megatron.engine.evaluator import Evaluator, build_evaluator
from megatron.engine.loading import load_checkpoint
from megatron.families import family_of, spec_of
from megatron.features.raw_text.flags import RawTextConfig
from megatron.run.folders import check_output
from megatron.run.process import compare_checkpoints, connected
from megatron.run.run import (
    Run,
    run_of,
    show_configuration,
)
from megatron.training.evaluation import evaluation_settings
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

STRIDE = 32
"""Of WIKITEXT103's windows, unless they are shorter."""


@dataclass(frozen=True)
class ZeroShot(TaskCommand):
    """A zero-shot task of ``tasks/main.py``.

    Attributes:
        name: of ``--task``.
        task: of :func:`prepare`.
        stride: of windows, where no flag gives it; None: that of the sequence length.
    """

    name: str
    task: str
    stride: int | None = None

    def run(self, config: TaskConfig, settings: Settings, processes: int) -> None:
        """See :meth:`TaskCommand.run`."""
        if not config.valid_data:
            raise ConfigError(f"--task {self.name} needs --valid-data, the file to evaluate on")
        self._check_family(settings)
        check_inputs("--valid-data", config.valid_data)
        check_output("--output", config.output)
        used, unused = evaluation_settings(settings, config.eval_micro_batch_size)
        run = run_of(used, processes)
        show_configuration(run)
        notes = [*run.resolved.notes, *self._notes(config, settings, unused)]
        with connected(run, config) as mesh:
            tell: Callable[[str], None] = say if is_main_process() else lambda line: None
            for note in notes:
                tell(note)
            task = self._prepared(config, settings, run)
            for note in task.notes:
                tell(note)
            checkpoints = wanted_checkpoints(run.config.checkpoint, config.all_iterations)
            compare_checkpoints(checkpoints)
            device = training_device()
            spec = spec_of(run.config.model, run.config.parallel)
            engine = build_evaluator(run.config, spec, mesh, device)
            evaluated = [self._evaluated(task, engine, found, tell) for found in checkpoints]
            if is_main_process():
                plots = Path(config.output or f"{run.config.checkpoint.load}/{self.name}")
                finish(evaluated, config.output, plots.with_suffix(".png"))

    def _evaluated(
        self,
        task: ZeroShotTask,
        engine: Evaluator,
        found: FoundCheckpoint | None,
        tell: Callable[[str], None],
    ) -> ModelResults:
        """A checkpoint's results; None: those of random weights."""
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
        texts, per_round = len(task.texts), size * engine.mesh.data.size
        with EvaluationProgress(self.name, texts, per_round, every, tell) as shown:
            result = task.evaluate(engine, size, shown)
        read = sum(len(text.context) + len(text.continuation) - 1 for text in task.texts)
        speed = read / max(result.seconds, 1e-9)
        tell(f" > {read:,} tokens read in {result.seconds:.1f} s: {speed:,.0f} tokens/s")
        for line in result.lines:
            tell(line)
        return ModelResults(EvaluatedModel.of(config, folder, iteration), [result])

    def _check_family(self, settings: Settings) -> None:
        family = settings.get("family", Setting(ModelConfig.family, "default"))
        if not family_of(family.value).generates:
            raise ConfigError(
                f"--task {self.name} measures how a model continues text, and a model of the "
                f"family {family.value} ({family.origin.removeprefix('flag ')}) does not continue "
                "any; give a checkpoint of a model that does, or another --task"
            )

    def _notes(self, config: TaskConfig, settings: Settings, unused: list[str]) -> list[str]:
        """Lines about flags that change nothing, and about the family."""
        given = {
            "--train-data": config.train_data,
            "--epochs": config.epochs is not None,
            "--keep-last": config.keep_last != TaskConfig.keep_last,
            "--strict-lambada": config.strict_lambada and self.task != "lambada",
            "--overlapping-eval": config.overlapping_eval and self.task == "lambada",
            "--eval-iters": "eval_iters" in settings and self.task != "json",
        }
        note = family_of(settings["family"].value).scoring_note if "family" in settings else None
        lines = [] if note is None else [f"--task {self.name}: {note}"]
        flags = sorted({flag for flag, value in given.items() if value} | set(unused))
        if not flags:
            return lines
        return [
            *lines,
            f"--task {self.name} uses all of --valid-data and does not use {', '.join(flags)}",
        ]

    def _prepared(self, config: TaskConfig, settings: Settings, run: Run) -> ZeroShotTask:
        length = run.config.model.seq_length
        stride = config.overlapping_eval or min(self.stride or length, length)
        training, most = run.config.training, None
        if "eval_iters" in settings:
            most = training.eval_iters * training.global_batch_size
        if most == 0:
            raise ConfigError("--eval-iters 0 leaves nothing to evaluate")
        return prepare(
            self.task,
            config.valid_data,
            run.tokenizer,
            run.config.model,
            stride,
            config.strict_lambada,
            raw=run.config.section(RawTextConfig),
            most_windows=most,
        )


class EvaluationProgress:
    """Shows how far an evaluation is: a bar on a terminal, and upstream's lines.

    Args:
        texts: all that are to be scored.
        per_iteration: texts in a forward pass of all ranks.
        every: iterations between two lines.
    """

    def __init__(
        self, name: str, texts: int, per_iteration: int, every: int, tell: Callable[[str], None]
    ) -> None:
        self._bar = progress_bar(name, total=texts, unit=" texts")
        self._texts, self._per_line, self._every = texts, per_iteration * every, every
        self._tell = tell
        self._told = -1
        self._done = 0

    def __enter__(self) -> EvaluationProgress:
        self(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, done: int) -> None:
        self._bar.update(done - self._done)
        self._done, lines = done, done // self._per_line
        if lines > self._told and done < self._texts:
            self._told = lines
            self._tell(f"> working on iteration: {lines * self._every}")


WIKITEXT103 = ZeroShot("WIKITEXT103", "wikitext", STRIDE)
LAMBADA = ZeroShot("LAMBADA", "lambada")
RAW = ZeroShot("RAW", "json")
