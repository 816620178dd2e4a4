"""Compatibility with lm-eval 0.2, the version that Megatron-DeepSpeed uses: task names, the format
of results, and results as rows of a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.config.output import check_output
from megatron.util.files import write_whole
from megatron.util.json_text import parse_json

_NAMES = {
    "lambada": "lambada_openai",
    "lambada_cloze": "lambada_openai_cloze_yaml",
    "lambada_openai_cloze": "lambada_openai_cloze_yaml",
    "lambada_standard_cloze": "lambada_standard_cloze_yaml",
    "mnli_mismatched": "mnli_mismatch",
    "sst": "sst2",
    "squad2": "squadv2",
    "math_asdiv": "asdiv",
}
_BEGINNINGS = {"hendrycksTest-": "mmlu_", "math_": "hendrycks_math_", "iwslt17-": "iwslt2017-"}
_METRICS = {"perplexity": "ppl", "exact_match": "acc"}
"""Names that 0.2 uses for metrics that were renamed later."""
COLUMNS = ("task", "metric", "value", "err", "version")
_IN_TABLE = ("acc", "acc_norm", "f1")


def name_today(name: str) -> str:
    """Return the lm-eval 0.4 name of a task of lm-eval 0.2."""
    if name in _NAMES:
        return _NAMES[name]
    for old, new in _BEGINNINGS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def results_02(results: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Convert results of lm-eval 0.4 to the keys of 0.2: the version of each task, and its metrics
    with standard errors under their 0.2 names. Only the first filter's values are kept. ``model``
    is the checkpoint."""
    kept_metrics: dict[str, dict[str, float]] = {}
    for task, values in results["results"].items():
        metrics = kept_metrics.setdefault(task, {})
        for key, value in values.items():
            metric, comma, _ = key.partition(",")
            name = metric.removesuffix("_stderr")
            if not comma or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            metrics.setdefault(_METRICS.get(name, name) + metric[len(name) :], value)
    config, shots = results["config"], results["n-shot"]
    equal = len(set(shots.values())) == 1
    kept = {key: config.get(key) for key in ("batch_size", "limit", "bootstrap_iters")}
    return {
        "results": kept_metrics,
        "versions": dict(results["versions"]),
        "config": kept | {"model": model, "num_fewshot": max(shots.values()) if equal else shots},
    }


def rows(results: Any, where: str) -> Iterator[tuple[Any, ...]]:
    """Yield a row of :data:`COLUMNS` for each accuracy, normalised accuracy and F1 score in a
    results file of lm-eval 0.2 or 0.4. Raises ConfigError if the content is not such results.
    ``where`` is the file, for the message."""
    tasks = results.get("results") if isinstance(results, dict) else None
    if not isinstance(tasks, dict) or not all(isinstance(each, dict) for each in tasks.values()):
        raise ConfigError(f'{where} has no results of tasks: expected {{"results": {{...}}}}')
    versions = results.get("versions") or {}
    if not isinstance(versions, dict):
        raise ConfigError(f'{where}: "versions" must be an object with a version for each task')
    for task, values in sorted(tasks.items()):
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if metric in _IN_TABLE:
                error = values.get(f"{metric}_stderr{comma}{filtered}", "")
                yield task, metric, value, error, versions.get(task, "")


def write_table(path: Path, output: str | None = None) -> str:
    """Write the :func:`rows` of a results file as CSV with a header line, by default next to it
    with the suffix .csv. Return a summary. Raises ConfigError, ValueError or OSError, naming the
    file, if a file cannot be used."""
    target = Path(output) if output else path.with_suffix(".csv")
    if not path.is_file():
        raise ConfigError(f"RESULTS {path}: there is no such file")
    if target.resolve() == path.resolve():
        raise ConfigError(f"{path} would be overwritten; give another --output")
    check_output("--output", target)
    table = list(rows(parse_json(path.read_bytes(), str(path), lenient=True), str(path)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(table)
    write_whole(target, text.getvalue().encode())
    return f"{target}: {len(table)} rows"
