"""Reports of evaluations: results, the final table, a JSON file, and a plot over checkpoints."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import megatron
from megatron.apps.pictures.plots import shown_metrics
from megatron.apps.pictures.run_curves import Panel, RunCurve, draw_panels
from megatron.apps.profiling.tables import aligned
from megatron.config import RunConfig
from megatron.util.files import write_whole
from megatron.util.progress import say


@dataclass(frozen=True)
class TaskResult:
    """Result of one task with one model.

    Attributes:
        metrics: values by name: ``loss`` in nats per token, ``perplexity``, ``accuracy`` and
            similar fractions, ``bits_per_byte`` of the original text.
        examples: number of rows, windows or questions, each counted once.
        tokens: number of tokens whose probability was computed.
        lines: text that the task prints in addition to the table.
        details: further JSON values for the results file.
    """

    name: str
    metrics: Mapping[str, float]
    examples: int
    tokens: int
    seconds: float
    lines: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class EvaluatedModel:
    """Description of the evaluated model. ``checkpoint`` is None for random weights. ``iteration``
    is None if the checkpoint's format does not record it."""

    checkpoint: str | None
    iteration: int | None
    layout: Mapping[str, Any]
    tokenizer: str | None

    @classmethod
    def of(cls, config: RunConfig, folder: Path | None, iteration: int | None) -> EvaluatedModel:
        """Return the description of a run's model with the weights of a checkpoint."""
        layout = config.layout()
        shown = {name: getattr(layout, name) for name in ("tensor", "pipeline", "data")}
        shown |= {"context": layout.context} if layout.context > 1 else {}
        shown |= {"sequence_parallel": layout.sequence, "precision": layout.precision}
        where = None if folder is None else str(folder)
        return cls(where, iteration, shown, config.tokenizer.tokenizer_type)


class ModelResults(NamedTuple):
    """Results of the tasks that were evaluated on a model."""

    model: EvaluatedModel
    results: Sequence[TaskResult]


def bits_per_byte(log_prob: float, text_bytes: int) -> float:
    """Return the bits per byte of a text whose log-probability is ``log_prob`` nats. Unlike the
    loss per token, the value does not depend on the tokenizer."""
    return -log_prob / math.log(2) / text_bytes


def table(results: Sequence[TaskResult]) -> str:
    """Return an aligned table with one line per metric of each task: task, metric, value, examples,
    and tokens/s if token probabilities were computed."""
    rows = [("task", "metric", "value", "examples", "tokens/s")]
    for result in results:
        speed = f"{result.tokens_per_second:,.0f}" if result.tokens else ""
        facts = result.name, f"{result.examples:,}", speed
        for name, value in result.metrics.items():
            task, examples, speed = facts
            rows.append((task, name.replace("_", " "), f"{value:.6g}", examples, speed))
            facts = "", "", ""
    return ruled(rows, texts=2)


def table_of_checkpoints(evaluations: Sequence[ModelResults]) -> str:
    """Return a table with one line per iteration and one column per task and metric."""
    every = [result for each in evaluations for result in each.results]
    columns = dict.fromkeys((result.name, name) for result in every for name in result.metrics)
    rows = [("iteration", *(f"{task} {name.replace('_', ' ')}" for task, name in columns))]
    for model, results in evaluations:
        metrics = {(r.name, name): value for r in results for name, value in r.metrics.items()}
        values = (f"{metrics[key]:.6g}" if key in metrics else "" for key in columns)
        rows.append((str(model.iteration), *values))
    return ruled(rows)


def ruled(rows: Sequence[Sequence[str]], texts: int = 0) -> str:
    """Return an aligned table with a rule below the first row. The first ``texts`` columns are
    left-aligned, the others right-aligned."""
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return aligned([rows[0], rule, *rows[1:]], texts)


def finish(evaluations: Sequence[ModelResults], output: str | None, plot: Path | None) -> None:
    """Print the final table, and write the JSON file ``output`` if given. For several checkpoints,
    also draw ``plot`` if given."""
    several = len(evaluations) > 1
    say(table_of_checkpoints(evaluations) if several else table(evaluations[0].results))
    if output is not None:
        write_results(Path(output), evaluations)
    if several and plot is not None:
        draw_checkpoints(evaluations, plot)
        say(f"curves of {len(evaluations)} checkpoints: {plot}")
    tokens = sum(result.tokens for each in evaluations for result in each.results)
    seconds = sum(result.seconds for each in evaluations for result in each.results)
    if tokens:
        say(f"{tokens:,} tokens in {seconds:.1f} s: {tokens / max(seconds, 1e-9):,.0f} tokens/s")


def write_results(path: Path, evaluations: Sequence[ModelResults]) -> None:
    """Write a JSON file with package versions, and the description and results of each model."""
    content = {
        "versions": versions(),
        "evaluations": [
            {
                "model": asdict(model),
                "tasks": {
                    result.name: {
                        "metrics": dict(result.metrics),
                        "examples": result.examples,
                        "tokens": result.tokens,
                        "seconds": result.seconds,
                        "tokens_per_second": result.tokens_per_second,
                        **result.details,
                    }
                    for result in results
                },
            }
            for model, results in evaluations
        ],
    }
    write_json(path, content)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, which appears only when it is complete. NaN and infinity become null,
    since JSON lacks them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(_with_nulls(content), indent=2) + "\n").encode())


def _with_nulls(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _with_nulls(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_with_nulls(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def versions() -> dict[str, str]:
    versions_of = {"megatron-deepspeed": megatron.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "transformers", "deepspeed", "lm_eval"):
        with suppress(PackageNotFoundError):
            versions_of[package] = version(package)
    return versions_of


def draw_checkpoints(evaluations: Sequence[ModelResults], output_png: Path) -> None:
    """Plot the results over iterations, with one panel per metric, bits per byte first."""
    series: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for model, results in evaluations:
        for result in results:
            for metric in shown_metrics(result.metrics):
                steps, values = series.setdefault(metric, {}).setdefault(result.name, ([], []))
                steps.append(model.iteration or 0)
                values.append(result.metrics[metric])
    order = sorted(series, key=lambda metric: metric != "bits_per_byte")
    panels = [
        Panel(m.replace("_", " "), [RunCurve(name, *xy) for name, xy in series[m].items()])
        for m in order
    ]
    draw_panels(panels, output_png, "iteration")
